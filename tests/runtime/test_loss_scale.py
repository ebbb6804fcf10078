"""fp16 on a real engine: skipped updates and the loss scale are told as DeepSpeed has them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from deepspeed.accelerator import get_accelerator

from tests.runtime.parallel import ADAM, STEPS, batch, micro_batches, model
from toolkit.deepspeed_config import deepspeed_config
from toolkit.plan import Plan
from toolkit.recipe import Model
from toolkit.runtime.build import Site, build_engine
from toolkit.runtime.distributed import current_world
from toolkit.runtime.event_sink import EventSink
from toolkit.runtime.groups import call_on_ranks
from toolkit.runtime.metrics import Record
from toolkit.schedule import make_schedule

PLAN = Plan(strategy="zero", dp=2, zero_stage=1, zero_group=2, micro_batch=2, precision="fp16")


def train_as_rank(section: Model) -> list[tuple[bool, float | None]]:
    """DeepSpeed refuses fp16 on a CPU because it is slow there; the arithmetic is the same, so the check is lifted."""
    type(get_accelerator()).is_fp16_supported = lambda self: True
    config = deepspeed_config(PLAN, ADAM, params=10**6, backend="cpu")
    config["fp16"] |= {"initial_scale_power": 22, "hysteresis": 1}
    site = Site(model=section, train=ADAM, plan=PLAN, deepspeed=config, schedule=make_schedule(ADAM, STEPS))
    engine = build_engine(site, current_world())
    results = [engine.step(list(micro_batches(batch(s, "full"), PLAN, engine.replica))) for s in range(2 * STEPS)]
    return [(result.skipped, result.loss_scale) for result in results]


def test_skipped_steps_halve_the_scale_until_gradients_fit() -> None:
    both = call_on_ranks(train_as_rank, replace(model("llama"), precision="fp16"), nproc=2)
    assert both[0] == both[1]
    skipped = [one for one, _ in both[0]]
    assert skipped[0], "2**22 must be too large for this model's gradients in fp16"
    assert not skipped[-1], "and some smaller scale is not"
    scale = 2.0**22
    for was_skipped, told in both[0]:
        scale = scale / 2 if was_skipped else scale
        assert told == scale


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
