"""DeepSpeed's AutoTP: taken where a trial shows it to be exact, refused with the figures where not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.parallel import ONE, assert_same, model, run
from toolkit import cli
from toolkit.plans.plan import Plan
from toolkit.runtime.proofs.coverage import tiny_model, try_autotp

pytestmark = pytest.mark.slow

TWO = Plan(strategy="tensor_parallel", tp=2, zero_stage=1, micro_batch=4, precision="fp32", tensor_by="autotp")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_has_one_process_s_losses(stage: int) -> None:
    plan = replace(TWO, dp=2, zero_stage=stage, zero_group=2, micro_batch=1, grad_accum=2)
    section = model("llama")
    assert_same(run(section, ONE), run(section, plan))


def test_what_is_not_exact_is_refused_with_the_figures() -> None:
    verdict = try_autotp(tiny_model("persimmon"), 2)
    assert not verdict.ok
    assert "the loss is off by" in verdict.reason
    failed = try_autotp(tiny_model("gpt2"), 2)
    assert not failed.ok
    assert "fails under AutoTP" in failed.reason


@pytest.mark.usefixtures("warm_workers")
def test_a_recipe_asks_for_it_and_it_is_tried_first(
    recipe_mapping: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.plans.split_verdicts.user_cache", lambda: tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_mapping))
    axes = ("strategy.name=tensor_parallel", "strategy.tensor_by=autotp", "strategy.tp=2")
    argv = ["train", str(recipe), "--nproc", "2", *axes, "train.steps=2"]
    assert cli.main([*argv, "strategy.zero_stage=1", "--run-dir", str(tmp_path / "run")]) == 0
    assert "checking the split" in capsys.readouterr().out
    assert "autotp_size" in (tmp_path / "run" / "deepspeed.json").read_text()
    for change, words in {
        "checkpoint.every=1": "so checkpoints can't be written",
        "strategy.zero_stage=0": "reports no gradient norm",
    }.items():
        assert cli.main([*argv, change, "--run-dir", str(tmp_path / "no")]) == 3
        assert words in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
