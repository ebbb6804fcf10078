"""First weights: the same whoever reads them and whatever else was read, and those that transformers would draw."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from toolkit.recipe.model_section import Model
from toolkit.runtime.models.build import build_model, open_weights, skeleton
from toolkit.runtime.proofs.coverage import tiny_model


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "ernie4_5_moe", "openai-gpt"])
def test_a_part_read_alone_is_the_part_of_the_whole(kind: str) -> None:
    section = tiny_model(kind)
    whole = dict(build_model(section, 3).named_parameters())
    assert all(torch.isfinite(parameter).all() for parameter in whole.values())
    some = list(whole)[-5::2]
    for name, tensor in open_weights(section, 3).read(some):
        torch.testing.assert_close(tensor, whole[name].detach(), rtol=0, atol=0)


def test_another_seed_and_another_layer_give_other_weights() -> None:
    section = tiny_model("llama")
    first, second = (dict(build_model(section, seed).named_parameters()) for seed in (0, 1))
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first[name], second[name])
    assert not torch.equal(first[name], first["model.layers.1.mlp.up_proj.weight"])


def test_weights_are_spread_as_transformers_spreads_them() -> None:
    from transformers import AutoModelForCausalLM

    from toolkit.runtime.models.build import load_config

    section = tiny_model("gpt2")
    ours = dict(build_model(section, 0).named_parameters())
    theirs = dict(AutoModelForCausalLM.from_config(load_config(section)).named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name].std(), parameter.std(), rtol=0.15, atol=1e-6)


def test_a_skeleton_has_no_weights_and_its_ties() -> None:
    model = skeleton(tiny_model("gpt2"))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_a_checkpoint_is_read_tensor_by_tensor(tmp_path: Path) -> None:
    model = build_model(tiny_model("llama"), 5)
    model.save_pretrained(tmp_path)
    section = Model(path=str(tmp_path), init="pretrained", precision="fp32")
    name = "model.layers.2.self_attn.q_proj.weight"
    ((found, tensor),) = open_weights(section, 0).read([name])
    assert found == name
    torch.testing.assert_close(tensor, dict(model.named_parameters())[name].detach())
