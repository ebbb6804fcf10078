"""The gradient noise scale, on gradients whose scale is known."""

from __future__ import annotations

import numpy as np
import pytest

from toolkit.plans.noise_scale import NoiseScale, advice, tells_noise
from toolkit.plans.plan import Plan


@pytest.mark.parametrize("known", [4.0, 64.0, 1000.0])
def test_a_known_scale_is_found_within_20_percent_after_200_steps(known: float) -> None:
    """Gaussian gradients of 500 elements around a fixed one: noise of `known` times its square norm a sequence."""
    random = np.random.default_rng(0)
    truth = random.normal(size=500)
    deviation = np.sqrt(known * (truth @ truth) / len(truth))
    small, large = 8, 64
    scale = NoiseScale()
    for _ in range(200):
        parts = truth + deviation / np.sqrt(small) * random.normal(size=(large // small, len(truth)))
        whole = parts.mean(0)
        scale.add(float((parts**2).sum(1).mean()), small, float(whole @ whole), large)
    assert scale.sequences == pytest.approx(known, rel=0.2)


def test_nothing_is_told_before_there_is_anything() -> None:
    assert NoiseScale().sequences is None


def test_advice_says_what_to_do() -> None:
    assert "past 512 sequences more devices buy little" in advice(512, 4096)
    assert "saves steps almost in proportion" in advice(4096, 512)
    assert "in balance" in advice(512, 512)


def test_it_takes_two_batch_sizes_of_whole_models() -> None:
    assert tells_noise(Plan(strategy="zero", dp=2, zero_stage=1, micro_batch=4))
    assert not tells_noise(Plan(strategy="data_parallel", micro_batch=4))
    assert tells_noise(Plan(strategy="tensor_parallel", dp=2, tp=2, micro_batch=4))
    assert not tells_noise(Plan(strategy="pipeline", dp=2, pp=2, micro_batch=4))
