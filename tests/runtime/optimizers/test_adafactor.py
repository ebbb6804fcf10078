"""Adafactor: torch's own in one process, the same under shards and stages, and second moments in checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conftest import Trainer
from tests.helpers.parallel import ADAM, ONE, assert_same, model, run
from toolkit.checkpoints import element_runs, store
from toolkit.plans.plan import Plan
from toolkit.recipe.sections import Train
from toolkit.run_dir.trajectory import largest_difference
from toolkit.runtime.optimizers.adafactor import Adafactor, Layout, factors
from toolkit.runtime.optimizers.packed_states import Piece

pytestmark = pytest.mark.slow

SETTINGS = replace(ADAM, optimizer="adafactor", lr=1e-2, weight_decay=0.1)


def test_updates_are_torch_s() -> None:
    shapes = [(6, 5), (4,), (3, 4, 2)]
    generator = torch.Generator().manual_seed(0)
    first = [torch.randn(shape, generator=generator) for shape in shapes]
    ours, theirs = ([torch.nn.Parameter(value.clone()) for value in first] for _ in range(2))
    optimizer = Adafactor(ours, Train(steps=1, weight_decay=0.1), 0.02)
    layouts = {}
    for parameter in ours:
        piece = Piece("a", 0, element_runs.flat(0, parameter.numel()))
        sliced = torch.zeros(1, dtype=torch.bool)
        layouts[parameter] = Layout(factors([tuple(parameter.shape)], [piece]), sliced, lambda values, _: values)
    optimizer.begin(layouts)
    expected = torch.optim.Adafactor(theirs, lr=0.02, weight_decay=0.1, foreach=False)
    for _ in range(3):
        for own, other in zip(ours, theirs, strict=True):
            own.grad = torch.randn(own.shape, generator=generator)
            other.grad = own.grad.clone()
        optimizer.step()
        expected.step()
        for own, other in zip(ours, theirs, strict=True):
            assert torch.allclose(own, other, atol=1e-6)


@pytest.mark.parametrize(
    "axes",
    [
        {"dp": 2, "zero_stage": 1, "zero_group": 2},
        {"dp": 2, "zero_stage": 3, "zero_group": 2},
        {"tp": 2, "grad_accum": 2},
        {"pp": 2, "grad_accum": 2},
    ],
    ids=["zero 1", "zero 3", "tp", "pp"],
)
def test_every_layout_gives_the_result_of_one_process(axes: dict[str, int]) -> None:
    plan = Plan(strategy="test", micro_batch=2, precision="fp32", **axes)  # type: ignore[arg-type]
    assert_same(run(model("llama"), ONE, SETTINGS), run(model("llama"), plan, SETTINGS))


def test_second_moments_are_resumed_under_another_strategy(train: Trainer, tmp_path: Path) -> None:
    base = ("train.steps=6", "checkpoint.every=3", "train.optimizer=adafactor")
    whole = train(*base, "strategy.name=data_parallel", nproc=1)
    part = train(*base, "strategy.name=zero", "strategy.zero_stage=2", into=tmp_path / "part")
    saved = store.path_of(part.run.checkpoints, 3)
    rest = train(*base, "strategy.name=data_parallel", f"checkpoint.resume={saved}", nproc=1, into=tmp_path / "rest")
    assert largest_difference(whole.losses[3:], rest.losses) < 1e-5
