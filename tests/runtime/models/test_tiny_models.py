"""Tiny models of types whose code insists on sizes of its own."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.models.tiny_sizes import OF_TYPE
from toolkit.runtime.models.tiny_models import tiny_of_type


@pytest.mark.parametrize("kind", [*OF_TYPE, "jamba"])
def test_a_tiny_model_has_gradients(kind: str) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_of_type(kind)))
    ids = torch.arange(32).view(2, 16) + 3
    model(input_ids=ids, labels=ids).loss.backward()
    assert any(bool(parameter.grad.any()) for parameter in model.parameters() if parameter.grad is not None)


def test_tiny_models_have_every_kind_of_layer() -> None:
    assert set(AutoConfig.for_model(**tiny_of_type("jamba")).layers_block_type) == {"mamba", "attention"}
    assert set(tiny_of_type("lfm2_moe")["layer_types"]) == {"conv", "full_attention"}
