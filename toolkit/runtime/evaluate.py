"""Evaluation on held-out samples between two steps; the best checkpoint is kept."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.checkpoints import store
from toolkit.recipe.sections import Recipe
from toolkit.run_dir.layout import RunDir
from toolkit.runtime.between_steps import CheckpointKeeper, Progress
from toolkit.runtime.checkpoint.saver import Saver
from toolkit.runtime.data.prefetch import Share, global_batch
from toolkit.runtime.data.sample_order import PAST_END
from toolkit.runtime.data.samples import Samples
from toolkit.runtime.engine.protocol import Engine, EvaluationSums
from toolkit.runtime.loop import Keeper
from toolkit.runtime.metrics.comm_timer import CommTimer
from toolkit.runtime.metrics.step_clock import part
from toolkit.runtime.sinks.local_files import keep_until
from toolkit.runtime.sinks.recorder import Recorder
from toolkit.runtime.sinks.wandb_sink import WandbSink


@dataclass(kw_only=True)
class Evaluator:
    """Evaluates all held-out samples, or the first of them, under the run's own strategy."""

    engine: Engine
    samples: Samples
    share: Share
    global_batch: int
    most: int | None
    path: Path
    """eval.jsonl."""
    writes: bool
    """Whether this rank records."""
    say: Callable[[str], object]
    classes: bool
    """Whether accuracy is what matters."""
    tick: Callable[[], object]
    """Called after every batch: a long evaluation is no hang."""
    log: Callable[[dict[str, Any]], object] = bool
    """Told of every evaluation."""
    last: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)

    def resume_at(self, step: int) -> None:
        """Take up what was recorded up to a step."""
        found = keep_until(self.path, step) if self.writes else []
        self.last = found[-1] if found else {}
        self.best = min(found, key=lambda record: float(record["loss"])) if found else {}

    def run(self, step: int) -> bool:
        """Evaluate and record; whether it is the best so far."""
        started = time.perf_counter()
        sums = self._sums()
        loss = sums.loss / max(sums.counted, 1)
        record: dict[str, Any] = {"step": step, "loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        record["accuracy"] = sums.correct / max(sums.counted, 1)
        record |= {"tokens": sums.counted, "seconds": time.perf_counter() - started}
        better = not self.best or loss < self.best["loss"]
        self.last, self.best = record, record if better else self.best
        if self.writes:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        self.log(record)
        self.say(self._words(record, better))
        return better

    def _sums(self) -> EvaluationSums:
        count = min(len(self.samples), self.most or len(self.samples))
        whole = EvaluationSums()
        for start in range(0, count, self.global_batch):
            ids = np.arange(start, start + self.global_batch)
            ids[ids >= count] = PAST_END
            whole = whole + self.engine.evaluate(global_batch(self.samples, ids, self.share))
            self.tick()
        return whole

    def _words(self, record: dict[str, Any], better: bool) -> str:
        measure = f"perplexity {record['perplexity']:.4g}"
        if self.classes:
            measure = f"accuracy {record['accuracy']:.1%}"
        best = "the best so far" if better else f"best {self.best['loss']:.4f} at step {self.best['step']}"
        return f"evaluation at step {record['step']}: loss {record['loss']:.4f} · {measure} · {best}"


def make_evaluator(
    recipe: Recipe,
    run: RunDir,
    engine: Engine,
    samples: Samples,
    share: Share,
    recorder: Recorder,
    say: Callable[[str], object],
    pulse: Progress,
) -> Evaluator:
    """The evaluator of a run; the rank that has sinks records."""

    def log(record: dict[str, Any]) -> None:
        for sink in recorder.sinks:
            if isinstance(sink, WandbSink):
                sink.evaluated(record)

    return Evaluator(
        engine=engine,
        samples=samples,
        share=share,
        global_batch=recipe.train.global_batch,
        most=recipe.train.eval_samples,
        path=run.evaluations,
        writes=bool(recorder.sinks),
        say=say,
        classes="classification" in recipe.data.format,
        tick=lambda: pulse.move(phase="evaluating"),
        log=log,
    )


@dataclass(frozen=True, kw_only=True)
class EvaluatingKeeper:
    """Evaluates every so many steps and after the last, then does what the inner keeper does."""

    inner: Keeper
    evaluator: Evaluator
    saver: Saver
    comm: CommTimer
    every: int
    steps: int
    saves: bool
    """Whether the run saves checkpoints at all."""

    @classmethod
    def around(cls, keeper: CheckpointKeeper, evaluator: Evaluator, recipe: Recipe) -> EvaluatingKeeper:
        """Around the keeper of a run."""
        return cls(
            inner=keeper,
            evaluator=evaluator,
            saver=keeper.saver,
            comm=keeper.comm,
            every=recipe.train.eval_every,
            steps=keeper.steps,
            saves=recipe.checkpoint.every > 0,
        )

    def after(self, step: int) -> None:
        if step % self.every == 0 or step == self.steps:
            with part(self.comm.clock, "evaluate"):
                better = self.evaluator.run(step)
            self.comm.take()  # what it exchanged is no part of the next step
            if better and self.saves:
                self.saver.save(step)
                if self.evaluator.writes:
                    store.mark_best(self.saver.root, step, float(self.evaluator.last["loss"]))
        self.inner.after(step)
