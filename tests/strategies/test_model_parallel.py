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
        ("strategy={name: hybrid, tp: 2, pp: 2, cp: 3}", 12, "2·cp·sp = 6 does not divide sequences of 32 tokens"),
        ("strategy={name: expert_parallel, ep: 2}", 2, "llama has no experts: it is dense"),
        ("strategy={name: hybrid, tp: 2, pp: 4}", 8, "4 stages need at least 4 layers"),
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
@pytest.mark.parametrize("more", ["model.precision=bf16", "train.optimizer=lamb"])
def test_shards_run_in_16_bits_without_zero_and_with_layer_wise_optimizers(name: str, more: str, recipe: Path) -> None:
    assert main(["plan", str(recipe), f"strategy={{name: {name}, zero_stage: 0}}", more, "--nproc", "2"]) == 0


@pytest.mark.parametrize("name", ["tensor_parallel", "pipeline"])
def test_states_of_shards_are_offloaded_to_the_host_only(
    name: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = f"strategy={{name: {name}, zero_stage: 1, offload: cpu}}"
    assert main(["plan", str(recipe), fixed, "--nproc", "2"]) == 0
    assert "offload cpu" in capsys.readouterr().out.replace("\n", " ")
    assert main(["plan", str(recipe), fixed.replace("cpu", "cpu_params"), "--nproc", "2"]) == 3
    assert "only to the host" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ("pp: 2, chunks: 3", "strategy.chunks: 3 given; must divide the model's 4 layers"),
        ("pp: 2, chunks: 4", "strategy.chunks: 4 given; must divide the model's 4 layers"),
        ("pp: 2, chunks: 3", "use 1 or 2"),
        ("pp: 2, schedule: 1f1b, chunks: 2", "schedule 1f1b requires 1"),
        ("pp: 2, schedule: zero_bubble, chunks: 4", "schedule zero_bubble requires 2"),
        ("pp: 1, schedule: interleaved", "needs a pipeline"),
        (
            "pp: 2, schedule: interleaved, grad_accum: 1",
            "at least 2 micro-batches per step to fill; there are 1; use 2",
        ),
        ("pp: 2, schedule: zero_bubble, micro_batch: 4", "there are 2; use 3"),
    ],
)
def test_schedules_that_can_not_fill_are_bad_input(
    axes: str, words: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = "model.config.num_hidden_layers=4"
    assert main(["plan", str(recipe), f"strategy={{name: pipeline, {axes}}}", layers, "--nproc", "2"]) == 2
    assert words in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ("name: pipeline, pp: 2, schedule: zero_bubble, recompute: full", "which is what recomputation frees"),
        ("name: zero, schedule: interleaved", "zero has no pipeline to order"),
    ],
)
def test_schedules_that_do_not_combine_are_refused_with_the_reason(
    axes: str, words: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = "model.config.num_hidden_layers=4"
    assert main(["plan", str(recipe), f"strategy={{{axes}}}", layers, "--nproc", "4"]) == 3
    assert words in capsys.readouterr().err.replace("\n", " ")


def test_the_planner_offers_every_schedule(recipe_mapping: dict[str, Any]) -> None:
    job = make_job(make_recipe(recipe_mapping, ["model.config.num_hidden_layers=4", "strategy.name=pipeline"]), 2)
    found = {(p.schedule, p.chunks, p.recompute) for p in strategies.propose(job, "pipeline") if isinstance(p, Plan)}
    assert {("1f1b", 1, "full"), ("interleaved", 2, "full"), ("zero_bubble", 2, "none")} <= found
    assert not any(schedule == "zero_bubble" and recompute != "none" for schedule, _, recompute in found)


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
