"""Coverage: one type a family, under strategies that together are all of them. `toolkit coverage` has all types."""

from __future__ import annotations

import pytest

from toolkit.runtime.proofs.coverage import CASES
from toolkit.sessions.parity import cover

pytestmark = pytest.mark.slow

FAMILIES = {
    "olmo2": ("zero-3", "sequence_sharded", "interleaved", "lora-hybrid"),
    "gpt_neox": ("zero-3", "tensor_parallel", "ring", "lora-pipeline"),
    "qwen2_moe": ("zero-3", "hybrid", "lora-tensor"),
    "falcon_h1": ("zero-3", "tensor_parallel", "pipeline"),
    "roberta": ("zero-3", "pipeline", "lora-tensor"),
}
"""Dense, with fused projections, mixture, with recurrent layers, encoder: its cases."""


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_type_of_each_family_agrees_or_is_refused(kind: str) -> None:
    results = cover(kind, {name: CASES[name] for name in FAMILIES[kind]}).results
    assert all(result.status in ("ok", "refused") for result in results.values()), results
    assert results["zero-3"].status == "ok"


def test_every_strategy_is_sampled() -> None:
    assert {name for names in FAMILIES.values() for name in names} == set(CASES)
