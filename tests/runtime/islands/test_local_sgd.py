"""Islands on real processes: one step with averaging is synchronous training; more drift, and come together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.harness.checkpoint_layouts import assert_equal
from tests.conftest import Trainer
from tests.helpers.parallel import ONE, SGD, model, run
from toolkit.checkpoints import store
from toolkit.errors import BadInput, NoPlanFits
from toolkit.plans.plan import Plan
from toolkit.recipe.file import make_recipe
from toolkit.sessions.parity import largest_difference
from toolkit.sessions.resolve import TOO_EARLY, plan_notes, resolve

pytestmark = pytest.mark.slow

EVERY_STEP = Plan(strategy="local_sgd", islands=2, micro_batch=2, precision="fp32")
AXES = ("strategy.name=local_sgd", "strategy.islands=2")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_local_step_with_averaging_is_synchronous_sgd(stage: int) -> None:
    """Without clipping, which would work on other gradients."""
    plain = replace(SGD, grad_clip=0.0, lr=0.1)
    plan = replace(EVERY_STEP, dp=2, micro_batch=1, zero_stage=stage, zero_group=2 if stage else 1)
    section = model("llama")
    assert largest_difference(run(section, ONE, plain).loss, run(section, plan, plain).loss) <= 1e-6


def test_islands_drift_and_come_together(train: Trainer) -> None:
    base = ("train.steps=12", "strategy.zero_stage=1")
    apart = train(*base, *AXES, "strategy.local_steps=4", nproc=4)
    synchronous = train(*base, "strategy.name=zero", nproc=4)
    assert 1e-6 < largest_difference(synchronous.losses, apart.losses) < 0.05
    assert apart.losses[-1] < apart.losses[0]


@pytest.mark.parametrize(
    ("outer", "stage"),
    [
        ("{optimizer: average}", 0),
        ("{optimizer: nesterov}", 2),
        ("{optimizer: nesterov, mode: overlap, bits: 8}", 0),
        ("{optimizer: average, mode: overlap, bits: 4}", 2),
        ("{optimizer: average, mode: overlap, delay_steps: 1}", 1),
        ("{mode: overlap, bits: 2, fragments: 2}", 0),
        ("{bits: 2, density: 0.1, fragments: 2}", 1),
    ],
)
def test_a_round_s_end_is_saved_and_goes_on_bit_by_bit(train: Trainer, tmp_path: Any, outer: str, stage: int) -> None:
    base = (
        "train.steps=12",
        "checkpoint.every=4",
        "checkpoint.keep=9",
        f"strategy.zero_stage={stage}",
        "strategy.local_steps=2",
        f"train.outer={outer}",
        *AXES,
    )
    origin = train(*base, nproc=4, into=tmp_path / "origin")
    saved = store.path_of(origin.run.checkpoints, 4)
    done = train(*base, f"checkpoint.resume={saved}", nproc=4)
    assert origin.losses[4:] == done.losses
    assert_equal(store.path_of(origin.run.checkpoints, 12), store.path_of(done.run.checkpoints, 12))


def test_the_rhythm_follows_the_link(train: Trainer, tmp_path: Any) -> None:
    """A link inside this host carries every number at every step; a checkpoint in between is an exchange of its own."""
    outer = "train.outer={mode: overlap, bits: auto, fragments: auto}"
    base = ("train.steps=52", *AXES, "strategy.local_steps=auto", outer, "checkpoint.every=9", "checkpoint.keep=9")
    done = train(*base, nproc=2, into=tmp_path / "auto")
    rhythms = [(r["exchange"]["local_steps"], r["exchange"]["bits"]) for r in done.records]
    assert rhythms[0] == (4, 2)
    assert len(set(rhythms)) > 1, "nothing was chosen again"
    assert done.losses[-1] < 0.8 * done.losses[0]
    again = train(*base, f"checkpoint.resume={store.path_of(done.run.checkpoints, 45)}", nproc=2)
    assert len(again.losses) == 7
    saved = store.path_of(done.run.checkpoints, 9)
    alone = train("train.steps=12", "strategy.name=data_parallel", f"checkpoint.resume={saved}", nproc=1)
    assert len(alone.losses) == 3


def test_synchronous_training_goes_on_from_islands_and_back(train: Trainer, tmp_path: Any) -> None:
    base = ("train.steps=8", "checkpoint.every=4", "checkpoint.keep=9")
    islands = train(*base, *AXES, "strategy.local_steps=4", nproc=2, into=tmp_path / "islands")
    saved = store.path_of(islands.run.checkpoints, 4)
    alone = train(*base, "strategy.name=data_parallel", f"checkpoint.resume={saved}", nproc=1)
    assert len(alone.losses) == 4
    again = store.path_of(alone.run.checkpoints, 8)
    more = ("train.steps=12", f"checkpoint.resume={again}")
    back = train(*base, *AXES, "strategy.local_steps=4", *more, nproc=2)
    assert len(back.losses) == 4


def test_a_mean_counts_after_as_many_steps_as_the_recipe_says(train: Trainer) -> None:
    base = ("train.steps=8", *AXES, "strategy.local_steps=4")
    late = train(*base, "train.outer={mode: overlap}")
    early = train(*base, "train.outer={mode: overlap, delay_steps: 2}")
    assert early.losses[:6] == late.losses[:6]
    assert early.losses[6] != late.losses[6], "the first round's mean counts after the second step of the next"


def test_a_mean_can_not_count_after_the_next_one(recipe_mapping: dict[str, Any]) -> None:
    axes = (*AXES, "strategy.local_steps=4", "train.outer={mode: overlap, delay_steps: 5}")
    with pytest.raises(NoPlanFits, match=r"delay_steps \(5\) must be at most local_steps \(4\)"):
        _ = resolve(make_recipe(recipe_mapping, axes), 2).chosen


@pytest.mark.parametrize(("resume", "told"), [("auto", True), ("/runs/one-site/checkpoints/step-00000400", False)])
def test_islands_from_random_weights_are_advised_against(
    recipe_mapping: dict[str, Any], resume: str, told: bool
) -> None:
    resolved = resolve(make_recipe(recipe_mapping, (*AXES, f"checkpoint.resume={resume}")), 2)
    assert (TOO_EARLY in plan_notes(resolved)) is told


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("strategy.local_steps=auto",), "use train.outer.mode overlap"),
        (("strategy.local_steps=auto", "train.outer={mode: async}"), "claim rounds of equal length"),
        (("strategy.local_steps=auto", "train.outer={mode: overlap, delay_steps: 1}"), "unused with local_steps auto"),
        (("train.outer={bits: auto}",), "use mode overlap"),
        (("train.outer={bits: 4, density: 0.1}",), "use bits 2"),
        (("train.outer={bits: 3}",), "one of 32, 8, 4, 2, auto"),
        (("train.outer={mode: async, fragments: 2}",), "exchange whole updates"),
    ],
)
def test_settings_that_exclude_each_other(
    recipe_mapping: dict[str, Any], overrides: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(BadInput, match=reason):
        make_recipe(recipe_mapping, (*AXES, *overrides))


def test_fragments_divide_a_round(recipe_mapping: dict[str, Any]) -> None:
    axes = (*AXES, "strategy.local_steps=4", "train.outer={fragments: 3}")
    with pytest.raises(NoPlanFits, match=r"fragments \(3\) must divide local_steps \(4\)"):
        _ = resolve(make_recipe(recipe_mapping, axes), 2).chosen
    named = resolve(
        make_recipe(recipe_mapping, ("strategy={name: zero, local_steps: auto}", "train.outer={mode: overlap}")), 2
    )
    assert named.decision.chosen is None
