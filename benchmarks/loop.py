"""Our training loop with metrics on, against a bare DeepSpeed loop: same engine, same batches, a step of each in turn.

python -m benchmarks.loop [--stage 2] [--seconds 80]
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.observed import DETAIL_EVERY, PROCESSES, Observed, first_decides, measured_on_ranks, observed
from benchmarks.paired import ratio
from toolkit.runtime.between_steps import FinishedStep
from toolkit.runtime.data.prefetch import Share
from toolkit.runtime.data.sample_order import SampleOrder
from toolkit.runtime.loop import Loop, Position
from toolkit.runtime.models.loss import summed_loss
from toolkit.runtime.models.micro_batch import MicroBatch

STEPS_AT_A_TIME = 2 * DETAIL_EVERY
"""Of our loop, before it asks whether the time is up."""


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


Pairs = list[tuple[float, float]]
"""Seconds of blocks of steps, bare and ours."""


def measure(stage: int, seconds: float, directory: str) -> tuple[Pairs, Pairs]:
    """As one rank: every pair of blocks, by the clock on the wall and by the processor time of the training thread."""
    run = observed(stage, Path(directory), accumulate=1)
    samples = Made(run.batch, run.plan.micro_batch)
    position = Position(0, SampleOrder(samples=len(samples), global_batch=run.plan.global_batch, seed=0))
    between = BareBetween(run, samples)
    Loop(
        engine=run.engine,
        samples=samples,
        share=Share(replica=run.engine.replica, replicas=PROCESSES, micro_batch=run.plan.micro_batch),
        position=position,
        source=UntilTimeIsUp(position, seconds),
        observer=run.observer,
        hooks=[between],
    ).run()
    run.finish()
    return blocks(between.wall), blocks(between.processor)


@dataclass(frozen=True)
class UntilTimeIsUp:
    """Steps of our loop, so many at a time, until rank 0 says that the time is up."""

    position: Position
    seconds: float

    def __iter__(self) -> Iterator[range]:
        began = time.perf_counter()
        while first_decides(time.perf_counter() - began < self.seconds):
            yield range(self.position.step, self.position.step + STEPS_AT_A_TIME)

    def finish(self) -> None:
        """Nothing is saved."""


@dataclass
class BareBetween:
    """A hook that takes one bare step after each of ours: who shares the machine slows down both alike."""

    run: Observed
    samples: Made
    wall: Pairs = field(default_factory=list)
    processor: Pairs = field(default_factory=list)
    _began: tuple[float, float] = field(default_factory=lambda: now())

    def needs_state(self, step: int) -> bool:
        """The bare step changes the state."""
        return True

    def after(self, step: FinishedStep) -> None:
        """Note how long our step took, take a bare one, and note that."""
        ended = now()
        self.run.turn(on=False)
        began = now()
        bare(self.run, self.samples.batch(np.array([step.number])))
        for pairs, start, end, own, done in zip(
            (self.wall, self.processor), began, now(), self._began, ended, strict=True
        ):
            pairs.append((end - start, done - own))
        self.run.turn(on=True)
        self._began = now()


def now() -> tuple[float, float]:
    """Seconds on the wall, and of the processor in this thread."""
    return time.perf_counter(), time.thread_time()


def blocks(pairs: Pairs) -> Pairs:
    """Sums over so many steps that one of ours is in detail, without the first, in which caches fill."""
    starts = range(STEPS_AT_A_TIME, len(pairs), DETAIL_EVERY)
    return [(sum(a for a, _ in part), sum(b for _, b in part)) for s in starts if (part := pairs[s : s + DETAIL_EVERY])]


def bare(run: Observed, micro: MicroBatch) -> None:
    """A step as anybody would write it."""
    engine = run.engine._engine
    with plain_head(engine.module):
        loss = summed_loss(engine(**micro.inputs()).logits, micro.labels) / micro.labels.numel()
        engine.backward(loss)
        engine.step()


@contextlib.contextmanager
def plain_head(model: Any) -> Iterator[None]:
    """The model with its own head, which gives logits; ours computes the loss."""
    head = model.get_output_embeddings()
    ours = vars(head).pop("forward")
    try:
        yield
    finally:
        head.forward = ours


def main() -> None:
    """Print the ratio of tokens per second."""
    results: list[Any] = measured_on_ranks(measure, (__doc__ or "").partition("\n")[0])
    for name, pairs in zip(
        ("tokens per second", "tokens per processor second of the training thread"), results[0], strict=True
    ):
        found = ratio(pairs)
        print(f"{name}, our loop / bare loop: {found}")
        print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
