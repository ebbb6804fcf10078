"""The result of data loading: samples to train on and to evaluate with, their order, and mixtures of sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from toolkit.errors import BadInput
from toolkit.recipe.sections import Recipe
from toolkit.runtime.corpus.tokenizer import Tokenizer
from toolkit.runtime.data.sample_order import MixturePart, SampleOrder, mixture
from toolkit.runtime.data.samples import Samples
from toolkit.runtime.data.streaming import Streamed
from toolkit.runtime.models.micro_batch import MicroBatch

HELD_OUT_SEED = 20
"""Fixed, so that runs with different seeds hold out the same documents and stay comparable."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The samples of a run."""

    train: Samples
    held_out: Samples | None = None
    documents: int = 0
    tokens: int = 0
    notes: tuple[str, ...] = ()
    """Remarks about the data for the user."""
    tokenizer: Tokenizer | None = None

    @property
    def useful_fraction(self) -> float:
        """Fraction of token positions that are not padding."""
        return self.train.positions_used / max(self.train.positions, 1)

    def order(self, recipe: Recipe, global_batch: int) -> SampleOrder:
        """The order of the training samples."""
        if isinstance(self.train, Streamed):
            start = SampleOrder(samples=0, global_batch=global_batch, seed=recipe.train.seed, streamed=True)
            return replace(start, ramp=recipe.train.batch_ramp)
        parts: tuple[MixturePart, ...] = ()
        if isinstance(self.train, Mixture):
            parts = mixture([len(part) for part in self.train.parts], list(self.train.weights))
        order = SampleOrder(
            samples=len(self.train),
            global_batch=global_batch,
            seed=recipe.train.seed,
            parts=parts,
            lengths=self.train.lengths,
            ramp=recipe.train.batch_ramp,
        )
        if recipe.train.epochs is None:
            return order
        return replace(order, total=max(1, round(recipe.train.epochs * order.epoch_samples)))


def split(count: int, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """(indices of the documents to train on, indices of those held out)."""
    numbers = np.arange(count)
    held_out = min(max(round(fraction * count), 1), count - 1) if fraction > 0 else 0
    shuffled = np.random.default_rng(HELD_OUT_SEED).permutation(count)
    return np.setdiff1d(numbers, shuffled[:held_out]), np.sort(shuffled[:held_out])


def check_labels(labels: np.ndarray, num_labels: int, source: str) -> None:
    """`BadInput` if a label is not one of the model's classes."""
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_labels:
        bad = low if low < 0 else high
        row = int(np.flatnonzero(labels == bad)[0]) + 1
        raise BadInput(
            "data.label_column",
            f"{source}, document {row}: label {bad} found; the model has {num_labels} classes, 0 to {num_labels - 1}; "
            "set model.num_labels, or correct the labels",
        )


def mixed(parts: Sequence[Samples], weights: list[float]) -> Samples:
    """Several sources as one, with one weight each."""
    return parts[0] if len(parts) == 1 else Mixture(parts, tuple(weights))


@dataclass(frozen=True)
class Mixture:
    """Several sources, concatenated."""

    parts: Sequence[Samples]
    weights: tuple[float, ...]

    @property
    def lengths(self) -> np.ndarray | None:
        """Lengths of all samples, if they differ."""
        found = [part.lengths for part in self.parts]
        return np.concatenate([lengths for lengths in found if lengths is not None]) if found[0] is not None else None

    @property
    def positions(self) -> int:
        """Token positions that an epoch computes."""
        return sum(part.positions for part in self.parts)

    @property
    def positions_used(self) -> int:
        """Token positions that are not padding."""
        return sum(part.positions_used for part in self.parts)

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def width(self, indices: np.ndarray) -> int:
        """The largest width of the parts."""
        return max(part.width(own) for part, own, _ in self._split(indices))

    def batch(self, indices: np.ndarray, width: int | None = None) -> MicroBatch:
        width = width or self.width(indices)
        found = [(part.batch(own, width).tensors(), places) for part, own, places in self._split(indices)]
        back = torch.from_numpy(np.argsort(np.concatenate([places for _, places in found])))
        joined: dict[str, Any] = {
            name: torch.cat([tensors[name] for tensors, _ in found])[back] for name in found[0][0]
        }
        return MicroBatch(**{"input_ids": None} | joined)

    def _split(self, indices: np.ndarray) -> list[tuple[Samples, np.ndarray, np.ndarray]]:
        """For each part: the part, ids of its samples in it, and their positions in the batch."""
        first, found = 0, []
        for part in self.parts:
            places = np.flatnonzero((indices >= first) & (indices < first + len(part)))
            if len(places):
                found.append((part, indices[places] - first, places))
            first += len(part)
        return found
