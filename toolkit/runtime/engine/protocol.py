"""The interface between the training loop and an engine: steps, evaluation, state for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from deepspeed.accelerator import get_accelerator

from toolkit.runtime.checkpoint.fragments import Stateful
from toolkit.runtime.metrics.step_clock import Clock
from toolkit.runtime.models.loss import Loss
from toolkit.runtime.models.micro_batch import MicroBatch

Number = torch.Tensor | float | None
"""A number that the device may still have to compute."""


class StepNumbers:
    """Numbers of a step on their way to the host.

    The copy is started at once. Reading waits for the step that made the numbers, but not for what was started after
    it: read one step late, the device never runs out of work.
    """

    def __init__(
        self,
        *,
        loss: torch.Tensor,
        grad_norm: Number,
        micro_square: Number = None,
        figures: Mapping[str, torch.Tensor] | None = None,
        routers: torch.Tensor | None = None,
    ) -> None:
        self.figures = tuple(figures or ())
        """Names of further numbers, which the objective reports."""
        self.loss = loss
        """On the device: for what is computed before the host reads the numbers."""
        self._others: dict[str, Any] = {
            "grad_norm": grad_norm, "micro_square": micro_square, "figures": figures, "routers": routers,
        }  # fmt: skip
        given = {"loss": loss, "grad_norm": grad_norm, "micro_square": micro_square, **(figures or {})}
        computed = {name: n for name, n in given.items() if isinstance(n, torch.Tensor) and n.device == loss.device}
        self._known = {name: n if n is None else float(n) for name, n in given.items() if name not in computed}
        self._names = list(computed)
        more = [] if routers is None else [routers.double()]
        self._host = torch.cat([number.double().reshape(1) for number in computed.values()] + more)
        size = self._host.numel()
        self._event = None
        accelerator = get_accelerator()
        if not accelerator.is_synchronized_device():
            host = accelerator.pin_memory(torch.empty(size, dtype=torch.float64))
            host.copy_(self._host, non_blocking=True)
            self._host, self._event = host, accelerator.Event()
            self._event.record()

    def with_loss(self, loss: torch.Tensor) -> StepNumbers:
        """The same numbers with another loss."""
        return StepNumbers(loss=loss, **self._others)

    @cached_property
    def _read(self) -> dict[str, float | None]:
        if self._event is not None:
            self._event.synchronize()
        return self._known | dict(zip(self._names, self._host[: len(self._names)].tolist(), strict=True))

    @property
    def routers(self) -> list[float]:
        """What the routers of a mixture did, laid out as `run_dir.router_load` reads it; empty for dense models."""
        assert self._read is not None  # waits for the step
        return self._host[len(self._names) :].tolist()

    def __getitem__(self, name: str) -> float | None:
        """The number, once the step is done."""
        return self._read[name]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of a step, equal on every rank and under every strategy. Loss and norms wait for the step when read."""

    numbers: StepNumbers
    tokens: int
    """Counted tokens of the global batch."""
    lr: float
    """Learning rate of the update."""
    skipped: bool = False
    """Whether the update was skipped because gradients overflowed."""
    loss_scale: float | None = None
    """Loss scale of fp16 for the next step; None in other precisions."""
    exchange: Mapping[str, float] | None = None
    """How islands exchange, and what this rank's exchanges have sent and cost so far."""
    own_nonfinite: torch.Tensor | None = None
    """Passes in which this rank turned finite values into NaN or infinity; read only after a bad step."""

    @property
    def loss(self) -> float:
        """Cross-entropy averaged over the counted tokens of the global batch."""
        return self._number("loss")

    @property
    def grad_norm(self) -> float:
        """Global gradient norm before clipping."""
        return self._number("grad_norm")

    @property
    def micro_square(self) -> float | None:
        """Mean squared norm of a micro-batch's gradient, if measured."""
        return self.numbers["micro_square"]

    @property
    def figures(self) -> dict[str, float] | None:
        """What the objective reports besides its loss, by name."""
        return {name: self._number(name) for name in self.numbers.figures} or None

    def _number(self, name: str) -> float:
        number = self.numbers[name]
        assert number is not None
        return number


@dataclass(frozen=True)
class EvaluationSums:
    """Sums of an evaluation, equal on every rank."""

    loss: float = 0.0
    """Sum of cross-entropies."""
    counted: int = 0
    """Number of counted tokens, or of samples with a class."""
    correct: int = 0
    """Number of those that the model predicts correctly."""

    def __add__(self, other: EvaluationSums) -> EvaluationSums:
        return EvaluationSums(self.loss + other.loss, self.counted + other.counted, self.correct + other.correct)


class Engine(Protocol):
    """An engine that the training loop drives."""

    @property
    def replica(self) -> int:
        """Index of the data-parallel replica that this rank is part of."""

    @property
    def loss(self) -> Loss:
        """What it minimises, summed over a micro-batch."""

    @property
    def state(self) -> Stateful:
        """Masters and optimizer states, for checkpoints."""

    def step(self, batch: Sequence[MicroBatch]) -> StepResult:
        """Train on this replica's share of a global batch."""

    def look(self, batch: Sequence[MicroBatch]) -> None:
        """Forward passes without gradients on this replica's share of a global batch, for what the loss records."""

    def evaluate(self, batch: Sequence[MicroBatch]) -> EvaluationSums:
        """Losses of this replica's share of a global batch, summed over all replicas; no update."""

    def watch(self, clock: Clock) -> None:
        """Report to this clock which part of a step is running, from now on."""


@runtime_checkable
class Predicts(Protocol):
    """An engine whose forward pass runs the model in one call, on sequences of any length."""

    def predict(self, micro: MicroBatch) -> torch.Tensor:
        """The likeliest token after each token of a micro-batch, which is the same on every rank. Collective."""
