"""Figures of routers, by hand."""

from __future__ import annotations

import math

import pytest

from toolkit.run_dir.router_load import advice, loads_of, max_over_mean, recovered, shares, summarise

EVEN = [2.0, 0.3, 3.0, 10.0, 5, 5, 5, 5, 5, 5, 5, 5]
"""Two layers of four experts: layers, added loss, balancing loss, dropped visits, loads."""
COLLAPSED = [2.0, 0.0, 0.0, 0.0, 40, 0, 0, 0, 5, 5, 5, 5]


def test_an_even_load_has_entropy_one_and_needs_no_advice() -> None:
    found = summarise(EVEN)
    assert found == {
        "loss": 0.3, "balance": 3.0, "entropy": 1.0, "max_over_mean": 1.0, "dead_experts": 0.0, "experts": 8.0,
        "layers": 2.0, "dropped": 0.25,
    }  # fmt: skip
    assert advice(found) == ""
    assert recovered(found)


def test_a_single_expert_is_a_collapse() -> None:
    found = summarise(COLLAPSED)
    assert found is not None
    assert found["max_over_mean"] == 4.0
    assert found["dead_experts"] == 3
    assert found["entropy"] == pytest.approx(0.5)
    assert "4.0 times the mean load, and 3 of 8 experts" in advice(found)
    assert not recovered(found)


def test_few_experts_collapse_below_the_limit_of_many() -> None:
    """Of eight experts that each token visits two of, none can have more than four times the mean."""
    busy = {"max_over_mean": 3.95, "dead_experts": 1.0, "experts": 32.0}
    assert "routing has collapsed" in advice({**busy, "layers": 4.0})
    assert advice({**busy, "experts": 256.0, "layers": 4.0}) == ""
    assert recovered({**busy, "max_over_mean": 1.9, "layers": 4.0})
    assert advice(busy) == "", "records of earlier versions have no layers"


def test_layers_without_counts_and_dense_models() -> None:
    assert loads_of([2.0, 0.0, 0.0, 0.0, 0, 0, 3, 1]) == [[3, 1]]
    assert summarise([]) is None
    assert advice(None) == ""
    assert shares([[3.0, 1.0]]) == [[1.5, 0.5]]
    assert max_over_mean([3.0, 1.0]) == 1.5
    assert not math.isnan(summarise([1.0, 0.0, 0.0, 0.0, 7])["entropy"])  # type: ignore[index]
