"""Predicted against measured in words."""

from __future__ import annotations

import pytest

from toolkit.run_dir.predicted_vs_measured import Circumstances, compare, explain

TIME = {"compute": 0.08, "recompute": 0.02, "dp_comm": 0.02, "optimizer": 0.005, "fixed": 0.003, "total": 0.128}
PARTS = {"forward": 0.04, "backward": 0.06, "grad_sync": 0.02, "optimizer": 0.005, "data": 0.001, "other": 0.002}


def sentence(parts: dict[str, float], **why: float) -> str:
    return explain(compare(TIME, {**PARTS, **parts}), Circumstances(**why))  # type: ignore[arg-type]


def test_parts_are_compared_with_those_that_predict_them() -> None:
    rows = {row.name: row for row in compare(TIME, PARTS)}
    assert rows.keys() == {"compute", "dp_comm", "optimizer", "fixed"}
    assert (rows["compute"].predicted, rows["compute"].measured) == pytest.approx((0.1, 0.1))
    assert rows["dp_comm"].ratio == pytest.approx(1.0)
    assert compare(TIME, {}) == []


@pytest.mark.parametrize(
    ("parts", "why", "said"),
    [
        ({}, {}, "every part is within 5%"),
        (
            {"grad_sync": 0.042},
            {"slow_rank": 3, "link_share": 0.4},
            "gradient sync and ZeRO traffic took 2.1 × the prediction (42.0 ms per step, predicted 20.0 ms): "
            "the link of rank 3 reaches 40% of the bandwidth in the cluster file",
        ),
        (
            {"grad_sync": 0.07},
            {"straggler": 2, "straggler_seconds": 0.05, "link_share": 0.4},
            "rank 2 is a straggler: it works 50.0 ms longer per step, and the others wait for it",
        ),
        (
            {"agree": 0.05},
            {"straggler": 2, "straggler_seconds": 0.05},
            "rank 2 is a straggler: it works 50.0 ms longer",
        ),
        ({"agree": 0.05}, {}, "work on the host: data, Python"),
        ({"backward": 0.2}, {"straggler": 2}, "`toolkit probe` measures them"),
        ({"tp_comm": 0.05}, {}, "tensor-parallel traffic took 50.0 ms per step, which was not predicted"),
    ],
)
def test_the_largest_deviation_is_explained(parts: dict[str, float], why: dict[str, float], said: str) -> None:
    assert said in sentence(parts, **why)
