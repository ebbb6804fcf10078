"""Where peft's adapters go by default: on every linear layer that can have one, and the user hears of the others."""

from __future__ import annotations

import pytest

from tests.helpers.parallel import model
from toolkit.recipe.model_section import Lora
from toolkit.runtime.models.adapters import with_adapters
from toolkit.runtime.models.build import skeleton


def adapted_modules(kind: str) -> set[str]:
    """Last names of the modules that got adapters."""
    found = with_adapters(skeleton(model(kind)), Lora(rank=4), None)
    return {name.split(".lora_A")[0].rpartition(".")[2] for name, _ in found.named_parameters() if ".lora_A" in name}


@pytest.mark.parametrize(
    ("kind", "left_out", "kept"),
    [
        ("mamba", "out_proj", "in_proj"),  # refused by peft
        ("phimoe", "router", "q_proj"),  # returns logits, weights and experts
        ("llama4_text", "router", "q_proj"),
    ],
)
def test_layers_that_can_not_have_adapters_are_left_out(
    kind: str, left_out: str, kept: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = adapted_modules(kind)
    assert left_out not in found
    assert kept in found
    assert f"no adapters on {left_out}: " in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["llama", "falcon"])  # Falcon's linear layers are a class of its own
def test_all_linear_layers_of_other_types_have_adapters(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = {"llama": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}}
    falcon = {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}
    assert adapted_modules(kind) == expected.get(kind, falcon)
    assert "no adapters" not in capsys.readouterr().out
