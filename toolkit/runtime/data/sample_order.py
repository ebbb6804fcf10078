"""The global, seeded order of samples, independent of strategy, world size and micro-batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from toolkit.recipe.batch_sections import BatchRamp
from toolkit.recipe.schedules import Batches
from toolkit.runtime.distributed.process_group import gather_objects

PAST_END = -1
"""Id of a missing sample: a run's last batch may be partial, and missing samples are not counted."""
WINDOW, BLOCK = 2048, 64
"""Samples that are sorted by length at a time, and samples of similar length that stay together."""


@dataclass(frozen=True)
class MixturePart:
    """One source of a mixture."""

    samples: int
    """Number of samples of the source."""
    drawn: int
    """Samples that an epoch draws; the next epoch continues where it stopped."""


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The samples of each step over all ranks; depends only on the data, the seed and the global batch."""

    samples: int
    """Number of samples."""
    global_batch: int
    seed: int
    first_step: int = 0
    """First step of this order: 0, or the step at which the run was resumed."""
    first_position: int = 0
    """Samples used before `first_step`."""
    total: int | None = None
    """Samples of the full run if it ends with an epoch; None if the number of steps decides."""
    parts: tuple[MixturePart, ...] = ()
    """Sources of a mixture, concatenated in the sample ids."""
    streamed: bool = False
    """Whether samples are numbered as they arrive, and each step uses the next ones."""
    ramp: BatchRamp | None = None
    """How the global batch grows."""
    lengths: np.ndarray | None = None
    """Lengths of the samples, if they differ: samples of similar length share a batch."""
    _epochs: dict[int, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @property
    def epoch_samples(self) -> int:
        """Number of samples of an epoch."""
        return sum(part.drawn for part in self.parts) if self.parts else self.samples

    def step(self, step: int) -> np.ndarray:
        """Sample ids of a step, counted from 0. The end of an epoch shares a batch with the start of the next."""
        positions = np.arange(self.position(step), self.position(step + 1))
        if self.streamed:
            return positions
        epochs, places = np.divmod(positions, self.epoch_samples)
        ids = np.concatenate([self._epoch(int(e))[places[epochs == e]] for e in np.unique(epochs)])
        return ids if self.total is None else np.where(positions < self.total, ids, PAST_END)

    def position(self, step: int) -> int:
        """Number of samples used before a step."""
        return self.first_position + self.batches.before(step) - self.batches.before(self.first_step)

    @property
    def batches(self) -> Batches:
        """Number of samples of each step."""
        return Batches(self.global_batch, self.ramp)

    def moved(self, step: int, position: int) -> SampleOrder:
        """This order with `position` samples used before `step`, to continue with another global batch."""
        return replace(self, first_step=step, first_position=position)

    def _epoch(self, epoch: int) -> np.ndarray:
        if epoch not in self._epochs:
            for old in [known for known in self._epochs if known < epoch - 1]:
                del self._epochs[old]
            self._epochs[epoch] = self._shuffled(epoch)
        return self._epochs[epoch]

    def _shuffled(self, epoch: int) -> np.ndarray:
        random = np.random.default_rng([self.seed, epoch])
        ids = random.permutation(self._drawn(epoch)) if self.parts else random.permutation(self.samples)
        return ids if self.lengths is None else _grouped(ids, self.lengths, random)

    def _drawn(self, epoch: int) -> np.ndarray:
        """Sample ids that an epoch draws from the sources."""
        found, first = [], 0
        for number, part in enumerate(self.parts):
            start, end = epoch * part.drawn, (epoch + 1) * part.drawn
            for turn in range(start // part.samples, -(-end // part.samples)):
                shuffled = np.random.default_rng([self.seed, number, turn]).permutation(part.samples)
                low, high = max(start - turn * part.samples, 0), min(end - turn * part.samples, part.samples)
                found.append(first + shuffled[low:high])
            first += part.samples
        return np.concatenate(found)


def mixture(sizes: list[int], weights: list[float]) -> tuple[MixturePart, ...]:
    """Parts of an epoch, by weight; an epoch has as many samples as all sources together."""
    exact = np.asarray(weights) / sum(weights) * sum(sizes)
    drawn = np.floor(exact).astype(int)
    for place in np.argsort(drawn - exact, kind="stable")[: sum(sizes) - drawn.sum()]:
        drawn[place] += 1
    return tuple(MixturePart(size, max(1, int(count))) for size, count in zip(sizes, drawn, strict=True))


def own_share(ids: np.ndarray, *, replica: int, replicas: int) -> np.ndarray:
    """A replica's samples of a global batch."""
    return np.array_split(ids, replicas)[replica]


def _grouped(ids: np.ndarray, lengths: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Reorder ids so that neighbours have similar lengths: sort within windows, then shuffle the blocks of all windows.

    Nothing here depends on the global batch, so a run resumed with another one neither repeats nor skips samples.
    """
    windows = (ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW))
    ordered = (window[np.argsort(lengths[window], kind="stable")] for window in windows)
    blocks = [window[start : start + BLOCK] for window in ordered for start in range(0, len(window), BLOCK)]
    return np.concatenate([blocks[place] for place in random.permutation(len(blocks))])


def gather_sample_ids(own: np.ndarray, replica: int, group: Any = None) -> list[int]:
    """Sample ids of a step over all replicas, in the order of the replicas. Collective."""
    return joined(gather_objects((replica, own.tolist()), group))


def joined(reported: Iterable[tuple[int, list[int]]]) -> list[int]:
    """Ids of all replicas, concatenated; ranks of one replica must have used the same samples."""
    by_replica: dict[int, list[int]] = {}
    for rank, (replica, ids) in enumerate(reported):
        if by_replica.setdefault(replica, ids) != ids:
            raise RuntimeError(
                f"rank {rank} of replica {replica} used samples {ids}, the other ranks of the replica used "
                f"{by_replica[replica]}"
            )
    return [i for replica in sorted(by_replica) for i in by_replica[replica] if i != PAST_END]
