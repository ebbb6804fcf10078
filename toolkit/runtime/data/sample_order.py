"""One global, seeded order of samples that no strategy, world size or micro-batch changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from toolkit.recipe.batch_sections import BatchRamp
from toolkit.recipe.schedules import Batches
from toolkit.runtime.distributed.process_group import gather_objects

PAST_END = -1
"""Stands for a sample after the last one: a run's last batch may be partial, and what is missing does not count."""
WINDOW, BLOCK = 2048, 64
"""Samples that are sorted by length at a time, and how many of like length stay together."""


@dataclass(frozen=True)
class MixturePart:
    """One source of a mixture."""

    samples: int
    """How many it has."""
    drawn: int
    """How many an epoch takes of it: its passes go on where the epoch before stopped."""


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """Which samples each step uses, over all ranks: depends on the data, the seed and the global batch alone."""

    samples: int
    """Samples there are."""
    global_batch: int
    seed: int
    first_step: int = 0
    """A step from which on the position is known: 0, or where a run was resumed."""
    first_position: int = 0
    """Samples that were used before it."""
    total: int | None = None
    """Samples of the whole run, where it ends with an epoch; None: as many as its steps take."""
    parts: tuple[MixturePart, ...] = ()
    """Sources of a mixture, one behind the other in the sample ids."""
    streamed: bool = False
    """Samples are numbered as they arrive: each step takes the next ones."""
    ramp: BatchRamp | None = None
    """How the global batch grows."""
    lengths: np.ndarray | None = None
    """Lengths of samples that differ: those of like length share a batch."""
    _epochs: dict[int, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch."""
        return sum(part.drawn for part in self.parts) if self.parts else self.samples

    def step(self, step: int) -> np.ndarray:
        """Sample ids of a step, counted from 0; an epoch's last samples share a batch with the next epoch's first."""
        positions = np.arange(self.position(step), self.position(step + 1))
        if self.streamed:
            return positions
        epochs, places = np.divmod(positions, self.epoch_samples)
        ids = np.concatenate([self._epoch(int(e))[places[epochs == e]] for e in np.unique(epochs)])
        return ids if self.total is None else np.where(positions < self.total, ids, PAST_END)

    def position(self, step: int) -> int:
        """Samples used before a step."""
        return self.first_position + self.batches.before(step) - self.batches.before(self.first_step)

    @property
    def batches(self) -> Batches:
        """Samples of each step."""
        return Batches(self.global_batch, self.ramp)

    def moved(self, step: int, position: int) -> SampleOrder:
        """The same order, with `position` samples used before `step`: another global batch goes on at the next one."""
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
        """What an epoch takes of each source."""
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
    """Parts of an epoch with as many samples as all sources have together, shared out by weight."""
    exact = np.asarray(weights) / sum(weights) * sum(sizes)
    drawn = np.floor(exact).astype(int)
    for place in np.argsort(drawn - exact, kind="stable")[: sum(sizes) - drawn.sum()]:
        drawn[place] += 1
    return tuple(MixturePart(size, max(1, int(count))) for size, count in zip(sizes, drawn, strict=True))


def own_share(ids: np.ndarray, *, replica: int, replicas: int) -> np.ndarray:
    """A replica's samples of a global batch."""
    return np.array_split(ids, replicas)[replica]


def _grouped(ids: np.ndarray, lengths: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The same ids with neighbours of like length: sorted a window at a time, the blocks of all windows shuffled.

    Nothing here depends on the global batch, so that a run resumed with another one neither repeats nor skips.
    """
    windows = (ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW))
    ordered = (window[np.argsort(lengths[window], kind="stable")] for window in windows)
    blocks = [window[start : start + BLOCK] for window in ordered for start in range(0, len(window), BLOCK)]
    return np.concatenate([blocks[place] for place in random.permutation(len(blocks))])


def gather_sample_ids(own: np.ndarray, replica: int, group: Any = None) -> list[int]:
    """Sample ids of a step over all replicas, in the order of the replicas. Collective."""
    return joined(gather_objects((replica, own.tolist()), group))


def joined(told: Iterable[tuple[int, list[int]]]) -> list[int]:
    """What each replica took, one behind the other; ranks of one replica must have taken the same."""
    by_replica: dict[int, list[int]] = {}
    for rank, (replica, ids) in enumerate(told):
        if by_replica.setdefault(replica, ids) != ids:
            raise RuntimeError(
                f"rank {rank} of replica {replica} took samples {ids}, the other ranks of the replica took "
                f"{by_replica[replica]}"
            )
    return [i for replica in sorted(by_replica) for i in by_replica[replica] if i != PAST_END]
