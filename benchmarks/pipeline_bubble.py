"""How near a pipeline comes to its ideal: step time over (m + p − 1) turns of its slowest stage, in one run.

python benchmarks/pipeline_bubble.py [--stages 2] [--micro-batches 8] [--steps 6]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from toolkit.plans.deepspeed_config import deepspeed_config
from toolkit.plans.plan import Plan
from toolkit.recipe.file import load_recipe
from toolkit.recipe.schedules import make_schedule
from toolkit.recipe.sections import Train
from toolkit.runtime.build_engine import EngineSpec, build_engine
from toolkit.runtime.distributed.process_group import current_world, gather_objects
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.supervision.warm_pool import call_on_ranks, first_failure

DEMO = Path(__file__).resolve().parent.parent / "recipes" / "demo.yaml"


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Call the function and note how long it takes."""

    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    return run


def measure(plan: Plan, steps: int) -> dict[str, float]:
    """As one rank: seconds of a step, and of the slowest stage's forward and backward pass of a micro-batch."""
    torch.manual_seed(0)
    recipe = load_recipe(DEMO)
    train = Train(global_batch=plan.global_batch, steps=steps)
    config = deepspeed_config(plan, train, params=10**7, backend="cpu")
    turns: dict[str, list[float]] = {"forward": [], "backward": []}
    instructions = PipelineEngine._INSTRUCTION_MAP
    for name, kind in (("forward", schedule.ForwardPass), ("backward", schedule.BackwardPass)):
        instructions[kind] = timed(instructions[kind], turns[name])
    site = EngineSpec(
        model=recipe.model, train=train, plan=plan, deepspeed=config, schedule=make_schedule(train, steps)
    )
    engine = build_engine(site, current_world())
    ids = torch.randint(0, 256, (plan.micro_batch, recipe.data.seq_len + 1))
    batch = [MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())] * plan.grad_accum
    whole: list[float] = []
    for _ in range(steps):
        timed(engine.step, whole)(batch)
    stage = sum(statistics.median(seconds) for seconds in turns.values())
    return {"step": statistics.median(whole[1:]), "stage": max(gather_objects(stage))}


def main() -> None:
    """Print the ratio as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    plan = Plan(strategy="pipeline", pp=args.stages, micro_batch=2, grad_accum=args.micro_batches, precision="fp32")
    results = call_on_ranks(measure, plan, args.steps, nproc=args.stages, timeout_seconds=600)
    failure = first_failure(results)
    assert failure is None, failure
    ideal = results[0]["stage"] * (args.micro_batches + args.stages - 1)
    print(json.dumps({**results[0], "ideal": ideal, "ratio": results[0]["step"] / ideal}, indent=1))


if __name__ == "__main__":
    main()
