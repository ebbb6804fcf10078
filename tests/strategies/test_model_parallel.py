"""Model-parallel strategies refuse what can't run, with the reason, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import strategies
from toolkit.cli import main
from toolkit.plans.job import make_job
from toolkit.plans.plan import Plan
from toolkit.recipe.file import make_recipe


@pytest.fixture
def recipe(recipe_mapping: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**recipe_mapping, "output": str(tmp_path / "runs")}))
    return path


@pytest.mark.parametrize(
    ("override", "nproc", "words"),
    [
        ("strategy={name: tensor_parallel, tp: 8}", 8, "tp 8 does not divide the 4 attention heads"),
        ("strategy={name: pipeline, pp: 4}", 4, "4 stages need at least 4 layers; the model has 2"),
        ("strategy={name: pipeline, pp: 2, zero_stage: 2}", 2, "a pipeline runs with ZeRO 0 or 1 only"),
        ("strategy={name: pipeline, pp: 2, pipeline_bounds: [0, 2]}", 2, "2 stages need 3, e.g. [0, 1, 2]"),
        ("strategy={name: sequence_parallel, sp: 8}", 8, "sp 8 does not divide the 4 attention heads"),
        (
            "strategy={name: sequence_parallel, cp: 3}",
            3,
            "2·cp·sp = 6 does not divide sequences of 32 tokens; use data.seq_len 30",
        ),
        ("strategy={name: sequence_parallel, cp: 2, sp: 2}", 2, "tp·pp·sp·cp = 4 does not divide the 2 devices"),
        ("strategy={name: hybrid, tp: 2, pp: 2, cp: 2}", 8, "strategy.cp is fixed at 2; hybrid offers 1"),
        ("strategy={name: expert_parallel, ep: 2}", 2, "llama has no experts: it is dense"),
        ("strategy={name: hybrid, tp: 2, pp: 4}", 8, "4 stages need at least 4 layers"),
        ("strategy={name: hybrid, pp: 2, sp: 2}", 4, "sequence and ring parallel do not run in a pipeline"),
        ("strategy={name: hybrid, tp: 2, sp: 4}", 8, "sp must divide the attention heads of a tensor rank"),
    ],
)
def test_impossible_sizes_end_before_a_process_starts(
    recipe: Path, override: str, nproc: int, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = main(["train", str(recipe), override, "--nproc", str(nproc)])
    shown = capsys.readouterr()
    assert code in (2, 3)
    assert words in shown.err + shown.out.replace("\n", " ")
    assert not (tmp_path / "runs").exists()


def test_a_sequence_that_does_not_divide_is_refused(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    override = "strategy={name: sequence_parallel, sp: 2}"
    assert main(["plan", str(recipe), override, "data.seq_len=31", "--nproc", "2"]) == 3
    assert "sp 2 does not divide sequences of 31 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "shared", "words"),
    [
        ("data.seq_len=64", True, ""),
        ("strategy.sequence_sharded=false", False, ""),
        ("data.seq_len=63", False, "residuals of all tokens: tp 2 does not divide rows of 63 tokens"),
        ("model.compile=layers", False, "residuals of all tokens: compiled layers have not been tried"),
    ],
)
def test_tensor_ranks_share_tokens_where_they_can(
    recipe: Path, override: str, shared: bool, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = ["strategy.name=tensor_parallel", "strategy.tp=2", override]
    assert main(["plan", str(recipe), *fixed, "--nproc", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"]["sequence_sharded"] is shared
    assert main(["plan", str(recipe), *fixed, "--nproc", "2"]) == 0
    shown = capsys.readouterr()
    assert words in " ".join((shown.out + shown.err).split())


def test_shares_of_tokens_that_are_asked_for_and_impossible_are_refused(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["strategy.name=tensor_parallel", "strategy.tp=2", "strategy.sequence_sharded=true", "data.seq_len=63"]
    assert main(["plan", str(recipe), *asked, "--nproc", "2"]) == 3
    assert "tp 2 does not divide rows of 63 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tensor_parallel", "pipeline"])
def test_shards_in_16_bits_need_zero_1(name: str, recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = f"strategy={{name: {name}, zero_stage: 0}}"
    assert main(["plan", str(recipe), fixed, "model.precision=bf16", "--nproc", "2"]) == 3
    assert "out of the gradient norm" in capsys.readouterr().err
    assert main(["plan", str(recipe), fixed, "--nproc", "2"]) == 0


def test_pipeline_plans_say_where_they_are_cut(recipe_mapping: dict[str, Any]) -> None:
    job = make_job(make_recipe(recipe_mapping, ["strategy={name: pipeline, pp: 2}"]), 2)
    plans = [plan for plan in strategies.propose(job, "pipeline") if isinstance(plan, Plan)]
    assert {plan.pipeline_bounds for plan in plans} == {(0, 1, 2)}
    assert "layers 0-1-2" in plans[0].describe()


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_parity_runs_every_strategy(devices: int) -> None:
    names = {name for s in strategies.registry().values() for name in s.variants(devices)}
    assert {"pipeline-2+zero-0", "pipeline-2+zero-1", "sequence-2+zero-3", "experts-2+zero-1"} <= names
    assert {f"tensor-2+zero-{stage}" for stage in range(4)} <= names
    assert ("hybrid-2x2+zero-1" in names) == (devices % 4 == 0)
