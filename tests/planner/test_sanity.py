"""Jobs that an expert would know how to run: the planner chooses that plan, or predicts it within 5% of its own."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import strategies
from tests.helpers.planning import cluster
from toolkit.cost.memory import memory
from toolkit.models.spec import ModelSpec, read_model_config
from toolkit.planner.search import Decision, decide, fits
from toolkit.plans.plan import Job, Workload

MODELS = Path(__file__).parents[2] / "configs" / "models"


@dataclass(frozen=True)
class Sane:
    """A job, the axes that an expert would fix, and why."""

    model: str
    device: str
    nodes: int
    batch: int
    seq: int
    axes: dict[str, Any]
    why: str
    per_node: int = 8
    work: dict[str, Any] = field(default_factory=dict)
    machines: dict[str, Any] = field(default_factory=dict)

    def job(self) -> Job:
        found = dataclasses.replace(cluster(self.device, self.nodes, self.per_node), **self.machines)
        settings = {"precision": "bf16", **self.work}
        return Job(
            model=model(self.model),
            cluster=found,
            workload=Workload(global_batch=self.batch, seq_len=self.seq, **settings),
        )


@cache
def model(name: str) -> ModelSpec:
    return read_model_config(json.loads((MODELS / f"{name}.json").read_text()))


H100, A100, A100_40 = "H100-SXM5-80GB", "A100-SXM4-80GB", "A100-SXM4-40GB"
LORA: dict[str, Any] = {"lora_rank": 16}
QLORA: dict[str, Any] = {"lora_rank": 16, "quantized_base": True}
OLD: dict[str, Any] = {"precision": "fp16"}
SLOW: dict[str, Any] = {"inter_bytes_per_second": 1.25e8}
SITES: dict[str, Any] = {"sites": 2, "site_bytes_per_second": 1.25e8}
DENSE = (
    Sane("qwen2.5-0.5b", H100, 1, 512, 2048, {"zero_stage": 1}, "fits everywhere: replicas, states sharded for free"),
    Sane("llama-3.2-1b", H100, 1, 256, 4096, {"zero_stage": 1}, "1B: replicas; there is nothing to split"),
    Sane("llama-3.2-1b", A100_40, 1, 256, 2048, {"zero_stage": 2}, "replicas with sharded states and gradients"),
    Sane("llama-3.2-3b", H100, 2, 256, 4096, {"zero_stage": 2}, "weights fit on each device; states do not"),
    Sane("llama-3.1-8b", H100, 1, 128, 4096, {"zero_stage": 2}, "8B on 80 GB: weights stay whole, the rest is sharded"),
    Sane("llama-3.1-8b", A100, 1, 128, 4096, {"zero_stage": 2}, "as on H100"),
    Sane("llama-3.1-8b", A100_40, 2, 128, 4096, {"zero_stage": 3}, "40 GB: weights are sharded, too"),
    Sane("llama-3.1-8b", H100, 8, 512, 8192, {"zero_stage": 2}, "64 devices: replicas; gradients hide in the batch"),
    Sane("llama-2-13b", A100, 1, 64, 4096, {"zero_stage": 3}, "13B: ZeRO 3 inside a node costs little"),
    Sane(
        "llama-2-13b",
        A100_40,
        1,
        64,
        2048,
        {"tp": 4, "pp": 2},
        "states alone are 26 of 40 GB: cut them once, inside NVLink",
    ),
    Sane("qwen3-32b", H100, 4, 256, 4096, {"zero_stage": 3}, "32 devices hold 512 GB of states; ZeRO 3 over fast NICs"),
    Sane("llama-3.1-70b", H100, 8, 512, 4096, {"zero_stage": 3, "tp": 1}, "70B on 64 H100: ZeRO 3 with a large batch"),
    Sane("llama-3.1-70b", A100, 16, 1024, 4096, {"zero_stage": 3, "tp": 1}, "128 A100 with 200 Gbit/s each: the same"),
    Sane("llama-3.1-405b", H100, 2048, 2048, 8192, {"tp": 8, "pp": 16}, "the axes that Meta has published"),
    Sane("gpt2-xl", A100, 1, 256, 1024, {"zero_stage": 1}, "1.5B: replicas"),
    Sane("gpt2", A100, 1, 512, 1024, {"tp": 1, "pp": 1}, "124M: any split would only add traffic"),
    Sane("gemma-2-9b", "H200-SXM", 1, 128, 4096, {"zero_stage": 2}, "141 GB: room for the logits of 256,000 rows"),
    Sane(
        "gemma-3-27b-text", H100, 4, 128, 8192, {"zero_stage": 3}, "27B over 32 devices; windows make attention cheap"
    ),
)
OTHERS = (
    Sane("mixtral-8x7b", H100, 4, 256, 4096, {"ep": 8}, "47B of states: experts over a node, states over 32 devices"),
    Sane("mixtral-8x7b", A100, 8, 512, 4096, {"ep": 8}, "an expert per device of a node; tokens go over NVLink"),
    Sane("mixtral-8x22b", H100, 16, 512, 4096, {"zero_stage": 3}, "141B: 2.2 TB of states over 128 devices"),
    Sane("llama-3.1-8b", "L40S", 1, 64, 2048, {"zero_stage": 2}, "PCIe: micro-batches of 8, reduced once"),
    Sane("llama-3.2-1b", "RTX-4090", 1, 64, 2048, {"zero_stage": 1}, "PCIe: gradients once per step", per_node=4),
    Sane("llama-3.2-3b", "RTX-3090", 1, 64, 1024, {"pp": 4, "tp": 1}, "24 GB, PCIe: two stages take 21.0 of them"),
    Sane("llama-3.2-1b", "RTX-5090", 1, 32, 2048, {"tp": 1}, "one card of 32 GB holds 1B with its states", per_node=1),
    Sane("gpt2-xl", "V100-SXM2-32GB", 1, 64, 1024, {"zero_stage": 2}, "old devices: replicas", work=OLD),
    Sane("llama-2-7b", "V100-SXM2-32GB", 2, 64, 2048, {"zero_stage": 3}, "7B over 16 × 32 GB", work=OLD),
    Sane("llama-3.1-8b", "MI300X", 1, 128, 4096, {"zero_stage": 1}, "192 GB: states shard, nothing else needs to"),
    Sane("llama-3.1-70b", "H200-SXM", 2, 256, 4096, {"zero_stage": 3, "tp": 1}, "16 × 141 GB hold 70B with its states"),
    Sane("llama-3.1-8b", H100, 1, 64, 4096, {"zero_stage": 0}, "adapters: replicas of frozen weights", work=LORA),
    Sane("llama-3.1-70b", H100, 1, 64, 2048, {"tp": 2, "pp": 4}, "140 GB of frozen weights: cut once", work=LORA),
    Sane("llama-3.1-70b", H100, 1, 8, 2048, {"tp": 1}, "one device: 4 bits are 40 GB", per_node=1, work=QLORA),
    Sane("llama-3.1-8b", A100, 1, 8, 32768, {"sp": 8}, "32,768 tokens: split over the node, nothing is recomputed"),
    Sane("llama-3.1-8b", H100, 1, 8, 131072, {"sp": 8}, "131,072 tokens: the sequence is split over the node"),
    Sane("llama-3.1-8b", A100, 4, 128, 4096, {"pp": 4}, "1 Gbit/s: few bytes", machines=SLOW),
    Sane(
        "llama-3.2-1b",
        A100,
        2,
        128,
        2048,
        {"pp": 2, "strategy": "pipeline"},
        "two sites: stages meet once",
        machines=SITES,
    ),
    Sane("gpt-oss-20b", H100, 2, 256, 4096, {"ep": 8, "zero_stage": 1}, "21B of experts over a node"),
)
SANE = (*DENSE, *OTHERS)


def plan(case: Sane, axes: dict[str, Any]) -> Decision:
    work, wanted = case.job(), dict(axes)
    name = wanted.pop("strategy", "auto")
    return decide(
        dataclasses.replace(work, fixed=wanted),
        strategies.propose(work if not wanted else dataclasses.replace(work, fixed=wanted), name),
    )


def test_there_are_37() -> None:
    assert len(SANE) == 37


@pytest.mark.parametrize("case", SANE, ids=lambda case: f"{case.model}-{case.nodes}x{case.per_node}-{case.device}")
def test_the_plan_is_an_experts_or_as_fast(case: Sane) -> None:
    chosen, theirs = plan(case, {}).chosen, plan(case, case.axes).chosen
    assert theirs is not None, case.why
    assert theirs.estimate.fits, case.why
    assert chosen is not None
    assert fits(memory(chosen.plan, case.job()), case.job())
    assert 0 < chosen.estimate.mfu < 0.75
    ours, best = chosen.estimate.time.total, theirs.estimate.time.total
    assert best <= 1.05 * ours, (
        f"{case.why}: {chosen.plan.describe()} {ours:.2f} s, {theirs.plan.describe()} {best:.2f} s"
    )
