"""Loss spikes: detect one, return to the last checkpoint, and skip the batches since then."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from toolkit.errors import LossNotFinite
from toolkit.runtime.between_steps import FinishedStep
from toolkit.runtime.checkpoint import resume
from toolkit.runtime.checkpoint.fragments import Stateful
from toolkit.runtime.checkpoint.resume import Say
from toolkit.runtime.checkpoint.saver import Saver
from toolkit.runtime.data.sample_order import SampleOrder

MOST = 10
"""Rewinds per run; spikes that come back more often have another cause than one batch."""
LEAST_SEEN = 5
"""Losses that must have been seen before one can be called a spike."""


class Spike(Exception):
    """The loss jumped: everything up to and including `step` is to be discarded."""

    def __init__(self, step: int, loss: float, usual: float) -> None:
        self.step = step
        super().__init__(f"the loss is {loss:.4g} at step {step}, usually {usual:.4g}")


@dataclass
class SpikeHook:
    """Compares each loss with the median of the losses before it."""

    factor: float
    """A loss above this many times the median is a spike."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=20))

    def needs_state(self, step: int) -> bool:
        return False  # after a spike all state comes from a checkpoint

    def after(self, step: FinishedStep) -> None:
        loss = step.result.loss
        usual = statistics.median(self.recent) if len(self.recent) >= LEAST_SEEN else float("inf")
        if loss > self.factor * usual:
            raise Spike(step.number, loss, usual)
        self.recent.append(loss)


@dataclass
class Rewind:
    """Takes a run back to its last checkpoint, on every rank alike: they all saw the same loss."""

    state: Stateful
    saver: Saver
    say: Say
    rewound: Callable[[int], object]
    """Called with the step that the run is back at: sinks and evaluations forget what came after it."""
    count: int = 0

    def before(self, spike: Spike) -> tuple[int, SampleOrder]:
        """Load the last checkpoint; its step, and the order that continues after the batch of the spike."""
        self.saver.wait()
        self.count += 1
        recipe, world = self.saver.recipe, self.saver.world
        reader = resume.find(recipe.checkpoint, self.saver.root, world, self.say)
        if reader is None or self.count > MOST:
            why = "there is no checkpoint to return to" if reader is None else f"the run was rewound {MOST} times"
            raise LossNotFinite(f"{spike}; {why}; lower train.lr, or look at the data of this step")
        skipped = self.saver.order.position(spike.step)
        step, order = resume.resume(reader, self.state, self.saver.order, recipe, world)
        order = order.moved(step, skipped)
        samples = skipped - int(reader.state["samples"])
        self.say(f"{spike}: back to step {step}, {samples} samples are skipped")
        self.saver.order, self.saver.last_step = order, step
        self.rewound(step)
        return step, order
