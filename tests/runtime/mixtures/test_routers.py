"""Routers are found, and their number of experts is that of their logits."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.runtime.mixtures.routers import RouterTable, find_routers
from toolkit.runtime.models.tiny_models import tiny_of_type


@pytest.mark.parametrize(("kind", "without_weights"), [("mixtral", 0), ("zaya", 1), ("longcat_flash", 256)])
def test_experts_without_weights_are_counted(kind: str, without_weights: int) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_of_type(kind)))
    seen: list[torch.Tensor] = []
    for router in find_routers(model):
        router.module.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
    model(input_ids=torch.arange(3, 19)[None], use_cache=False)
    assert {logits.shape[-1] for logits in seen} == {4 + without_weights}
    assert RouterTable.of(model).num_experts == 4 + without_weights
