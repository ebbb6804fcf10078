"""BLOOM's bias as columns of queries and keys: the results of transformers' own attention, with no score per pair."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.parallel import model
from toolkit.cost import activations
from toolkit.runtime.models.attention import NAMES, forward
from toolkit.runtime.models.build import build_model
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.models.registry_attention import BIAS_COLUMNS, RegistryBloomAttention, with_bias


def scores(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    return query.float() @ key.float().transpose(-1, -2) * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_add_the_bias_to_every_score(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 9, 16).to(dtype)
    bias = (torch.rand(2, 4, 9) * 1000).to(dtype)
    wide = with_bias(query, key, value, bias, 0.3)
    assert [tensor.shape[-1] for tensor in wide] == [16 + BIAS_COLUMNS] * 3
    assert torch.equal(wide[2][..., :16], value)
    added = scores(wide[0], wide[1], 0.3) - scores(query, key, 0.3)
    assert (added - bias.float()[:, :, None]).abs().max() < 0.02, "a column in bf16 alone would be off by up to 2"


def test_the_planner_knows_the_columns() -> None:
    assert activations.BIAS_COLUMNS["bloom"] == BIAS_COLUMNS


def test_every_layer_uses_the_registry() -> None:
    net = build_model(model("bloom"), seed=0)
    assert net.config._attn_implementation in NAMES.values()
    found = [type(module) for module in net.modules() if type(module).__name__.endswith("BloomAttention")]
    assert set(found) == {RegistryBloomAttention}


def test_packed_documents_do_not_see_each_other() -> None:
    net = build_model(model("bloom"), seed=0).eval()
    ids = torch.arange(3, 15)[None]
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    packed = forward(net, MicroBatch(ids, ids, position_ids=positions).located()).logits
    alone = torch.cat([net(input_ids=part, use_cache=False).logits for part in ids.split([5, 7], 1)], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_generation_with_a_cache_gives_the_tokens_of_transformers_attention() -> None:
    ids = torch.arange(5, 15)[None]
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    found = []
    for asked in ("auto", "eager"):
        net = build_model(replace(model("bloom"), attention=asked), seed=0).eval()  # type: ignore[arg-type]
        found.append(net.generate(ids, attention_mask=torch.ones_like(ids), **how).tolist())
    assert found[0] == found[1]
