"""Lion, LAMB and LARS: the rules against numbers by hand, every ZeRO stage against one process, and checkpoints."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conftest import Trainer
from tests.helpers.parallel import ADAM, ONE, assert_same, model, run
from toolkit.checkpoints import store
from toolkit.plans.plan import Plan
from toolkit.recipe.sections import Train
from toolkit.run_dir.trajectory import Trajectory
from toolkit.runtime.optimizers.update_rules import Layers, Span, adopt, lamb, lars, lion
from toolkit.sessions.parity import largest_difference

RATES = {"lamb": 1e-2, "lars": 10.0, "lion": 1e-3}
SETTINGS = Train(steps=1, betas=(0.9, 0.99), weight_decay=0.1)


def settings(optimizer: str) -> Train:
    return replace(ADAM, optimizer=optimizer, lr=RATES[optimizer], weight_decay=0.1)  # type: ignore[arg-type]


@functools.cache
def alone(optimizer: str) -> Trajectory:
    """One process."""
    return run(model("llama"), ONE, settings(optimizer))


def test_lion_moves_by_the_sign_of_its_moment() -> None:
    weight, grad = torch.tensor([1.0, -2.0]), torch.tensor([3.0, -4.0])
    state: dict[str, torch.Tensor] = {}
    assert lion(weight, grad, state, SETTINGS, Layers()).tolist() == pytest.approx([1 + 0.1, -1 - 0.2])
    assert state["exp_avg"].tolist() == pytest.approx([0.03, -0.04])


def test_adopt_divides_by_the_second_moment_of_the_steps_before() -> None:
    weight, state = torch.tensor([1.0, -2.0]), dict[str, torch.Tensor]()
    assert adopt(weight, torch.tensor([3.0, -4.0]), state, SETTINGS, Layers()).tolist() == [0.0, 0.0]
    assert state["exp_avg_sq"].tolist() == [9.0, 16.0]
    change = adopt(weight, torch.tensor([1.5, 8.0]), state, SETTINGS, Layers())  # 8 / 4 is limited to 1
    assert change.tolist() == pytest.approx([0.1 * 0.5 + 0.1, 0.1 * 1.0 - 0.2])
    assert state["exp_avg_sq"].tolist() == pytest.approx([9 * 0.99 + 0.0225, 16 * 0.99 + 0.64])


def test_adopt_is_the_recursion_of_its_paper() -> None:
    """Algorithm 2 with clipping, in plain numbers over eight steps; the update is applied with a rate of 0.1."""
    weight, state = torch.tensor([1.5], dtype=torch.float64), dict[str, torch.Tensor]()
    theta, mean, square = 1.5, 0.0, 0.0
    for step, grad in enumerate((0.5, -2.0, 3.0, 0.1, -0.1, 40.0, 1e-9, 2.0)):
        weight -= 0.1 * adopt(weight, torch.tensor([grad], dtype=torch.float64), state, SETTINGS, Layers())
        if step == 0:
            square = grad**2
        else:
            ratio = grad / max(math.sqrt(square), SETTINGS.eps)
            mean = 0.9 * mean + 0.1 * max(-(step**0.25), min(ratio, step**0.25))
            theta = theta * (1 - 0.1 * 0.1) - 0.1 * mean
            square = 0.99 * square + 0.01 * grad**2
        assert float(weight) == pytest.approx(theta, rel=1e-6)


def test_lamb_s_update_is_as_long_as_the_layer() -> None:
    weight, grad = torch.tensor([3.0, 4.0]), torch.tensor([1.0, -1.0])
    change = lamb(weight, grad, {}, SETTINGS, Layers())
    assert float(change.norm()) == pytest.approx(5.0)
    direction = torch.tensor([1 + 0.3, -1 + 0.4])  # Adam's first update is the sign; the decay comes on top
    assert (change / change.norm()).tolist() == pytest.approx((direction / direction.norm()).tolist(), rel=1e-5)


def test_lars_moves_a_layer_by_a_share_of_its_norm() -> None:
    weight, grad = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])
    change = lars(weight, grad, {}, SETTINGS, Layers())
    share = 0.001 * 5 / (2 + 0.1 * 5)
    assert change.tolist() == pytest.approx([share * 0.3, share * 2.4])


def test_layers_in_one_flat_tensor_keep_their_own_norms() -> None:
    flat, grad = torch.tensor([3.0, 4.0, 6.0, 8.0, 0.0]), torch.tensor([1.0, -1.0, 2.0, 5.0, 0.0])
    layers = Layers({flat: [Span(0, 0, 2), Span(1, 2, 4)]}, 2)
    found = lamb(flat, grad, {}, SETTINGS, layers)
    parts = [lamb(flat[a:b], grad[a:b], {}, SETTINGS, Layers()) for a, b in ((0, 2), (2, 4))]
    assert found.tolist() == pytest.approx([*torch.cat(parts).tolist(), 0.0])


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "stages"), [("lamb", (0, 1, 3)), ("lars", (2,)), ("lion", (2,))])
def test_every_stage_gives_the_result_of_one_process(optimizer: str, stages: tuple[int, ...]) -> None:
    train, section = settings(optimizer), model("llama")
    expected = alone(optimizer)
    for stage in stages:
        plan = Plan(strategy="zero", dp=2, micro_batch=1, grad_accum=2, zero_stage=stage, precision="fp32")
        assert_same(expected, run(section, replace(plan, zero_group=2 if stage else 1), train))


@pytest.mark.parametrize("stage", [0, 1])
def test_16_bit_wrappers_stay_near_fp32(stage: int) -> None:
    """Each has a way of its own to hold masters, and one takes a step before the first."""
    plan = Plan(strategy="zero", dp=2, micro_batch=2, zero_stage=stage, zero_group=2 if stage else 1, precision="bf16")
    rough = run(replace(model("llama"), precision="bf16"), plan, settings("lamb"))
    assert largest_difference(alone("lamb").loss, rough.loss) < 1e-2


@pytest.mark.slow
def test_states_are_saved_and_go_on_under_another_world(train: Trainer, tmp_path: Path) -> None:
    base = ("train.steps=6", "checkpoint.every=3", "train.optimizer=lamb", f"train.lr={RATES['lamb']}")
    whole = train(*base, "strategy.name=data_parallel", nproc=1)
    assert whole.losses[-1] < whole.losses[0]
    part = train(*base, "strategy.name=zero", "strategy.zero_stage=2", into=tmp_path / "part")
    saved = store.path_of(part.run.checkpoints, 3)
    rest = train(*base, "strategy.name=data_parallel", f"checkpoint.resume={saved}", nproc=1)
    assert largest_difference(whole.losses[3:], rest.losses) < 1e-5
