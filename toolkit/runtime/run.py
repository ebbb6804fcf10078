"""One rank's run, from its specification to a summary: assemble, train, summarise."""

from __future__ import annotations

import gc
import time

from toolkit.errors import LossNotFinite, Preempted
from toolkit.run_dir.layout import RunDir, RunSpec
from toolkit.runtime.assemble import RankContext, Training, assemble
from toolkit.runtime.distributed.process_group import World
from toolkit.runtime.metrics import trace
from toolkit.runtime.summary import RunEnd, summarise


def run_rank(spec: RunSpec, run: RunDir, world: World, context: RankContext) -> None:
    """Train as this rank; rank 0 records."""
    gc.freeze()  # half a million objects of imported modules need neither be collected nor searched for tensors
    training = assemble(spec, run, world, context)
    training.begin()
    started, status = time.perf_counter(), "failed"
    try:
        training.loop.run()
        status = "done"
    except LossNotFinite:
        status = "loss_not_finite"
        raise
    except Preempted:
        status = "preempted"
        raise
    finally:
        _finish(training, RunEnd(status, training.loop.position.step, time.perf_counter() - started))


def _finish(training: Training, end: RunEnd) -> None:
    """Write the summary, close the sinks, merge the traces."""
    summary = summarise(training.spec, training.run, training.loop.observer, end)
    training.counters.stop()
    summary |= {"save_seconds": training.saver.stalls, **training.averages.summary()}
    if training.evaluator is not None:
        summary["eval"] = {"last": training.evaluator.last, "best": training.evaluator.best}
    training.recorder.finish(summary)
    section = training.spec.recipe.metrics.trace
    if section and training.world.rank == 0:
        for line in trace.report(training.run.trace, training.run.metrics, section):
            training.say(line)
