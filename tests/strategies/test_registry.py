"""The registry: strategies propose valid plans, or say why not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import strategies
from strategies import base
from strategies.base import divisors
from toolkit.plans import deepspeed_rules
from toolkit.plans.job import make_job
from toolkit.plans.plan import Job, Plan, Refusal
from toolkit.plans.versions import parse_version
from toolkit.recipe.file import make_recipe


def job(devices: int = 8, batch: int = 32, nodes: int = 1, **fixed: Any) -> Job:
    recipe = make_recipe(
        {
            "model": {"path": "llama-3-8b"},
            "data": {"seq_len": 2048},
            "train": {"steps": 1, "global_batch": batch},
            "cluster": {
                "device": "H100-SXM5-80GB",
                "devices_per_node": devices // nodes,
                "nodes": nodes,
                "nvme_gib": 4000,
            },
        }
    )
    return replace(make_job(recipe), fixed=fixed)


def plans(given: Job, name: str = "auto") -> list[Plan]:
    return [p for p in strategies.propose(given, name) if isinstance(p, Plan)]


def refusals(given: Job, name: str = "auto") -> list[Refusal]:
    return [p for p in strategies.propose(given, name) if isinstance(p, Refusal)]


def test_third_parties_find_all_they_need_in_base() -> None:
    assert {"Job", "Plan", "Proposal", "Refusal", "Space", "Strategy", "plans"} <= set(base.__all__)
    assert (base.Job, base.Plan, base.Refusal) == (Job, Plan, Refusal)
    assert all(hasattr(base, name) for name in base.__all__)


@pytest.mark.parametrize("name", strategies.registry())
@pytest.mark.parametrize(("devices", "batch"), [(1, 4), (2, 6), (8, 32), (16, 48)])
def test_every_plan_uses_all_devices_and_makes_the_batch(name: str, devices: int, batch: int) -> None:
    work = job(devices, batch)
    proposals = plans(work, name)
    for plan in proposals:
        assert plan.strategy == name
        assert plan.devices == devices
        assert plan.global_batch == batch
        assert deepspeed_rules.refusal(plan, work) is None
    assert len(set(proposals)) == len(proposals), "a plan is proposed twice"


def test_zero_has_every_stage_offload_and_variant() -> None:
    proposals = plans(job(16, nodes=2), "zero")
    seen = {(p.zero_stage, p.offload) for p in proposals}
    assert {(1, "none"), (2, "cpu"), (3, "cpu_params"), (3, "nvme"), (3, "nvme_params")} <= seen
    assert (2, "cpu_params") not in seen
    assert {p.zero_group for p in proposals if p.zero_variant == "hpz"} == {2, 4, 8}
    assert {p.zero_quantized for p in plans(job(16, zero_quantized="both"), "zero")} == {"both"}


def test_fixed_axes_are_kept() -> None:
    for plan in plans(job(8, zero_stage=2, micro_batch=2, recompute="full")):
        assert (plan.zero_stage, plan.micro_batch, plan.recompute) == (2, 2, "full")
    assert plans(job(8, zero_stage=2), "data_parallel") == []
    assert "offers 0" in refusals(job(8, zero_stage=2), "data_parallel")[0].reason


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ({"zero_stage": 1, "offload": "cpu_params"}, "ZeRO 3 only"),
        ({"zero_stage": 2, "offload": "nvme"}, "NVMe under ZeRO 3 only"),
        ({"zero_stage": 3, "zero_variant": "mics", "zero_group": 4}, "removed in DeepSpeed 0.19.7"),
        ({"zero_stage": 2, "zero_group": 4}, "zero_variant hpz"),
        ({"zero_stage": 2, "zero_quantized": "weights"}, "needs ZeRO 3"),
        ({"islands": 2}, "synchronises every step"),
        ({"grad_accum": 3}, "does not make the global batch"),
    ],
)
def test_refusals_say_why(fixed: dict[str, Any], words: str) -> None:
    given = job(8, **fixed)
    assert plans(given, "zero") == []
    assert any(words in refusal.reason for refusal in refusals(given, "zero"))


def test_mics_runs_where_the_version_has_it() -> None:
    plan = Plan(strategy="zero", dp=8, zero_stage=3, zero_group=4, zero_variant="mics", grad_accum=4)
    assert deepspeed_rules.refusal(plan, job(8), (0, 19, 6)) is None
    assert "removed" in str(deepspeed_rules.refusal(plan, job(8), (0, 19, 7)))


def test_versions_compare_as_numbers() -> None:
    assert parse_version("0.19.10+cu130") > parse_version("0.19.8")
    assert parse_version("0.20") > parse_version("0.19.10")


def test_divisors() -> None:
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


def test_every_strategy_describes_itself() -> None:
    for name, strategy in strategies.registry().items():
        assert strategy.name == name
        assert min(map(len, (strategy.summary, strategy.needs, strategy.refuses, strategy.axes))) > 0
        assert bool(strategy.variants(8)) == (name != "local_sgd"), "it differs from one process by design"


def test_third_parties_join_but_do_not_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        def __init__(self, name: str) -> None:
            self.name = name

        def load(self) -> Any:
            return lambda: f"loaded {self.name}"

    monkeypatch.setattr(strategies, "entry_points", lambda group: [Point("zero"), Point("mine")])
    registry = strategies.registry()
    assert registry["zero"] is strategies.STRATEGIES["zero"]
    assert registry["mine"] == "loaded mine"
