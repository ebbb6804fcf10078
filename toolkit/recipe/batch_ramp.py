"""Sequences of each step where a batch grows: a pure function of the recipe, the same under every plan."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.recipe.batch_sections import BatchRamp


@dataclass(frozen=True)
class Batches:
    """A batch that doubles every so many steps until it is full; without a ramp it is full from the start."""

    full: int
    ramp: BatchRamp | None = None

    def size(self, step: int) -> int:
        """Sequences of a step, counted from 0."""
        if self.ramp is None:
            return self.full
        return self.ramp.start << min(step // self.ramp.stage_steps, self._doublings)

    def before(self, step: int) -> int:
        """Sequences of all steps before one."""
        if self.ramp is None:
            return step * self.full
        stage, rest = divmod(step, self.ramp.stage_steps)
        grown = min(stage, self._doublings)
        first = self.ramp.stage_steps * self.ramp.start * ((1 << grown) - 1)
        return first + ((stage - grown) * self.ramp.stage_steps + rest) * self.size(step)

    def steps_for(self, samples: int) -> int:
        """Steps that use up so many sequences; the last may be partial."""
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
