"""How near a pipeline comes to its ideal: step time over the ideal step of its slowest rank, in one run.

python benchmarks/pipeline_bubble.py [--ranks 2] [--micro-batches 8] [--steps 6] [--schedule interleaved --chunks 2]

The ideal of a rank that computes for s seconds per step is s · (m + (p − 1) / v) / m. `--pause 40` lets every rank
sleep 40 ms per micro-batch and third of the work (forward, gradients of inputs, gradients of weights) on a tiny model:
it measures order and transfers where there are fewer cores than ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from toolkit.cost.execution import V_BUBBLE
from toolkit.plans.deepspeed_config import deepspeed_config
from toolkit.plans.plan import Plan
from toolkit.recipe.file import load_recipe
from toolkit.recipe.model_section import Model
from toolkit.recipe.schedules import make_schedule
from toolkit.recipe.sections import Train
from toolkit.runtime.build_engine import EngineSpec, build_engine
from toolkit.runtime.distributed.process_group import current_world, gather_objects
from toolkit.runtime.metrics.step_clock import HostClock
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.pipeline.stage import Stage
from toolkit.runtime.pipeline.weight_gradients import WeightGradients
from toolkit.runtime.supervision.warm_pool import call_on_ranks, first_failure

DEMO = Path(__file__).resolve().parent.parent / "recipes" / "demo.yaml"
TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 256,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def pause_instead(plan: Plan, seconds: float) -> None:
    """Let every pass of a chunk take its share of `seconds`: one in the forward pass, two in the backward pass."""
    forward, each = Stage.forward, seconds / plan.chunks
    apart = plan.schedule == "zero_bubble"

    def slow_forward(self: Stage, received: Any) -> Any:
        output = forward(self, received)
        time.sleep(each)
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            first.register_hook(lambda gradient: time.sleep(each if apart else 2 * each))
        return output

    compute = WeightGradients.compute

    def slow_compute(self: WeightGradients, place: Any) -> None:
        compute(self, place)
        time.sleep(each)

    Stage.forward = slow_forward  # type: ignore[method-assign]
    WeightGradients.compute = slow_compute  # type: ignore[method-assign]


def measure(plan: Plan, steps: int, pause: float) -> dict[str, float]:
    """As one rank: seconds of a step, and of the passes of the slowest rank."""
    torch.manual_seed(0)
    recipe = load_recipe(DEMO)
    model, length = recipe.model, recipe.data.seq_len
    if pause:
        pause_instead(plan, pause)
        model = Model(config={**TINY, "num_hidden_layers": plan.pp * plan.chunks}, init="scratch", precision="fp32")
        length = 8
    train = Train(global_batch=plan.global_batch, steps=steps)
    site = EngineSpec(
        model=model,
        train=train,
        plan=plan,
        deepspeed=deepspeed_config(plan, train, params=10**7, backend="cpu"),
        schedule=make_schedule(train, steps),
    )
    engine, clock = build_engine(site, current_world()), HostClock()
    engine.watch(clock)
    ids = torch.randint(0, 256, (plan.micro_batch, length + 1))
    batch = [MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())] * plan.grad_accum
    whole, busy = [], []
    for _ in range(steps):
        engine.step(batch)
        lap = clock.lap(sample_next=True)
        whole.append(lap.wall_seconds)
        busy.append(lap.parts["forward"] + lap.parts["backward"])
    return {"step": statistics.median(whole[1:]), "busy": max(gather_objects(statistics.median(busy[1:])))}


def main() -> None:
    """Print the ratio as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", "--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--schedule", default="1f1b", choices=("1f1b", "interleaved", "zero_bubble"))
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0, metavar="MILLISECONDS")
    args = parser.parse_args()
    chunks = 2 if args.schedule == "zero_bubble" else args.chunks
    plan = Plan(
        strategy="pipeline", pp=args.ranks, micro_batch=2, grad_accum=args.micro_batches, precision="fp32",
        schedule=args.schedule, chunks=chunks,
    )  # fmt: skip
    results = call_on_ranks(measure, plan, args.steps, args.pause / 1000, nproc=args.ranks, timeout_seconds=600)
    failure = first_failure(results)
    assert failure is None, failure
    found = results[0]
    share = V_BUBBLE if args.schedule == "zero_bubble" else 1.0
    ideal = found["busy"] * (args.micro_batches + share * (args.ranks - 1) / chunks) / args.micro_batches
    print(json.dumps({**found, "ideal": ideal, "ratio": found["step"] / ideal}, indent=1))


if __name__ == "__main__":
    main()
