"""The noise scale of a real run: the same whatever the ranks and the ZeRO stage, and the run itself untouched."""

from __future__ import annotations

import pytest

from tests.conftest import Trainer
from toolkit.sessions.scaling import measured_critical_batch

BASE = ("train.steps=6", "strategy.micro_batch=2", "train.grad_clip=0.5")


@pytest.mark.slow
def test_every_layout_measures_the_same(train: Trainer) -> None:
    plain = train(*BASE, "strategy.name=data_parallel", nproc=1)
    alone = train(*BASE, "strategy.name=data_parallel", "metrics.noise_scale=true", nproc=1)
    assert alone.losses == plain.losses
    expected = [record["noise_scale_sequences"] for record in alone.records]
    assert all(value is None or value > 0 for value in expected)
    assert any(expected)
    for stage in (0, 1, 2, 3):
        name = "zero" if stage else "data_parallel"
        axes = (f"strategy.name={name}", f"strategy.zero_stage={stage}", "metrics.noise_scale=true")
        found = [record["noise_scale_sequences"] for record in train(*BASE, *axes, nproc=2).records]
        assert found == pytest.approx(expected, rel=1e-3)
    assert "gradient noise scale:" in alone.summary["batch_advice"]
    assert measured_critical_batch(alone.run.path) == max(1, round(alone.summary["noise_scale_sequences"]))
