"""After a spike of the loss: back to the last checkpoint, and past the batches since then."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from toolkit.errors import LossNotFinite
from toolkit.runtime.checkpoint import resume
from toolkit.runtime.checkpoint.fragments import Stateful
from toolkit.runtime.checkpoint.resume import Say
from toolkit.runtime.checkpoint.saver import Saver
from toolkit.runtime.data.sample_order import SampleOrder
from toolkit.runtime.sinks.recorder import Recorder

MOST = 10
"""Rewinds of one run; what spikes more often has another cause than a batch."""


@dataclass
class Rewind:
    """Takes a run back, the same way on every rank: the loss that spiked is the same on all."""

    state: Stateful
    saver: Saver
    recorder: Recorder
    say: Say
    count: int = 0

    def before(self, spike: Spike) -> tuple[int, SampleOrder]:
        """Load the last checkpoint; its step, and the order that goes on after the batch of the spike."""
        self.saver.wait()
        self.count += 1
        recipe, world = self.saver.recipe, self.saver.world
        reader = resume.find(recipe.checkpoint, self.saver.root, world, self.say)
        if reader is None or self.count > MOST:
            why = "there is no checkpoint to go back to" if reader is None else f"it was rewound {MOST} times"
            raise LossNotFinite(f"{spike}; {why}; lower train.lr, or look at the data of this step")
        skipped = self.saver.order.position(spike.step)
        step, order = resume.resume(reader, self.state, self.saver.order, recipe, world)
        order = order.moved(step, skipped)
        self.say(f"{spike}: back to step {step}, {skipped - int(reader.state['samples'])} samples are skipped")
        self.saver.order, self.saver.last_step = order, step
        self.recorder.rewind(step)
        return step, order


class Spike(Exception):
    """The loss jumped; everything up to and with `step` is to be left behind."""

    def __init__(self, step: int, loss: float, usual: float) -> None:
        self.step = step
        super().__init__(f"the loss is {loss:.4g} at step {step}, usually {usual:.4g}")


@dataclass
class SpikeGuard:
    """Compares each loss with the median of those before it."""

    factor: float
    """How many times the median is a spike; infinite: none is."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=20))

    def look(self, step: int, loss: float) -> None:
        """`Spike` if this loss is one."""
        usual = statistics.median(self.recent) if len(self.recent) >= 5 else float("inf")
        if loss > self.factor * usual:
            raise Spike(step, loss, usual)
        self.recent.append(loss)
