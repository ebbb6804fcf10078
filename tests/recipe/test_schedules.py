"""Learning rates against numbers worked by hand."""

from __future__ import annotations

import math

import pytest

from toolkit.recipe.schedules import make_schedule, scaled_lr
from toolkit.recipe.sections import Train


def test_warmup_then_cosine() -> None:
    schedule = make_schedule(Train(steps=110, warmup=10.0, min_lr_ratio=0.1), 110)
    assert [schedule.factor(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert schedule.factor(10) == pytest.approx(1.0)
    assert schedule.factor(60) == pytest.approx(0.1 + 0.9 * 0.5)
    assert schedule.factor(110) == pytest.approx(0.1)
    assert schedule.factor(35) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))


def test_fraction_linear_and_constant() -> None:
    linear = make_schedule(Train(steps=100, warmup=0.1, schedule="linear", min_lr_ratio=0.0), 100)
    assert linear.warmup_steps == 10
    assert linear.factor(55) == pytest.approx(0.5)
    constant = make_schedule(Train(steps=100, warmup=0.0, schedule="constant"), 100)
    assert {constant.factor(step) for step in range(100)} == {1.0}


@pytest.mark.parametrize(("scaling", "expected"), [("none", 1e-3), ("linear", 4e-3), ("sqrt", 2e-3)])
def test_batch_scaling(scaling: str, expected: float) -> None:
    train = Train(steps=1, lr=1e-3, global_batch=64, base_batch=16, lr_scaling=scaling)  # type: ignore[arg-type]
    assert scaled_lr(train) == pytest.approx(expected)


def test_stable_then_falling() -> None:
    schedule = make_schedule(Train(steps=100, warmup=10.0, schedule="wsd", min_lr_ratio=0.0, decay_fraction=0.5), 100)
    assert [schedule.factor(step) for step in (4, 10, 49)] == pytest.approx([0.5, 1.0, 1.0])
    assert [schedule.factor(step) for step in (50, 75, 100)] == pytest.approx([1.0, 0.5, 0.0])


def test_restarts() -> None:
    schedule = make_schedule(Train(steps=100, warmup=0.0, schedule="cosine_restarts", min_lr_ratio=0.2, cycles=2), 100)
    assert [schedule.factor(step) for step in (0, 25, 50, 75, 100)] == pytest.approx([1.0, 0.6, 1.0, 0.6, 0.2])
    assert schedule.factor(49) < 0.21, "the end of the first cosine"


def test_inverse_square_root() -> None:
    schedule = make_schedule(Train(steps=1000, warmup=10.0, schedule="inverse_sqrt"), 1000)
    assert [schedule.factor(step) for step in (4, 9, 39, 999)] == pytest.approx([0.5, 1.0, 0.5, 0.1])
