"""How the chaos benchmark splits the time of islands."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.harness.island_time import Life, counting, split


def steps(first: int, begin: float, count: int, seconds: float = 1.0) -> list[dict[str, Any]]:
    """Steps of a second each, one after the other."""
    return [{"step": first + n, "time": begin + n + 1, "step_seconds": seconds} for n in range(count)]


def test_every_second_of_an_island_is_counted_once() -> None:
    # Starts at 0, trains from 10 to 13, is stopped in a step from 14 to 20, trains to 23, is cut off at 22 until 30
    # while its round lasts until 24, trains its last step at 31, and ends at 33. Two steps are done by another later.
    records = [*steps(1, 10, 4), {"step": 5, "time": 21.0, "step_seconds": 7.0}, *steps(6, 21, 3), *steps(9, 31, 1)]
    life = Life((0.0, 33.0), records, stopped=[(14.0, 20.0)], cut=[(22.0, 30.0)])
    other = Life((0.0, 60.0), steps(1, 50, 2))
    found = split(life, counting([life, other]), round_steps=100)
    assert found == pytest.approx(
        {"starting": 10, "training": 7, "repeated": 2, "disturbed": 6 + 6, "ending": 1, "between steps": 1}
    )
    assert found.total() == pytest.approx(33)


def test_the_last_step_of_a_round_counts_like_the_others() -> None:
    """It contains the exchange, which a cut-off island waits for."""
    records = [*steps(1, 0, 3), {"step": 4, "time": 18.0, "step_seconds": 15.0}]
    life = Life((0.0, 18.0), records)
    found = split(life, counting([life]), round_steps=4)
    assert found == pytest.approx({"training": 4, "between steps": 14, "starting": 0, "ending": 0, "disturbed": 0})


def test_an_island_without_a_step_has_only_started() -> None:
    assert split(Life((5.0, 9.0), []), {}, 100) == {"starting": 4.0}
