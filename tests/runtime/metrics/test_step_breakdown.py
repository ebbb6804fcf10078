"""The parts of a step under every kind of engine, ranks compared, stragglers named."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import Finished, Trainer
from tests.helpers import slow_rank
from toolkit.run_dir.step_parts import PARTS

pytestmark = pytest.mark.slow

PARAMS = 264 * 32 * 2 + 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 64) + 32
STEPS = ("train.steps=12", "metrics.detail_every=5")

KINDS = {
    "data_parallel": (("strategy.name=data_parallel",), {"grad_sync"}, "all_reduce/grad_sync"),
    "zero 2": (
        ("strategy.name=zero", "strategy.zero_stage=2", "strategy.micro_batch=2"),
        {"grad_sync", "param_gather"},
        "all_gather_into_tensor/param_gather",
    ),
    "zero 3": (
        ("strategy.name=zero", "strategy.zero_stage=3"),
        {"grad_sync", "param_gather"},
        "all_gather_into_tensor/param_gather",
    ),
    "tensor_parallel": (
        ("strategy.name=tensor_parallel", "strategy.zero_stage=0"),
        {"tp_comm"},
        "all_reduce/tp_comm",
    ),
    "sequence_parallel": (
        ("strategy.name=sequence_parallel", "strategy.zero_stage=1"),
        {"sp_comm", "grad_sync"},
        "all_to_all_single/sp_comm",
    ),
    "pipeline": (
        ("strategy.name=pipeline", "strategy.zero_stage=1", "strategy.micro_batch=2"),
        {"pp_comm", "bubble"},
        "send/pp_comm",
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_parts_sum_to_the_wall_clock(train: Trainer, name: str) -> None:
    overrides, expected, collective = KINDS[name]
    records = steady_clock(lambda: train(*overrides, *STEPS)).records
    between = records[-1]["time"] - records[0]["time"]  # another clock than the parts'
    assert sum(sum(record["parts"].values()) for record in records[1:]) == pytest.approx(between, rel=0.03)
    for record in records:
        assert sum(record["parts"].values()) == pytest.approx(record["wall_seconds"], rel=0.03)
        assert set(record["parts"]) <= set(PARTS)
        assert record["parts"]["forward"] > 0
        assert record["parts"]["backward"] > 0
        assert record["step_seconds"] <= record["wall_seconds"] * 1.001
        assert record["grad_sync_seconds"] >= record["parts"]["grad_sync"]
    for part in expected:
        assert sum(record["parts"][part] for record in records) > 0, part
    # What no part claims is small: most of a step has a name.
    assert sum(r["parts"]["other"] for r in records[2:]) < 0.25 * sum(r["wall_seconds"] for r in records[2:])
    detailed = [record for record in records if "ranks" in record]
    assert [record["step"] for record in detailed] == [5, 10]
    assert detailed[-1]["collectives"][collective]["calls"] > 0
    assert detailed[-1]["collectives"][collective]["bytes"] > 0
    check_ranks(detailed[-1]["ranks"])
    if name == "pipeline":
        assert len(detailed[-1]["bubble_by_stage"]) == 2
        assert all(0 < share < 1 for share in detailed[-1]["bubble_by_stage"])


def steady_clock(run: Callable[[], Finished]) -> Finished:
    """A run during which nobody set the host's clock, which moves by seconds on a virtual machine that was paused."""
    for _ in range(5):
        ahead = time.time() - time.monotonic()
        done = run()
        if abs(time.time() - time.monotonic() - ahead) < 0.02:
            return done
    raise AssertionError("the host's clock is set all the time")


def check_ranks(ranks: dict[str, dict[str, float]]) -> None:
    for value in ("wall_seconds", "busy_seconds", "comm_seconds", "memory_bytes", "cpu_percent", "host_memory_bytes"):
        stats = ranks[value]
        assert stats["min"] <= stats["mean"] <= stats["max"], value
        assert {stats["min_rank"], stats["max_rank"]} <= {0, 1}


def test_bytes_are_those_of_the_ring(train: Trainer) -> None:
    """Two ranks: an all-reduce of all fp32 gradients sends them once."""
    done = train("strategy.name=data_parallel", "train.steps=2", "metrics.detail_every=2", "train.grad_clip=0")
    sent = done.records[-1]["collectives"]["all_reduce/grad_sync"]
    assert sent["bytes"] == pytest.approx(4 * PARAMS, abs=16)  # and the norm


def test_the_slow_rank_is_named(train: Trainer) -> None:
    done = train("strategy.name=zero", "strategy.zero_stage=1", "train.steps=20", enter=slow_rank.enter)
    named = [record["straggler"] for record in done.records if "straggler" in record]
    assert [one["rank"] for one in named] == [slow_rank.SLOW_RANK] * len(named)
    assert named, "nobody was named within 20 steps"
    assert named[0]["seconds"] == pytest.approx(slow_rank.SLEEP_SECONDS, rel=0.6)
    assert str(slow_rank.SLOW_RANK) in done.summary["stragglers"]
    assert f"rank {slow_rank.SLOW_RANK} is a straggler" in done.summary["explanation"]
    assert any(e["kind"] == "straggler" and f"rank {slow_rank.SLOW_RANK}" in e["text"] for e in events(done))


def test_metrics_leave_the_loss_alone(train: Trainer) -> None:
    axes = ("strategy.name=zero", "strategy.zero_stage=3", "train.steps=4")
    on, off = train(*axes, "metrics.detail_every=1"), train(*axes, "metrics.detail_every=0")
    assert on.losses == off.losses
    assert on.norms == off.norms
    assert on.records[0]["parts"]
    assert not off.records[0]["parts"]
    assert "ranks" not in off.records[-1]


def test_summary_compares_prediction_and_measurement_by_part(train: Trainer) -> None:
    summary = train("strategy.name=zero", "strategy.zero_stage=2", "train.steps=6").summary
    assert {"compute", "dp_comm", "optimizer", "fixed"} <= summary["parts"].keys()
    assert all(part["measured"] >= 0 and part["predicted"] >= 0 for part in summary["parts"].values())
    assert summary["explanation"]
    memory = {name: part["measured"] for name, part in summary["memory_parts"].items()}
    assert sum(memory.values()) == summary["measured"]["memory_bytes"]
    assert memory["weights"] == pytest.approx(4 * PARAMS, rel=0.02)
    assert memory["optimizer"] == pytest.approx((4 + 8) * PARAMS / 2, rel=0.02), "half of masters and moments"
    assert 0.5 * 4 * PARAMS <= memory["gradients"] <= 1.6 * 4 * PARAMS, "half of them, and what is about to be reduced"
    assert memory["activations"] > 0
    assert all(part["predicted"] > 0 for part in summary["memory_parts"].values())


def events(done: Finished) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.run.events.read_text().splitlines()]
