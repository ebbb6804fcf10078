"""A link that becomes slow in the middle of a run: gradient synchronisation takes the time, and is named."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from benchmarks.harness import slow_link
from tests.conftest import Trainer

pytestmark = pytest.mark.slow

WIDER = ("model.config.hidden_size=128", "model.config.intermediate_size=256")


def test_a_slow_link_shows_as_gradient_sync(train: Trainer) -> None:
    reason = slow_link.why_not()
    if reason:
        pytest.skip(reason)
    with slow_link.Link() as link:
        enter = slow_link.Enter([link.space(0), link.space(1)])
        done = train("strategy.name=zero", "strategy.zero_stage=2", "train.steps=24", *WIDER, enter=enter)
    fast = done.records[2 : slow_link.SLOW_FROM_STEP - 1]
    slow = done.records[slow_link.SLOW_FROM_STEP :]
    assert sync_seconds(slow) > 3 * sync_seconds(fast)
    assert share(slow) > share(fast)
    assert share(slow) > 0.5
    explanation = done.summary["explanation"]
    assert "gradient sync" in explanation
    assert "link of rank" in explanation
    assert "of the bandwidth in the cluster file" in explanation


def share(records: list[dict[str, Any]]) -> float:
    return statistics.median(record["parts"]["grad_sync"] / record["wall_seconds"] for record in records)


def sync_seconds(records: list[dict[str, Any]]) -> float:
    return statistics.median(record["parts"]["grad_sync"] for record in records)
