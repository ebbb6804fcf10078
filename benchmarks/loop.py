"""Our training loop with metrics on, against a bare DeepSpeed loop on the same engine and pre-made batches, in turns.

python benchmarks/loop.py [--blocks 8] [--steps 6]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.deepspeed_config import deepspeed_config
from toolkit.plan import Plan
from toolkit.recipe import Model, Train
from toolkit.runtime import comm_timer
from toolkit.runtime.build import Site, build_engine
from toolkit.runtime.clock import make_clock
from toolkit.runtime.counters import make_counters
from toolkit.runtime.data import MicroBatch
from toolkit.runtime.distributed import current_world, host_group
from toolkit.runtime.engine import ReplicaEngine, summed_loss
from toolkit.runtime.groups import call_on_ranks, first_failure
from toolkit.runtime.memory_meter import MemoryMeter
from toolkit.runtime.metrics import JsonlSink, Recorder
from toolkit.runtime.order import Order
from toolkit.runtime.prefetch import Share
from toolkit.runtime.step_meter import StepMeter
from toolkit.runtime.trace import Tracer
from toolkit.runtime.trainer import Observer, SpikeGuard, train
from toolkit.schedule import make_schedule

MODEL = {
    "model_type": "llama", "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 264, "max_position_embeddings": 512,
}  # fmt: skip
SEQ_LEN, MICRO_BATCH, PROCESSES = 256, 4, 2
DETAIL_EVERY = 10
"""As recipes have it by default."""


@dataclass(frozen=True)
class Made:
    """Samples that are micro-batches already."""

    batches: Sequence[MicroBatch]
    lengths: None = None
    positions: int = 0
    positions_used: int = 0

    def __len__(self) -> int:
        return len(self.batches) * MICRO_BATCH * PROCESSES

    def width(self, indices: np.ndarray) -> int:
        """Tokens of a row."""
        return SEQ_LEN

    def batch(self, indices: np.ndarray, width: int | None = None) -> MicroBatch:
        """Whatever is asked for: made before."""
        return self.batches[int(indices[0]) % len(self.batches)]


class Nothing:
    """A keeper that keeps nothing."""

    def after(self, step: int) -> None:
        """Nothing."""


def rank(blocks: int, steps: int, directory: str) -> list[tuple[float, float]]:
    """Seconds of each block, bare and ours, as one rank."""
    settings = Train(global_batch=MICRO_BATCH * PROCESSES, steps=10**6, schedule="constant", warmup=0.0)
    plan = Plan(
        strategy="zero", dp=PROCESSES, zero_stage=1, zero_group=PROCESSES, micro_batch=MICRO_BATCH, precision="fp32"
    )
    clock = make_clock()
    timer = comm_timer.install(clock, 1)
    engine = build_engine(
        Site(
            model=Model(config=MODEL, init="scratch", precision="fp32"),
            train=settings,
            plan=plan,
            deepspeed=deepspeed_config(plan, settings, params=10**7, backend="cpu"),
            schedule=make_schedule(settings, 10**6),
        ),
        current_world(),
    )
    assert isinstance(engine, ReplicaEngine)
    engine.watch(clock)
    memory = MemoryMeter()
    counters, _ = make_counters(current_world().local_rank)
    meter = StepMeter(plan, clock, timer, memory, counters, DETAIL_EVERY, host_group())
    sinks = [JsonlSink(Path(directory) / "metrics.jsonl", Path(directory) / "summary.json")]
    recorder = Recorder(list(sinks) if engine.replica == 0 else [])
    for sink in recorder.sinks:
        sink.start({})
    observer = Observer(
        recorder=recorder, meter=meter, memory=memory, model_flops=1e9, hardware_flops=1e9, devices=PROCESSES,
        peak_flops=1e12, guard=SpikeGuard(float("inf")), scales_loss=False, saved=lambda: 0,
        tracer=Tracer(None, Path(directory) / "trace", current_world().rank),
    )  # fmt: skip
    samples = made()
    order = Order(samples=len(samples), global_batch=settings.global_batch, seed=0)
    share = Share(replica=engine.replica, replicas=PROCESSES, micro_batch=MICRO_BATCH)
    counters.start()
    meter.begin()
    done, found = 0, []
    for block in range(blocks + 1):
        started = time.perf_counter()
        bare(engine._engine, samples, steps)
        middle = time.perf_counter()
        train(engine, samples, order, share, range(done, done + steps), observer, Nothing())
        found.append((middle - started, time.perf_counter() - middle))
        done += steps
        torch.distributed.barrier()
        if block == 0:
            found.clear()  # caches fill, and one step is watched for memory
    counters.stop()
    return found


def made() -> Made:
    """A few batches."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 264, (MICRO_BATCH, SEQ_LEN + 1), generator=generator) for _ in range(8)]
    return Made([MicroBatch(i[:, :-1].contiguous(), i[:, 1:].contiguous()) for i in ids])


def bare(engine: Any, samples: Made, steps: int) -> None:
    """What anybody would write."""
    for step in range(steps):
        micro = samples.batch(np.array([step]))
        loss = summed_loss(engine(**micro.inputs()).logits, micro.labels) / micro.labels.numel()
        engine.backward(loss)
        engine.step()


def main() -> None:
    """Print the ratio of tokens a second."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        results = call_on_ranks(rank, args.blocks, args.steps, directory, nproc=PROCESSES, timeout_seconds=1200)
    failure = first_failure(results)
    assert failure is None, failure
    ratios = [plain / ours for plain, ours in results[0]]
    ratio = statistics.median(ratios)
    total = sum(plain for plain, _ in results[0]) / sum(ours for _, ours in results[0])
    print(f"our loop / bare loop: median {ratio:.3f}, of all time {total:.3f}")
    print("by block: " + ", ".join(f"{r:.3f}" for r in ratios))


if __name__ == "__main__":
    main()
