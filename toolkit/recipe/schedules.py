"""Learning-rate schedule as a factor of the peak, and the batch size of every step. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from toolkit.recipe.batch_sections import BatchRamp
from toolkit.recipe.sections import Train


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up, then `kind` down to `min_ratio` at `steps`."""

    SHAPES: ClassVar[Mapping[str, Callable[[Schedule, float], float]]] = {
        "cosine": lambda self, progress: 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": lambda self, progress: 1.0 - progress,
        "constant": lambda self, progress: 1.0,
        "wsd": lambda self, progress: min(1.0, (1.0 - progress) / self._falling),
        "cosine_restarts": lambda self, progress: 0.5 * (1 + math.cos(math.pi * self._in_cycle(progress))),
    }
    """Kind → fraction of the way from `min_ratio` to the peak, by the fraction of steps after the warm-up."""

    kind: str
    steps: int
    warmup_steps: int
    min_ratio: float
    batches: Batches
    decay_fraction: float = 0.2
    """Fraction of all steps over which `wsd` falls."""
    cycles: int = 1
    """Cosines of `cosine_restarts`."""
    power: float = 0.0
    """Exponent by which the learning rate follows a growing batch: 0, 0.5 or 1."""

    def factor(self, step: int) -> float:
        """Factor for update number `step`, counted from 0."""
        share = self.batches.size(step) / self.batches.full
        return self._shape(step) * math.pow(share, self.power)

    def _shape(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "inverse_sqrt":
            return math.sqrt(max(1, self.warmup_steps) / max(1, step + 1))
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        return self.min_ratio + (1.0 - self.min_ratio) * self.SHAPES[self.kind](self, progress)

    @property
    def _falling(self) -> float:
        """Fraction of the steps after the warm-up over which `wsd` falls."""
        return min(1.0, self.decay_fraction * self.steps / max(1, self.steps - self.warmup_steps))

    def _in_cycle(self, progress: float) -> float:
        """Position inside a cosine of `cosine_restarts`; the end of all steps is the end of the last one."""
        return 1.0 if progress >= 1.0 else progress * self.cycles % 1.0


def make_schedule(train: Train, steps: int) -> Schedule:
    """The recipe's schedule over a known number of steps."""
    warmup = round(train.warmup * steps) if train.warmup < 1 else int(train.warmup)
    return Schedule(
        kind=train.schedule,
        steps=steps,
        warmup_steps=min(warmup, steps),
        min_ratio=train.min_lr_ratio,
        decay_fraction=train.decay_fraction or 0.2,
        cycles=train.cycles or 2,
        batches=Batches(train.global_batch, train.batch_ramp),
        power={"none": 0.0, "sqrt": 0.5, "linear": 1.0}[train.lr_scaling],
    )


@dataclass(frozen=True)
class Batches:
    """Batch size per step: constant, or doubling every `stage_steps` steps until it is full."""

    full: int
    ramp: BatchRamp | None = None

    def size(self, step: int) -> int:
        """Sequences in step number `step`, counted from 0."""
        if self.ramp is None:
            return self.full
        return self.ramp.start << min(step // self.ramp.stage_steps, self._doublings)

    def before(self, step: int) -> int:
        """Sequences in all steps before number `step`."""
        if self.ramp is None:
            return step * self.full
        stage, rest = divmod(step, self.ramp.stage_steps)
        grown = min(stage, self._doublings)
        first = self.ramp.stage_steps * self.ramp.start * ((1 << grown) - 1)
        return first + ((stage - grown) * self.ramp.stage_steps + rest) * self.size(step)

    def steps_for(self, samples: int) -> int:
        """Steps needed to consume `samples` sequences; the last step may be partial."""
        if self.ramp is None:
            return -(-samples // self.full)
        grown = self.ramp.stage_steps * self._doublings
        if samples > self.before(grown):
            return grown - (self.before(grown) - samples) // self.full
        return next(step for step in range(grown + 1) if self.before(step) >= samples)

    @property
    def _doublings(self) -> int:
        assert self.ramp is not None
        return (self.full // self.ramp.start).bit_length() - 1


def scaled_lr(train: Train) -> float:
    """The peak learning rate after batch scaling."""
    if train.lr_scaling == "none":
        return train.lr
    assert train.base_batch is not None
    ratio = train.global_batch / train.base_batch
    return train.lr * (ratio if train.lr_scaling == "linear" else ratio**0.5)
