"""After a spike of the loss: back to the last checkpoint, and past the batches since then."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.errors import LossNotFinite
from toolkit.runtime.checkpoint import saver as checkpoint
from toolkit.runtime.checkpoint.fragments import Stateful
from toolkit.runtime.checkpoint.saver import Saver, Say
from toolkit.runtime.data.sample_order import Order
from toolkit.runtime.loop import Spike
from toolkit.runtime.metrics.record import Recorder

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

    def before(self, spike: Spike) -> tuple[int, Order]:
        """Load the last checkpoint; its step, and the order that goes on after the batch of the spike."""
        self.saver.wait()
        self.count += 1
        recipe, world = self.saver.recipe, self.saver.world
        reader = checkpoint.find(recipe.checkpoint, self.saver.root, world, self.say)
        if reader is None or self.count > MOST:
            why = "there is no checkpoint to go back to" if reader is None else f"it was rewound {MOST} times"
            raise LossNotFinite(f"{spike}; {why}; lower train.lr, or look at the data of this step")
        skipped = self.saver.order.position(spike.step)
        step, order = checkpoint.resume(reader, self.state, self.saver.order, recipe, world)
        order = order.moved(step, skipped)
        self.say(f"{spike}: back to step {step}, {skipped - int(reader.state['samples'])} samples are skipped")
        self.saver.order, self.saver.last_step = order, step
        self.recorder.rewind(step)
        return step, order
