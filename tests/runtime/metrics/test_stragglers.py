"""Stragglers: named when a rank is late, not when chance or another process was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from toolkit.runtime.metrics.step_breakdown import _spread, _usual
from toolkit.runtime.metrics.stragglers import VALUES, Gathered, Late, StragglerWatch

STEPS, STEP_SECONDS = 10, 0.02
NOISE = {
    "even": lambda random, shape: 1 + 0.03 * random.standard_normal(shape),
    "busy": lambda random, shape: np.exp(0.3 * random.standard_normal(shape)),
    "overloaded": lambda random, shape: np.exp(random.standard_normal(shape)),
    "hiccups": lambda random, shape: 1 + (random.random(shape) < 0.4) * random.exponential(2.5, shape),
}


def windows(kind: str, ranks: int, count: int, late_seconds: float = 0.0, seed: int = 0) -> Iterator[Gathered]:
    """What ranks gather from steps with a noise; the last rank works longer in each."""
    random: Any = np.random.default_rng(seed)
    for _ in range(count):
        busy = STEP_SECONDS * NOISE[kind](random, (ranks, STEPS))
        busy[-1] += late_seconds
        wall = sorted(busy.max(0).tolist())
        rows = []
        for own in np.sort(busy).tolist():
            values = {"busy_seconds": _usual(own), "busy_spread_seconds": _spread(own), "wall_seconds": _usual(wall)}
            rows.append([values.get(name, float("nan")) for name in VALUES])
        yield Gathered(rows)


def named(found: Iterator[Gathered]) -> list[int | None]:
    watch = StragglerWatch()
    stragglers = [watch.look(gathered.latest(len(gathered.table))) for gathered in found]
    return [straggler.rank if straggler else None for straggler in stragglers]


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("kind", NOISE)
def test_noise_names_nobody(kind: str, ranks: int) -> None:
    found = named(windows(kind, ranks, 600))
    assert sum(rank is not None for rank in found) <= 3, "one in two hundred"


@pytest.mark.parametrize("kind", ["even", "busy", "hiccups"])
def test_50_ms_are_seen_in_two_windows_and_a_tenth_of_a_step_in_five(kind: str) -> None:
    late = [named(windows(kind, 2, 2, 0.05, seed)) for seed in range(20)]
    assert sum(found == [None, 1] for found in late) >= 19
    little = named(windows("even", 4, 6, 0.15 * STEP_SECONDS))
    assert little == [None] * 4 + [3, 3]


def test_windows_must_agree_on_the_rank() -> None:
    watch = StragglerWatch()
    found = [watch.look(late) for late in (Late(1, 1.0, 0.5), Late(0, 1.0, 0.5), None, Late(0, 1.0, 0.5))]
    assert found == [None] * 4
    straggler = watch.look(Late(0, 1.0, 0.5))
    assert straggler is not None
    assert straggler.rank == 0
