"""Hooks that run after every step: checks, evaluation, heartbeat, checkpoints, stop requests.

`assemble.py` puts them in order; the loop calls each in turn and knows none of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from toolkit.checkpoints import store
from toolkit.errors import LossNotFinite, Preempted
from toolkit.launching.stop_signals import StopRequest
from toolkit.runtime.checkpoint.saver import Saver
from toolkit.runtime.distributed.process_group import all_max, gather_objects
from toolkit.runtime.engine.protocol import StepResult
from toolkit.runtime.evaluate import Evaluator
from toolkit.runtime.metrics.comm_timer import CommTimer
from toolkit.runtime.metrics.memory import MemoryPeak
from toolkit.runtime.metrics.step_clock import part

FLAT_STEPS, FLAT = 50, 1e-6
"""A loss whose first so many values differ by less than this share does not move."""
ZERO_STEPS = 3
"""Steps in a row with a gradient norm of 0 before that is reported."""
SHOWN_SAMPLES = 16
"""Sample ids that an error message lists per rank."""


@dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """A step that was started; it is finished when its result is read."""

    number: int
    """Counted from 1."""
    result: StepResult
    sample_ids: np.ndarray
    """Samples that this rank trained on."""
    started: float
    """When it began to fetch its batch, on the host's clock."""
    data_seconds: float
    """Time that this rank waited for the batch."""
    memory: MemoryPeak


class StopEarly(Exception):
    """The run is done before its last step."""

    def __init__(self, step: int, reason: str) -> None:
        self.step = step
        super().__init__(reason)


class AfterStep(Protocol):
    """One hook. It may raise to end the run or to rewind it."""

    def after(self, step: FinishedStep) -> None:
        """Called on every rank after every step, in the same order; the next step may have run by then."""

    def needs_state(self, step: int) -> bool:
        """Whether `after` uses the state of the engine: the next step then starts only afterwards."""


class Progress(Protocol):
    """Receives signs of progress: see `HeartbeatThread`."""

    def watch(self, timeout_seconds: float) -> None:
        """Training begins: from now on, silence for this long is a hang."""

    def move(self, *, step: int | None = None, phase: str | None = None) -> None:
        """Report that something was done."""


@dataclass(frozen=True)
class NonFiniteHook:
    """Stops the run, on every rank alike, if loss or gradient norm is NaN or infinite.

    The update was skipped on the device. The step after it may have run, but nothing was saved in between.
    """

    all_agree: bool
    """Whether a bad loss is bad on every rank at once; islands may differ."""
    scales_loss: bool
    """Whether overflowing gradients are expected (fp16 loss scaling skips such steps)."""

    def needs_state(self, step: int) -> bool:
        return False

    def after(self, step: FinishedStep) -> None:
        loss, norm = step.result.loss, step.result.grad_norm
        # ZeRO (DeepSpeed 0.19.8) skips updates with non-finite gradients for ever and says nothing. In fp16 that is how
        # the loss scale is found; elsewhere the run would train on without learning. Can go when DeepSpeed raises.
        if math.isfinite(loss) and (math.isfinite(norm) or self.scales_loss):
            return
        own = step.sample_ids.tolist()
        bad = step.result.own_nonfinite is not None and float(step.result.own_nonfinite) > 0
        # Other islands may still be training, so they can't be asked.
        found = gather_objects((own, bad)) if self.all_agree else [(own, False)]
        culprits = [f"rank {rank} (samples {_few(ids)})" for rank, (ids, at_fault) in enumerate(found) if at_fault]
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        nobody = "no single rank" if self.all_agree else "an island"
        where = ", ".join(culprits) or f"{nobody}; samples {_few([i for ids, _ in found for i in ids])}"
        raise LossNotFinite(
            f"{what} at step {step.number}, from {where}; the update was skipped; "
            "lower train.lr, or look at these samples"
        )


@dataclass(frozen=True, kw_only=True)
class EvaluateHook:
    """Evaluates every `every` steps and after the last; the best checkpoints are kept."""

    evaluator: Evaluator
    saver: Saver
    comm: CommTimer
    every: int
    last_step: int
    saves: bool
    """Whether the run saves checkpoints at all."""
    keep_best: int = 1
    """How many of the best checkpoints are kept."""
    patience: int | None = None
    """Evaluations in a row without a better loss after which the run stops; None: never."""

    def needs_state(self, step: int) -> bool:
        return step % self.every == 0 or step == self.last_step

    def after(self, step: FinishedStep) -> None:
        if not self.needs_state(step.number):
            return
        with part(self.comm.clock, "evaluate"):
            better = self.evaluator.run(step.number)
        self.comm.take()  # its collectives do not belong to the next step
        if self.saves and (better or self.evaluator.is_among(self.keep_best)):
            self.saver.save(step.number)
            if self.evaluator.writes:
                store.mark_best(self.saver.root, step.number, float(self.evaluator.last["loss"]), self.keep_best)
        if self.patience is not None and self.evaluator.stale >= self.patience and step.number < self.last_step:
            if self.saves:
                self.saver.save(step.number)
                self.saver.wait()
            best = self.evaluator.best
            raise StopEarly(
                step.number,
                f"stopped at step {step.number}: {self.patience} evaluations in a row were not better than "
                f"{best['loss']:.4f} at step {best['step']}",
            )


