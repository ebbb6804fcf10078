"""Evaluation on held-out samples, under the run's own strategy."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from toolkit.runtime.data.prefetch import Share, global_batch
from toolkit.runtime.data.sample_order import PAST_END
from toolkit.runtime.data.samples import Samples
from toolkit.runtime.distributed.process_group import broadcast_object
from toolkit.runtime.engine.protocol import Engine, EvaluationSums
from toolkit.runtime.sinks.local_files import keep_until


class Measures(Protocol):
    """Measures a whole evaluation, over all of its batches."""

    def begin(self) -> None:
        """Before the first batch."""

    def finish(self) -> dict[str, float]:
        """After the last batch; the same on every rank. Collective."""


@dataclass(kw_only=True)
class Evaluator:
    """Evaluates all held-out samples, or the first of them, under the run's own strategy."""

    engine: Engine
    samples: Samples
    share: Share
    global_batch: int
    most: int | None
    """Samples to evaluate; None: all."""
    path: Path
    """eval.jsonl."""
    writes: bool
    """Whether this rank records."""
    say: Callable[[str], object]
    classes: bool
    """Whether to report accuracy instead of perplexity."""
    tick: Callable[[], object]
    """Called after every batch: a long evaluation is not a hang."""
    log: Callable[[dict[str, Any]], object] = bool
    """Called with every evaluation."""
    measures: Measures | None = None
    """What the objective measures besides the loss."""
    weights: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context with the weights that are evaluated: the last ones, or their average."""
    sample: Callable[[], list[dict[str, str]]] | None = None
    """Prompts with the texts that the model generates for them; None: none are wanted. Collective."""
    last: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    stale: int = 0
    """Evaluations since the best one."""
    losses: list[float] = field(default_factory=list)
    """Of all evaluations."""

    def resume_at(self, step: int) -> None:
        """Read what was recorded up to a step, and forget what came after it. Collective."""
        found = keep_until(self.path, step, needs=("step", "loss")) if self.writes else []
        # All ranks must agree on what is best: they save it together.
        found = broadcast_object(found)
        self.last = found[-1] if found else {}
        self.best = min(found, key=lambda record: float(record["loss"])) if found else {}
        self.stale = len(found) - 1 - found.index(self.best) if found else 0
        self.losses = [float(record["loss"]) for record in found]

    def run(self, step: int) -> bool:
        """Evaluate and record; whether it is the best so far."""
        started = time.perf_counter()
        if self.measures is not None:
            self.measures.begin()
        with self.weights():
            sums = self._sums()
            texts = self.sample() if self.sample is not None else []
        loss = sums.loss / max(sums.counted, 1)
        record: dict[str, Any] = {"step": step, "loss": loss}
        if not self.classes:
            record["perplexity"] = math.exp(min(loss, 700.0))
        record["accuracy"] = sums.correct / max(sums.counted, 1)
        if self.measures is not None:
            record |= self.measures.finish()
        record |= {"tokens": sums.counted, "seconds": time.perf_counter() - started}
        if texts:
            record["samples"] = texts
        self.losses.append(loss)
        better = not self.best or loss < self.best["loss"]
        self.last, self.best = record, record if better else self.best
        self.stale = 0 if better else self.stale + 1
        if self.writes:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        self.log(record)
        self.say(self._words(record, better))
        for text in texts:
            self.say(f"  {text['prompt']} → {text['text']}")
        return better

    def is_among(self, best: int) -> bool:
        """Whether the last evaluation is among the best so many."""
        return sum(loss < self.losses[-1] for loss in self.losses[:-1]) < best

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
        measure = f"accuracy {record['accuracy']:.1%}"
        if "perplexity" in record:
            measure = f"perplexity {record['perplexity']:.4g}"
        if "recall@10" in record:
            measure = f"recall@10 {record['recall@10']:.1%} · MRR {record['mrr']:.3f}"
        if "ndcg" in record:
            measure = f"accuracy {record['accuracy']:.1%} · nDCG {record['ndcg']:.3f}"
        best = "the best so far" if better else f"best {self.best['loss']:.4f} at step {self.best['step']}"
        return f"evaluation at step {record['step']}: loss {record['loss']:.4f} · {measure} · {best}"
