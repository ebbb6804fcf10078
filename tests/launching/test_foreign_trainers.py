"""Plans inside transformers.Trainer, TRL's SFTTrainer and an accelerate loop: the losses of toolkit.train."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import Trainer
from tests.helpers import foreign_trainers
from toolkit import api
from toolkit.errors import BadInput
from toolkit.launching import launchers
from toolkit.runtime.supervision.warm_pool import run_warm

pytestmark = pytest.mark.slow

CASES = {
    "transformers, ZeRO 2": (
        foreign_trainers.transformers,
        ("strategy={name: zero, zero_stage: 2, micro_batch: 2}", "train.schedule=cosine"),
    ),
    "transformers, ZeRO 3": (
        foreign_trainers.transformers,
        (
            "strategy={name: zero, zero_stage: 3, micro_batch: 4}",
            *("train.schedule=linear", "train.weight_decay=0.1", "train.decay=all"),
        ),
    ),
    "TRL, ZeRO 2": (foreign_trainers.trl, ("strategy={name: zero, zero_stage: 2, micro_batch: 4}",)),
    "accelerate, ZeRO 1": (
        foreign_trainers.accelerate,
        ("strategy={name: zero, zero_stage: 1, micro_batch: 2}", "train.schedule=constant"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_of_our_own_trainer(train: Trainer, case: str) -> None:
    enter: Callable[[tuple[str, ...], dict[str, str]], None]
    enter, overrides = CASES[case]
    ours = train(*overrides, "train.warmup=0", "data.packing_method=stream")
    codes = run_warm(launchers.commands("local", ours.run.path, 2, "cpu"), enter)
    assert codes == [0, 0]
    theirs = json.loads((ours.run.path / "foreign.json").read_text())
    assert theirs == pytest.approx(ours.losses, rel=1e-5)
    assert len(set(theirs)) == 4, "the model learns"


@pytest.mark.parametrize("give", [lambda plan: api.training_arguments(plan, "out"), api.deepspeed_plugin])
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("strategy={name: pipeline, pp: 2}", "pp 2 is supported by toolkit.train only; use that"),
        ("strategy={name: tensor_parallel, tp: 2}", "tp 2 is supported by toolkit.train only"),
        ("train.grad_reduce=sum", "other trainers average gradients"),
    ],
)
def test_what_they_can_not_do_is_refused(
    recipe_mapping: dict[str, Any], give: Callable[[api.Planned], Any], override: str, words: str
) -> None:
    recipe_mapping["strategy"] = {"name": "data_parallel"}  # unless the override asks for another one
    with pytest.raises(BadInput, match=words):
        give(api.plan(recipe_mapping, override, nproc=2))


def test_weight_decay_that_differs_is_reported(recipe_mapping: dict[str, Any]) -> None:
    given = ("strategy.name=zero", "train.warmup=0", "train.weight_decay=0.1")
    with pytest.warns(UserWarning, match=r"train\.decay=all is exact"):
        api.training_arguments(api.plan(recipe_mapping, *given, nproc=2), "out")


def test_a_warm_up_that_differs_is_reported(recipe_mapping: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="one step later"):
        api.training_arguments(api.plan(recipe_mapping, "strategy.name=zero", "train.warmup=2", nproc=2), "out")