@dataclass
class WarningHook:
    """Says early what makes a run useless: gradients of zero, a loss that does not move, batches without a label."""

    say: Callable[[str], object]
    losses: list[float] = field(default_factory=list)
    zeros: int = 0
    """Steps in a row without a gradient."""
    said: set[str] = field(default_factory=set)

    def needs_state(self, step: int) -> bool:
        return False

    def after(self, step: FinishedStep) -> None:
        if len(self.losses) < FLAT_STEPS:
            self.losses.append(step.result.loss)
        self.zeros = self.zeros + 1 if step.result.grad_norm == 0 else 0
        if step.result.tokens == 0:
            self._once(f"no token of step {step.number} counts: every label is masked; see `toolkit data`")
        if self.zeros == ZERO_STEPS:
            self._once(f"gradients have been 0 for {ZERO_STEPS} steps: nothing is learned; are all weights frozen?")
        if len(self.losses) == FLAT_STEPS and max(self.losses) - min(self.losses) < FLAT * abs(self.losses[0]):
            self._once(
                f"the loss has not moved in {FLAT_STEPS} steps, {self.losses[0]:.4g}: is train.lr too small, or the "
                "wrong part of the data counted?"
            )

    def _once(self, text: str) -> None:
        kind = text.split(":")[0].split(" of step")[0]
        if kind not in self.said:
            self.said.add(kind)
            self.say(f"warning: {text}")


@dataclass(frozen=True)
class HeartbeatHook:
    """Reports progress to the supervisor."""

    heartbeat: Progress

    def needs_state(self, step: int) -> bool:
        return False

    def after(self, step: FinishedStep) -> None:
        self.heartbeat.move(step=step.number, phase="training")


@dataclass(frozen=True, kw_only=True)
class CheckpointHook:
    """Saves when a checkpoint is due; after the last step, waits until it is written."""

    saver: Saver
    heartbeat: Progress
    comm: CommTimer
    due: Callable[[int], bool]
    """Whether a checkpoint is due after this step."""
    last_step: int

    def needs_state(self, step: int) -> bool:
        return self.due(step) or step == self.last_step

    def after(self, step: FinishedStep) -> None:
        with part(self.comm.clock, "checkpoint"):
            if self.due(step.number):
                save(self.saver, self.heartbeat, step.number)
            if step.number == self.last_step:
                self.saver.wait()


@dataclass(frozen=True, kw_only=True)
class StopHook:
    """If any rank was asked to stop, all ranks save and raise `Preempted`."""

    stop: StopRequest
    saver: Saver
    heartbeat: Progress
    comm: CommTimer
    every: int
    """Steps between two questions whether to stop: islands agree only where they exchange."""
    last_step: int
    group: Any = None
    leave: Callable[[], object] | None = None
    """Called before the state is saved: an asynchronous island hands back the round that it is in."""
    answers: dict[int, bool] = field(default_factory=dict)
    """Step → whether to stop after it, if that was asked before `after`."""

    def needs_state(self, step: int) -> bool:
        """Whether any rank was asked to stop. Collective, on the host."""
        self.answers[step] = self._is_asked(step)
        return self.answers[step]

    def _is_asked(self, step: int) -> bool:
        if step >= self.last_step or step % self.every:
            return False
        with self.comm.held("agree"):
            return bool(all_max(torch.tensor(int(self.stop.signal or 0)), self.group))

    def after(self, step: FinishedStep) -> None:
        known = self.answers.pop(step.number, None)
        if self._is_asked(step.number) if known is None else known:
            with part(self.comm.clock, "checkpoint"):
                if self.leave is not None:
                    self.leave()
                save(self.saver, self.heartbeat, step.number)
                self.saver.wait()
            raise preempted(step.number, self.saver)


def save(saver: Saver, heartbeat: Progress, step: int) -> None:
    """Save a checkpoint; the heartbeat shows the phase."""
    heartbeat.move(phase="saving")
    saver.save(step)
    heartbeat.move(phase="training")


def preempted(step: int, saver: Saver) -> Preempted:
    """The end of a run that was asked to stop."""
    return Preempted(f"asked to stop at step {step}: checkpoint saved in {saver.root}")


def _few(ids: list[int]) -> str:
    shown = ", ".join(str(i) for i in ids[:SHOWN_SAMPLES])
    return shown + (f" and {len(ids) - SHOWN_SAMPLES} more" if len(ids) > SHOWN_SAMPLES else "")
