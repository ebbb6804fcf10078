"""What the metrics cost: steps with everything on against steps with everything off, in turn, in one run.

python -m benchmarks.metrics_overhead [--stage 2] [--seconds 80]

On means: every collective timed, the step split into parts, ranks gathered every tenth step, device counters, and
records to metrics.jsonl, W&B (offline) and TensorBoard. A block is ten steps, one of them detailed; it counts as nine
times the median of the others and the detailed one, so that what else the machine does hardly counts. `quiet` is the
same ratio from the fifth of the steps that were disturbed least: other work only ever adds time. `record_cpu` is what
the training thread itself spends on a record.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.observed import DETAIL_EVERY, Observed, first_decides, measured_on_ranks, observed
from benchmarks.paired import in_turn, ratio
from toolkit.runtime.between_steps import FinishedStep

Blocks = list[list[float]]
"""Seconds of the steps of each block."""


def measure(stage: int, seconds: float, directory: str) -> dict[str, Any]:
    """As one rank: seconds of every pair of blocks, on and off."""
    run = observed(stage, Path(directory))
    counts = {"steps": 0}
    record_cpu: list[float] = []
    on: Blocks = []
    off: Blocks = []
    pairs = in_turn(
        lambda: watched_block(run, counts, record_cpu, on), lambda: plain_block(run, off), seconds, agree=first_decides
    )
    run.finish()
    return {"pairs": pairs, "record_cpu": statistics.median(record_cpu), "quiet": quiet(on) / quiet(off)}


def quiet(blocks: Blocks) -> float:
    """Seconds of a block if nothing disturbed it."""
    plain = sorted(seconds for block in blocks for seconds in block[:-1])
    detailed = sorted(block[-1] for block in blocks)
    return plain[len(plain) // 5] * (DETAIL_EVERY - 1) + detailed[len(detailed) // 5]


def watched_block(run: Observed, counts: dict[str, int], record_cpu: list[float], blocks: Blocks) -> float:
    """Ten steps with everything on; the last is detailed."""
    run.turn(on=True)
    taken = []
    blocks.append(taken)
    for _ in range(DETAIL_EVERY):
        began = time.perf_counter()
        result = run.engine.step(run.batch)
        counts["steps"] += 1
        cpu = time.thread_time()
        run.observer.record(
            FinishedStep(
                number=counts["steps"],
                result=result,
                sample_ids=np.arange(0),
                started=began,
                data_seconds=0.0,
                memory=run.observer.memory.last(),
            )
        )
        record_cpu.append(time.thread_time() - cpu)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[:-1]) * (DETAIL_EVERY - 1) + taken[-1]


def plain_block(run: Observed, blocks: Blocks) -> float:
    """Ten steps with everything off."""
    run.turn(on=False)
    taken = []
    blocks.append(taken)
    for _ in range(DETAIL_EVERY):
        began = time.perf_counter()
        float(run.engine.step(run.batch).loss)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[:-1]) * (DETAIL_EVERY - 1) + taken[-1]


def main() -> None:
    """Print the ratio as JSON."""
    results: list[Any] = measured_on_ranks(measure, (__doc__ or "").partition("\n")[0])
    found = ratio(results[0]["pairs"])
    off = statistics.median(b for _, b in results[0]["pairs"]) / DETAIL_EVERY
    print(f"metrics on / off: {found}")
    print(f"of the least disturbed steps: {results[0]['quiet']:.4f}")
    print(
        json.dumps(
            asdict(found)
            | {"step_seconds": off, "record_cpu_seconds": results[0]["record_cpu"], "quiet": results[0]["quiet"]}
        )
    )


if __name__ == "__main__":
    main()
