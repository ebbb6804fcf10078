"""`toolkit data`, `toolkit tokenizer` and `toolkit sample` as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import Trainer
from toolkit.cli import main


@pytest.fixture
def recipe(recipe_mapping: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**recipe_mapping, "output": str(tmp_path / "runs")}))
    return path


def look(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["data", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_the_json_follows_the_contract_and_the_world_changes_nothing(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {world: look(capsys, str(recipe), "--steps", "4", "--world", str(world)) for world in (1, 8)}
    one = found[1]
    assert one.keys() >= {"documents", "tokens", "useful_fraction", "steps"}
    assert one["documents"] == 40
    assert 0.95 < one["useful_fraction"] <= 1
    assert [step["step"] for step in one["steps"]] == [1, 2, 3, 4]
    for world, other in found.items():
        assert [s["sample_ids"] for s in other["steps"]] == [s["sample_ids"] for s in one["steps"]]
        for step in other["steps"]:
            assert len(step["replicas"]) == world
            assert [i for share in step["replicas"] for i in share] == step["sample_ids"]


@pytest.mark.slow
def test_strategies_train_on_the_samples_that_are_shown(
    recipe: Path, train: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens per step depend on the samples; they match the listed ids under every strategy and world size."""
    shown = look(capsys, str(recipe), "--steps", "4")
    runs = {
        "one": train("strategy.name=data_parallel", nproc=1),
        "zero": train("strategy={name: zero, zero_stage: 2, micro_batch: 1}"),
        "pipeline": train("strategy={name: pipeline, pp: 2, micro_batch: 2}"),
    }
    assert [len(step["sample_ids"]) for step in shown["steps"]] == [8] * 4
    tokens = {name: [record["tokens"] for record in run.records] for name, run in runs.items()}
    assert tokens["one"] == tokens["zero"] == tokens["pipeline"]


def test_samples_are_shown_with_what_counts(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(recipe), "data.path=synthetic", "data.format=chat", "data.seq_len=64"]
    assert main(["data", *argv]) == 0
    shown = capsys.readouterr().out
    for words in (
        "documents",
        "of positions useful",
        "step 1: samples",
        "<assistant>",
        "predictions count",
        "what does the",
    ):
        assert words in shown, words


@pytest.mark.parametrize(
    ("objective", "names"), [("dpo", ("chosen", "rejected")), ("kto", ("good", "answer of another row"))]
)
def test_pairs_are_shown_with_their_prompts(
    recipe: Path, capsys: pytest.CaptureFixture[str], objective: str, names: tuple[str, str]
) -> None:
    argv = [str(recipe), "data.path=synthetic", "data.format=preference", "data.seq_len=256"]
    assert main(["data", *argv, f"train.objective={objective}", "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    assert "prompts of pairs are computed once for both answers" in shown
    for number, name in enumerate(names):
        (line,) = [line for line in shown.splitlines() if line.startswith(f"1, {name}: ")]
        assert "<user>" in line, f"the prompt of answer {number} is shown, though it is in the row once"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("data.text_column=body",), "no column 'body'; it has text"),
        (("data.eval_fraction=0.1",), "data.eval_fraction: unused while train.eval_every is 0"),
        (("train.eval_every=2",), "needs held-out data"),
        (("data.format=chat", "data.packing_method=stream"), "stream given; it needs data.format text"),
        (("data.path={a.txt: 0}",), "a weight above 0"),
        (("model.num_labels=3",), "model.num_labels: unused with data.format text"),
        (("model.config.vocab_size=100",), "258 tokens; the model's embedding has 100 rows"),
        (("data.cache=/proc/nowhere",), "data.cache: /proc/nowhere can't be written"),
    ],
)
def test_problems_are_reported(
    recipe: Path, capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], words: str
) -> None:
    assert main(["data", str(recipe), *overrides]) == 2
    assert words in capsys.readouterr().err


def test_a_tokenizer_is_learned_and_used(
    text_file: Path, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tokenizer"
    assert main(["tokenizer", "train", str(text_file), str(out), "--vocab", "280"]) == 0
    assert "280 tokens" in capsys.readouterr().out
    asked = (f"data.tokenizer={out}", "model.config.vocab_size=280")
    by_words, by_bytes = look(capsys, str(recipe), *asked), look(capsys, str(recipe))
    assert by_words["tokens"] < 0.6 * by_bytes["tokens"]
    assert look(capsys, str(recipe), *asked, "data.path=synthetic", "data.format=chat")["documents"] == 256
    assert main(["tokenizer", "train", str(text_file), str(out)]) == 2
    assert main(["tokenizer", "train", str(text_file), str(tmp_path / "other"), "--vocab", "99"]) == 2
    assert "at least 261" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["null", "{rank: 4}"])
def test_a_sample_shows_what_was_learned(train: Trainer, capsys: pytest.CaptureFixture[str], lora: str) -> None:
    steps = 60 if lora == "null" else 2
    done = train("checkpoint.every=60", f"train.steps={steps}", f"model.lora={lora}", "train.lr=0.02")
    run = str(done.run.path)
    assert main(["sample", run, "the quick", "--tokens", "12", "--temperature", "0"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("the quick")
    assert len(text) > len("the quick") + 3
    if lora == "null":
        assert text.startswith("the quick brown")
    assert main(["sample", run, "x" * 70]) == 2
    assert "70 tokens given; the model takes at most 64" in capsys.readouterr().err
