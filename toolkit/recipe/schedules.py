"""Learning-rate schedule as a factor of the peak, and the batch size of every step. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.recipe.batch_sections import BatchRamp
from toolkit.recipe.sections import Train


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up, then `kind` down to `min_ratio` at `steps`."""

    kind: str
    steps: int
    warmup_steps: int
    min_ratio: float
    batches: Batches
    power: float = 0.0
    """Exponent by which the learning rate follows a growing batch: 0, 0.5 or 1."""

    def factor(self, step: int) -> float:
        """Factor for update number `step`, counted from 0."""
        share = self.batches.size(step) / self.batches.full
        return self._shape(step) * math.pow(share, self.power)

    def _shape(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        fall = 0.5 * (1 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1.0 - progress
        return self.min_ratio + (1.0 - self.min_ratio) * fall


def make_schedule(train: Train, steps: int) -> Schedule:
    """The recipe's schedule over a known number of steps."""
    warmup = round(train.warmup * steps) if train.warmup < 1 else int(train.warmup)
    return Schedule(
        kind=train.schedule,
        steps=steps,
        warmup_steps=min(warmup, steps),
        min_ratio=train.min_lr_ratio,
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
