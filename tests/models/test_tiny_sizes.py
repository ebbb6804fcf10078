"""Sizes of tiny models: the usual ones, and those that a coverage scan draws."""

from __future__ import annotations

import random

import pytest

from toolkit.models.tiny_sizes import Sizes, drawn_sizes, tiny_sizes


@pytest.mark.parametrize("odd_width", [False, True])
def test_drawn_sizes_can_be_divided_by_two_ranks(odd_width: bool) -> None:
    """Otherwise the planner would refuse them, and the scan would say nothing about the type."""
    drawn = {drawn_sizes(random.Random(seed), odd_width=odd_width) for seed in range(200)}
    assert len(drawn) > 100
    for sizes in drawn:
        keys = tiny_sizes(sizes)
        assert sizes.heads % 2 == keys["intermediate_size"] % 2 == keys["num_hidden_layers"] % 2 == 0
        assert keys["num_key_value_heads"] == 1 or keys["num_key_value_heads"] % 2 == 0
        assert sizes.heads % keys["num_key_value_heads"] == 0
    assert {sizes.layers for sizes in drawn} == {4, 6}
    assert any(tiny_sizes(sizes)["vocab_size"] % 2 for sizes in drawn)
    assert any(tiny_sizes(sizes)["hidden_size"] != sizes.heads * sizes.head_dim for sizes in drawn) is odd_width


def test_the_usual_sizes_have_grouped_heads() -> None:
    keys = tiny_sizes(Sizes(heads=8))
    assert (keys["hidden_size"], keys["num_key_value_heads"], keys["intermediate_size"]) == (128, 4, 256)
