"""Our training loop with metrics on, against a bare DeepSpeed loop on the same engine and pre-made batches, in turn.

python -m benchmarks.loop [--stage 2] [--seconds 80]
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.observed import DETAIL_EVERY, PROCESSES, Observed, first_decides, measured_on_ranks, observed
from benchmarks.paired import in_turn, ratio
from toolkit.runtime.data.prefetch import Share
from toolkit.runtime.data.sample_order import SampleOrder
from toolkit.runtime.loop import Loop, Position, RemainingSteps
from toolkit.runtime.models.loss import summed_loss
from toolkit.runtime.models.micro_batch import MicroBatch


@dataclass(frozen=True)
class Made:
    """Samples that are micro-batches already."""

    batches: Sequence[MicroBatch]
    rows: int
    """Of a micro-batch."""
    lengths: None = None
    positions: int = 0
    positions_used: int = 0

    def __len__(self) -> int:
        return len(self.batches) * self.rows * PROCESSES

    def width(self, indices: np.ndarray) -> int:
        """Tokens of a row."""
        return self.batches[0].shape[1]

    def batch(self, indices: np.ndarray, width: int | None = None) -> MicroBatch:
        """Whatever is asked for: made before."""
        return self.batches[int(indices[0]) % len(self.batches)]


def measure(stage: int, seconds: float, directory: str) -> list[tuple[float, float]]:
    """As one rank: seconds of every pair of blocks, bare and ours."""
    run = observed(stage, Path(directory), accumulate=1)
    samples = Made(run.batch, run.plan.micro_batch)
    done = [0]
    pairs = in_turn(lambda: bare(run, samples), lambda: ours(run, samples, done), seconds, agree=first_decides)
    run.finish()
    return pairs


def bare(run: Observed, samples: Made) -> float:
    """What anybody would write."""
    run.turn(on=False)
    engine = run.engine._engine
    with plain_head(engine.module):
        began = time.perf_counter()
        for step in range(DETAIL_EVERY):
            micro = samples.batch(np.array([step]))
            loss = summed_loss(engine(**micro.inputs()).logits, micro.labels) / micro.labels.numel()
            engine.backward(loss)
            engine.step()
        return time.perf_counter() - began


@contextlib.contextmanager
def plain_head(model: Any) -> Iterator[None]:
    """The model with its own head, which gives logits; ours computes the loss."""
    head = model.get_output_embeddings()
    ours = vars(head).pop("forward")
    try:
        yield
    finally:
        head.forward = ours


def ours(run: Observed, samples: Made, done: list[int]) -> float:
    """The trainer with every sink, one step of the block in detail."""
    run.turn(on=True)
    order = SampleOrder(samples=len(samples), global_batch=run.plan.global_batch, seed=0)
    share = Share(replica=run.engine.replica, replicas=PROCESSES, micro_batch=run.plan.micro_batch)
    steps = range(done[0], done[0] + DETAIL_EVERY)
    done[0] += DETAIL_EVERY
    began = time.perf_counter()
    position = Position(steps.start, order)
    Loop(
        engine=run.engine,
        samples=samples,
        share=share,
        position=position,
        source=RemainingSteps(position, steps.stop),
        observer=run.observer,
    ).run()
    return time.perf_counter() - began


def main() -> None:
    """Print the ratio of tokens per second."""
    results: list[Any] = measured_on_ranks(measure, (__doc__ or "").partition("\n")[0])
    found = ratio(results[0])
    print(f"tokens per second, our loop / bare loop: {found}")
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
