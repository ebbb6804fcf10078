"""Coverage: a sample that rotates with the day, one type a family, under every strategy."""

from __future__ import annotations

import datetime

import pytest

from toolkit.runtime.proofs.coverage import causal_types
from toolkit.sessions.parity import cover

pytestmark = pytest.mark.slow

FAMILIES = {
    "dense": ["qwen2", "gemma", "olmo2", "phi3", "stablelm", "cohere", "granite"],
    "fused": ["gpt_neox", "gpt_bigcode", "codegen", "gptj", "biogpt", "opt"],
    "mixture": ["qwen2_moe", "olmoe", "granitemoe", "deepseek_v2", "phimoe"],
    "hybrid": ["falcon_h1", "qwen3_next", "recurrent_gemma", "mamba", "jetmoe"],
    "encoder": ["roberta", "bert", "electra", "xlm-roberta"],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_type_of_each_family_agrees_or_is_refused(family: str) -> None:
    known = [kind for kind in FAMILIES[family] if kind in causal_types()]
    kind = known[datetime.date.today().toordinal() % len(known)]
    results = cover(kind, seed=datetime.date.today().toordinal()).results
    assert all(result.status in ("ok", "refused") for result in results.values()), (kind, results)
    assert results["zero-3"].status == "ok"
