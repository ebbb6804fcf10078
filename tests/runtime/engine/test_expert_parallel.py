"""Experts spread by AutoEP on real processes, against one process."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.harness.checkpoint_layouts import assert_equal, resume_and_copy
from tests.conftest import Trainer
from tests.helpers.parallel import ONE, SGD, assert_same, model, run
from toolkit.checkpoints import store
from toolkit.plans.plan import Plan
from toolkit.runtime.models.tiny_models import tiny_of_type
from toolkit.sessions.parity import largest_difference

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_experts_of_mixtral_under_sgd_with_a_tight_clip(stage: int) -> None:
    plan = Plan(
        strategy="expert_parallel",
        dp=2,
        ep=2,
        zero_stage=stage,
        zero_group=1 + (stage > 0),
        micro_batch=2,
        precision="fp32",
    )
    section = model("mixtral")
    assert_same(run(section, ONE, SGD), run(section, plan, SGD))


MIXTRAL = {**tiny_of_type("mixtral"), "vocab_size": 264}
BASE = ("train.steps=8", "checkpoint.every=4", "checkpoint.keep=9")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "experts": (4, ("strategy.name=expert_parallel", "strategy.ep=2", "strategy.zero_stage=0")),
    "experts+zero-2": (2, ("strategy.name=expert_parallel", "strategy.ep=2", "strategy.zero_stage=2")),
    "data_parallel": (1, ("strategy.name=data_parallel",)),
    "tensor_parallel": (2, ("strategy.name=tensor_parallel", "strategy.tp=2")),
}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("experts", "experts"),
        ("experts+zero-2", "experts+zero-2"),
        ("experts", "data_parallel"),
        ("data_parallel", "experts+zero-2"),
        ("experts+zero-2", "tensor_parallel"),
    ],
)
def test_checkpoints_hold_whole_experts(train: Trainer, tmp_path: Any, first: str, second: str) -> None:
    config = f"model.config={MIXTRAL}"
    (nproc, axes), (other_nproc, other_axes) = LAYOUTS[first], LAYOUTS[second]
    origin = train(*BASE, config, *axes, nproc=nproc, into=tmp_path / "origin")
    saved = store.path_of(origin.run.checkpoints, 4)
    resume = (f"checkpoint.resume={saved}",)
    done = train(*BASE, config, *other_axes, *resume, nproc=other_nproc, enter=resume_and_copy)
    assert_equal(saved, store.path_of(done.run.path / "reloaded", 4))
    assert largest_difference(origin.losses[4:], done.losses) <= (0 if first == second else 1e-5)
