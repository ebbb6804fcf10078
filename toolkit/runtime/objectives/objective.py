"""What engines know of an objective: figures that it reports, and a first pass over the batch if it needs one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from toolkit.runtime.models.loss import Loss
from toolkit.runtime.models.micro_batch import MicroBatch

Total = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor in place over the ranks that hold other samples of the global batch, and returns it. Collective."""


class Figures:
    """Sums of what is reported per step, over the samples of this rank."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self._sums: torch.Tensor | None = None

    @torch.no_grad()
    def add(self, values: Mapping[str, torch.Tensor], present: torch.Tensor) -> None:
        """Add a value of each sample; `present` is 1 for samples that count."""
        sums = torch.stack([(values[name].float() * present).sum() for name in self.names])
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self) -> torch.Tensor | None:
        """Sums since the last call, in the order of the names; None if this rank has computed none."""
        found, self._sums = self._sums, None
        return found


@runtime_checkable
class Objective(Loss, Protocol):
    """A loss that reports figures."""

    figures: Figures


@runtime_checkable
class TwoPass(Objective, Protocol):
    """A loss that depends on results of the whole global batch: they are computed first, without gradients."""

    recorded: list[torch.Tensor] | None
    """If it is a list: results of every micro-batch of a forward pass are appended."""

    def settle(self, batch: Sequence[MicroBatch], total: Total) -> torch.Tensor | None:
        """Take what was recorded of this rank's batch; the loss is ready for the pass with gradients.

        Returns the loss and the number of correct samples of this rank; None if it has recorded nothing (earlier
        stages of a pipeline). Collective, by `total`, among ranks that have recorded.
        """


class Sees(Protocol):
    """The part of an engine that runs forward passes."""

    @property
    def loss(self) -> Loss:
        """What it minimises."""

    def look(self, batch: Sequence[MicroBatch]) -> None:
        """Forward passes without gradients, for what the loss records."""


def first_pass(engine: Sees, batch: Sequence[MicroBatch], total: Total) -> torch.Tensor | None:
    """Run the first pass of an objective that needs one; what its `settle` returns."""
    loss = engine.loss
    if not isinstance(loss, TwoPass):
        return None
    loss.recorded = []
    engine.look(batch)
    found = loss.settle(batch, total)
    loss.recorded = None
    return found


def figures_of(loss: Loss, weighed: int, total: Total, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Figures of a step, averaged over the global batch. Collective, by `total`, if the objective has any."""
    if not isinstance(loss, Objective):
        return {}
    own, names = loss.figures.take(), loss.figures.names
    sums = torch.zeros(len(names), device=like.device) if own is None else own.float()
    return dict(zip(names, total(sums) / max(weighed, 1), strict=True))
