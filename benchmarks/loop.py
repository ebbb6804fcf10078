"""Our training loop with metrics on, against bare DeepSpeed loops: same engine, same batches, a step of each in turn.

python -m benchmarks.loop [--stage 2] [--seconds 80]

One bare loop knows the loss of its own rank only. The other one sums counted tokens and losses over ranks, as a loop
must whose loss and gradients are those of one process.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed

from benchmarks.observed import DETAIL_EVERY, PROCESSES, Observed, first_decides, measured_on_ranks, observed
from benchmarks.paired import ratio
from toolkit.runtime.between_steps import FinishedStep
from toolkit.runtime.data.prefetch import Share
from toolkit.runtime.data.sample_order import SampleOrder
from toolkit.runtime.loop import Loop, Position
from toolkit.runtime.models.loss import summed_loss
from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch

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
KINDS = {"bare loop": False, "bare loop with the same sums over ranks": True}
"""Name → whether it sums tokens and losses over ranks."""
TIMES = ("tokens per second", "tokens per processor second of the training thread")


def measure(stage: int, seconds: float, directory: str) -> dict[tuple[str, str], Pairs]:
    """As one rank: every pair of blocks, by the kind of bare loop and the kind of time."""
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
    return {name: blocks(pairs) for name, pairs in between.pairs.items()}


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
    """A hook that takes one step of each bare loop after each of ours: who shares the machine slows down all alike."""

    run: Observed
    samples: Made
    pairs: dict[tuple[str, str], Pairs] = field(default_factory=lambda: defaultdict(list))
    _began: tuple[float, float] = field(default_factory=lambda: now())

    def needs_state(self, step: int) -> bool:
        """The bare step changes the state."""
        return True

    def after(self, step: FinishedStep) -> None:
        """Note how long our step took, take the bare ones, and note those."""
        own = [end - begin for begin, end in zip(self._began, now(), strict=True)]
        self.run.turn(on=False)
        names = list(KINDS) if step.number % 2 else list(KINDS)[::-1]
        for name in names:
            began = now()
            bare(self.run, self.samples.batch(np.array([step.number])), sums=KINDS[name])
            for kind, begin, end, ours in zip(TIMES, began, now(), own, strict=True):
                self.pairs[name, kind].append((end - begin, ours))
        self.run.turn(on=True)
        self._began = now()


def now() -> tuple[float, float]:
    """Seconds on the wall, and of the processor in this thread."""
    return time.perf_counter(), time.thread_time()


def blocks(pairs: Pairs) -> Pairs:
    """Sums over so many steps that one of ours is in detail, without the first, in which caches fill."""
    starts = range(STEPS_AT_A_TIME, len(pairs), DETAIL_EVERY)
    return [(sum(a for a, _ in part), sum(b for _, b in part)) for s in starts if (part := pairs[s : s + DETAIL_EVERY])]


def bare(run: Observed, micro: MicroBatch, *, sums: bool) -> None:
    """A step as anybody would write it. `sums`: of tokens and losses over ranks."""
    engine = run.engine._engine
    with plain_head(engine.module):
        tokens = (micro.labels != IGNORE).sum() if sums else torch.tensor(micro.labels.numel() * PROCESSES)
        if sums:
            torch.distributed.all_reduce(tokens)
        loss = summed_loss(engine(**micro.inputs()).logits, micro.labels)
        engine.backward(loss * PROCESSES / tokens)
        engine.step()
        if sums:
            total = loss.detach()
            torch.distributed.all_reduce(total)
            float(total / tokens)


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
    for (name, kind), pairs in results[0].items():
        found = ratio(pairs)
        print(f"{kind}, our loop / {name}: {found}")
        print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
