"""The average of the weights: its values by hand, the same under every strategy, evaluated, resumed and exported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import Finished, Trainer
from tests.helpers.parallel import ADAM, ONE, batch, engine_of, micro_batches, model
from toolkit.checkpoints import store
from toolkit.plans.plan import Plan
from toolkit.recipe.optimizer_sections import Ema
from toolkit.recipe.sections import Train
from toolkit.run_dir.trajectory import largest_difference
from toolkit.runtime.checkpoint.export import export
from toolkit.runtime.checkpoint.fragments import AVERAGE
from toolkit.runtime.engine.training_state import DeepSpeedState
from toolkit.runtime.engine.weight_average import averaged
from toolkit.runtime.optimizers.schedule_free import ScheduleFree
from toolkit.runtime.supervision.warm_pool import call_on_ranks, first_failure

pytestmark = pytest.mark.slow

AVERAGED = replace(ADAM, ema=Ema(decay=0.3))
ZERO = Plan(strategy="zero", dp=2, micro_batch=2, zero_stage=1, zero_group=2, precision="fp32")


def check_as_rank(plan: Plan, train: Train) -> bool:
    """Train, and compare the average with one that is computed from the weights after each step."""
    engine = engine_of(model("llama"), plan, train)
    state = engine.state
    assert isinstance(state, DeepSpeedState)
    expected: dict[torch.Tensor, torch.Tensor] = {}
    for step in range(3):
        engine.step(list(micro_batches(batch(step, "full"), plan, engine.replica)))
        decay = min(0.3, (1 + step) / (10 + step))
        for master, _ in state.masters():
            now = master.detach().clone()
            expected[master] = now if step == 0 else expected[master] * decay + now * (1 - decay)
    last = {master: master.detach().clone() for master in expected}
    with averaged(state):
        assert all(torch.allclose(master, value, atol=1e-7) for master, value in expected.items())
        assert not all(torch.equal(master, value) for master, value in last.items())
    return all(torch.equal(master, value) for master, value in last.items())


def test_the_average_is_that_of_the_weights_after_each_step() -> None:
    for plan in (ONE, ZERO):
        results = call_on_ranks(check_as_rank, plan, AVERAGED, nproc=plan.devices)
        failure = first_failure(results)
        assert failure is None, f"{failure.reason}\n{failure.details}"
        assert all(results)


def exported(finished: Finished, out: Path) -> dict[str, torch.Tensor]:
    export(store.path_of(finished.run.checkpoints, 6), out)
    return load_file(out / "model.safetensors")


def evaluations(finished: Finished) -> list[float]:
    return [json.loads(line)["loss"] for line in finished.run.evaluations.read_text().splitlines()]


def test_it_is_evaluated_resumed_and_exported_under_any_strategy(train: Trainer, tmp_path: Path) -> None:
    held_out = ("data.eval_fraction=0.2", "train.eval_every=3")
    base = ("train.steps=6", "checkpoint.every=3", "train.ema.decay=0.9", *held_out)
    whole = train(*base, "strategy.name=data_parallel", nproc=1)
    plain = train(*base, "train.ema.evaluate=false", "strategy.name=data_parallel", nproc=1, into=tmp_path / "plain")
    part = train(*base, "strategy.name=zero", "strategy.zero_stage=3", "train.states=8bit", into=tmp_path / "part")
    saved = store.path_of(whole.run.checkpoints, 3)
    rest = train(*base, "strategy.name=pipeline", "strategy.pp=2", f"checkpoint.resume={saved}", into=tmp_path / "rest")
    expected, found = exported(whole, tmp_path / "a"), exported(rest, tmp_path / "b")
    assert all(torch.allclose(expected[name], found[name], atol=1e-5) for name in expected)
    assert abs(evaluations(whole)[-1] - evaluations(rest)[-1]) < 2e-5
    assert abs(evaluations(whole)[-1] - evaluations(plain)[-1]) > 1e-4
    assert abs(evaluations(whole)[-1] - evaluations(part)[-1]) < 2e-2


def test_schedule_free_averages_as_its_definition(train: Trainer, tmp_path: Path) -> None:
    """Against the recursion by hand, in one process; then resumed under another strategy."""
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    settings = Train(steps=3, optimizer="schedule_free", betas=(0.9, 0.99), weight_decay=0.1)
    optimizer = ScheduleFree([weight], settings, 0.1)
    optimizer.begin()
    x = z = y = weight.detach().clone().double()
    square, total = torch.zeros(2).double(), 0.0
    for step, gradient in enumerate((torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 0.5]), torch.tensor([2.0, 2.0]))):
        weight.grad = gradient
        optimizer.step()
        rate = 0.1 * (1 - 0.99 ** (step + 1)) ** 0.5
        square = 0.99 * square + 0.01 * gradient.double() ** 2
        z = z - rate * (gradient / (square.sqrt() + settings.eps) + 0.1 * y)
        total += rate**2  # it grows: each rate is the largest so far
        x = x + rate**2 / total * (z - x)
        y = 0.1 * z + 0.9 * x
        assert torch.allclose(weight.double(), y, atol=1e-6)
    assert torch.allclose(optimizer.state[weight][AVERAGE].double(), x, atol=1e-6)
    base = ("train.steps=6", "checkpoint.every=3", "train.optimizer=schedule_free", "train.schedule=constant")
    whole = train(*base, "strategy.name=data_parallel", nproc=1)
    saved = store.path_of(whole.run.checkpoints, 3)
    zero = ("strategy.name=zero", "strategy.zero_stage=2", f"checkpoint.resume={saved}")
    rest = train(*base, *zero, into=tmp_path / "rest")
    assert largest_difference(whole.losses[3:], rest.losses) < 1e-5
