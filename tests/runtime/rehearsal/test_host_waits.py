"""In steady state the host waits for the device once per step, for the loss and norm of the step before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runtime.rehearsal.several import rehearse_all
from toolkit.runtime.models.tiny_models import tiny_of_type

pytestmark = pytest.mark.slow

PLANS = {
    "data parallel": ("strategy.name=data_parallel",),
    "zero 1": ("strategy.name=zero", "strategy.zero_stage=1"),
    "zero 2": ("strategy.name=zero", "strategy.zero_stage=2"),
    "zero 3": ("strategy.name=zero", "strategy.zero_stage=3", "strategy.zero_variant=plain"),
    "tensor": ("strategy.name=tensor_parallel", "strategy.tp=2"),
    "pipeline": ("strategy.name=pipeline", "strategy.pp=2"),
    "live reference": (
        "strategy.name=zero", "strategy.zero_stage=2", "data.path=pairs.jsonl", "data.format=preference",
        "train.objective=dpo", "train.reference=live",
    ),
    "islands": ("strategy={name: local_sgd, islands: 2, local_steps: 1, micro_batch: 1, zero_stage: 1}",),
}  # fmt: skip
GPT_OSS = {**tiny_of_type("gpt_oss"), "vocab_size": 264}
EXPERTS = (
    f"model.config={GPT_OSS}",
    "cluster.devices_per_node=4",
    "strategy.name=expert_parallel",
    "strategy.ep=2",
)
IN_STAGES = (*EXPERTS, "strategy.pp=2", "strategy.zero_stage=1", "strategy.recompute=full")
MIXTURES = {
    "without a limit": IN_STAGES,
    "limited": (*EXPERTS, "strategy.pp=1", "strategy.zero_stage=2", "train.router.capacity_factor=1.25"),
    "limited, in stages": (*IN_STAGES, "train.router.capacity_factor=1.25"),
}
STEPS = 3
"""DeepSpeed's throughput timer, where it is on, begins to wait in the third step, which is the one that is counted."""
READ = "event.synchronize at toolkit/runtime/engine/protocol.py"


def test_the_host_waits_once_per_step(recipe_mapping: dict[str, Any], tmp_path: Path) -> None:
    recipe_mapping["model"]["precision"] = "bf16"
    recipe_mapping["strategy"] = {"micro_batch": 1, "offload": "none"}
    recipe_mapping["train"]["global_batch"] = 4
    recipe_mapping["cluster"] = {"device": "H100-SXM5-80GB", "nodes": 1, "devices_per_node": 2}
    found = rehearse_all(recipe_mapping, {**PLANS, **MIXTURES}, tmp_path, STEPS)
    for role in found.pop("without a limit"):
        sizes = [count for site, count in role.step.host_syncs.items() if site.startswith("sizes of the exchange")]
        assert sizes == [2 * 2], "once per mixture layer of the stage and micro-batch; recomputing waits for nothing"
    [island] = found.pop("islands")
    exchanged = [each for each in island.step.collectives if each.ranks == (0, 1) and each.numel > 1]
    assert [each.kind for each in exchanged] == ["allreduce"], "islands exchange once per step, and their loss"
    with_copy, alone = (found[name][0].step.parts["params"] for name in ("live reference", "zero 2"))
    assert with_copy == pytest.approx(2 * alone, rel=1e-3), "all weights again, but no buffers of positions"
    for name, roles in found.items():
        for role in roles:
            sites = role.step.host_syncs
            assert sum(sites.values()) == 1, (name, role.rank, role.optimizer, sites)
            assert next(iter(sites)).startswith(READ), (name, sites)
