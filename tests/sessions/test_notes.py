"""What `toolkit plan` says beside the numbers."""

from __future__ import annotations

import pytest

from toolkit.recipe.file import load_recipe
from toolkit.resources import RECIPES
from toolkit.sessions.resolve import plan_notes, resolve


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("embed_bert-base_data_parallel", ["dropout is off", "first pass without gradients"]),
        ("kto_qwen3-8b_zero", ["first pass without gradients"]),
    ],
)
def test_objectives_say_what_they_change(recipe: str, words: list[str]) -> None:
    notes = " ".join(plan_notes(resolve(load_recipe(RECIPES / f"{recipe}.yaml"))))
    assert all(word in notes for word in words)
