"""fp16 on a real engine: skipped updates and the loss scale are told as DeepSpeed has them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from deepspeed.accelerator import get_accelerator

from tests.helpers.parallel import ADAM, STEPS, batch, micro_batches, model
from toolkit.plans.deepspeed_config import deepspeed_config
from toolkit.plans.plan import Plan
from toolkit.recipe.model_section import Model
from toolkit.recipe.schedules import make_schedule
from toolkit.runtime.build_engine import EngineSpec, build_engine
from toolkit.runtime.distributed.process_group import current_world
from toolkit.runtime.metrics.record import Record
from toolkit.runtime.sinks.local_files import EventSink
from toolkit.runtime.supervision.warm_pool import call_on_ranks

PLANS = {
    "zero": Plan(strategy="zero", dp=2, zero_stage=1, zero_group=2, micro_batch=2, precision="fp16"),
    "data_parallel": Plan(strategy="data_parallel", dp=2, micro_batch=2, precision="fp16"),
    "tensor_parallel": Plan(strategy="tensor_parallel", tp=2, micro_batch=4, precision="fp16"),
    "pipeline": Plan(
        strategy="pipeline", pp=2, micro_batch=2, grad_accum=2, pipeline_bounds=(0, 2, 4), precision="fp16"
    ),
    "interleaved": Plan(
        strategy="pipeline", pp=2, micro_batch=2, grad_accum=2, schedule="interleaved", chunks=2, zero_stage=1,
        precision="fp16",
    ),
    "zero_bubble": Plan(
        strategy="pipeline", pp=2, micro_batch=1, grad_accum=4, schedule="zero_bubble", chunks=2, precision="fp16"
    ),
}  # fmt: skip
FIRST_SCALE_POWER = 19


def train_as_rank(section: Model, plan: Plan) -> list[tuple[float, float, bool, float | None]]:
    """DeepSpeed refuses fp16 on a CPU because it is slow there; the arithmetic is the same, so the check is lifted."""
    type(get_accelerator()).is_fp16_supported = lambda self: True
    config = deepspeed_config(plan, ADAM, params=10**6, backend="cpu")
    config["fp16"] |= {"initial_scale_power": FIRST_SCALE_POWER, "hysteresis": 1}
    site = EngineSpec(model=section, train=ADAM, plan=plan, deepspeed=config, schedule=make_schedule(ADAM, STEPS))
    engine = build_engine(site, current_world())
    results = [engine.step(list(micro_batches(batch(0, "full"), plan, engine.replica))) for _ in range(2 * STEPS)]
    return [(float(result.loss), result.grad_norm, result.skipped, result.loss_scale) for result in results]


@pytest.fixture(scope="module")
def exact() -> list[tuple[float, float]]:
    """Losses and gradient norms of updates in fp32."""
    plan = Plan(strategy="data_parallel", micro_batch=4, precision="fp32")
    (found,) = call_on_ranks(train_as_rank, model("llama"), plan, nproc=1)
    return [(loss, norm) for loss, norm, _, _ in found]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_steps_are_skipped_until_gradients_fit_and_then_learn_as_in_fp32(
    name: str, exact: list[tuple[float, float]]
) -> None:
    """Each step is the same batch: what was skipped changes nothing, and the next update is one of fp32's."""
    both = call_on_ranks(train_as_rank, replace(model("llama"), precision="fp16"), PLANS[name], nproc=2)
    assert both[0] == both[1]
    assert both[0][0][2], "the first scale must be too large for this model's gradients in fp16"
    assert not both[0][-1][2], "and some smaller scale is not"
    scale, updates = 2.0**FIRST_SCALE_POWER, iter(exact)
    for loss, norm, skipped, told in both[0]:
        scale = scale / 2 if skipped else scale
        assert told == scale
        if not skipped:
            assert (loss, norm) == pytest.approx(next(updates), rel=5e-3)


def test_a_skipped_step_is_an_event(tmp_path: Path) -> None:
    sink = EventSink(tmp_path / "events.jsonl")
    sink.start({})
    usual = Record(
        step=1, loss=1.0, lr=1.0, grad_norm=1.0, tokens=1, step_seconds=1.0, tokens_per_second=1.0, mfu=0.1,
        memory_bytes=1, comm_seconds=0.0, data_seconds=0.0, loss_scale=8.0,
    )  # fmt: skip
    sink.log(usual)
    sink.log(replace(usual, step=2, skipped=1, loss_scale=4.0))
    sink.log(replace(usual, step=3, checkpoint_step=2))
    sink.log(replace(usual, step=3, checkpoint_step=2))
    sink.finish({"status": "done", "steps": 3})
    found = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["kind"], event["step"]) for event in found] == [
        ("start", 0),
        ("skipped", 2),
        ("checkpoint", 2),
        ("rewind", 3),
        ("end", 3),
    ]
    assert "loss scale is now 4" in found[1]["text"]
