"""Recipes: every problem is found, all at once, with its key path; nothing else gets through."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.cli import main
from toolkit.errors import BadInput
from toolkit.plans.plan import Plan
from toolkit.recipe import Recipe, sections
from toolkit.recipe.documentation import recipe_keys
from toolkit.recipe.file import dump_recipe, load_recipe, make_recipe

GOOD: dict[str, Any] = {"model": {"path": "gpt2"}, "train": {"steps": 10}}


def problems(mapping: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(BadInput) as caught:
        make_recipe(mapping, overrides)
    return str(caught.value)


def test_the_package_offers_the_recipe() -> None:
    assert Recipe is sections.Recipe


def test_a_recipe_can_fix_every_axis_of_a_plan() -> None:
    assert set(sections.AXES) == {f.name for f in fields(Plan)} - {"strategy", "precision"}


def test_defaults_follow_the_contract() -> None:
    recipe = make_recipe(GOOD)
    assert (recipe.model.init, recipe.model.precision, recipe.data.packing) == ("pretrained", "bf16", True)
    assert (recipe.strategy.name, recipe.cluster, recipe.output) == ("auto", "auto", "runs")
    assert (recipe.train.grad_clip, recipe.train.warmup, recipe.metrics.wandb.mode) == (1.0, 0.03, "offline")


PAIRS = {**GOOD, "data": {"format": "preference"}, "train": {"steps": 10, "objective": "dpo"}}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.preference={gamma: 1}", "train.preference.gamma: unused with objective dpo"),
        ("train.objective=ppo", "train.objective: 'ppo' given"),
        ("train={steps: 10, objective: ipo, preference: {label_smoothing: 0.1}}", "label_smoothing: unused"),
        ("data.packing=false", "data.packing: false given; both answers of a pair share a row"),
        ("data.streaming=true", "data.streaming: preference data can't be streamed"),
        ("data.path={a: 1, b: 2}", "data.path: several sources given"),
    ],
)
def test_preference_settings_without_effect_are_refused(override: str, words: str) -> None:
    make_recipe(PAIRS)
    assert words in problems(PAIRS, override)


def test_all_problems_come_in_one_message_with_the_nearest_key() -> None:
    message = problems({"model": {"path": "x"}, "train": {"global_bacth": 4, "lr": -1, "steps": "many"}, "outptu": 1})
    assert message.startswith("recipe: 4 problems")
    assert "train.global_bacth: unknown key; did you mean train.global_batch?" in message
    assert "train.lr: -1 given; more than 0 is required" in message
    assert "train.steps: 'many' given; a whole number is required" in message
    assert "outptu: unknown key; did you mean output?" in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.config={model_type: llama}", "exclude each other"),
        ("train.epochs=2", "steps and epochs exclude each other"),
        ("train.lr_scaling=linear", "train.base_batch: required"),
        ("train.base_batch=8", "unused while lr_scaling is none"),
        ("train.warmup=50", "50 steps of warm-up in 10 steps"),
        ("train.betas=[0.9]", "two numbers"),
        ("train.lr_multipliers={a: null}", "train.lr_multipliers.a: nothing given; a factor above 0 is required"),
        ("train.objective=dpo", "train.objective: dpo needs data.format preference, not text"),
        ("data.format=preference", "train.objective: required with data.format preference: one of dpo"),
        ("train.preference={beta: 0.2}", "train.preference: unused without train.objective"),
        ("strategy.offload=nvme", "strategy.nvme_path: required"),
        ("strategy.nvme_path=/x", "unused unless"),
        ("model.precision=fp8", "one of bf16, fp16, fp32"),
        ("strategy.zero_stage=4", "one of 0, 1, 2, 3"),
        ("train.steps=true", "a whole number"),
        ("train.lr=.nan", "a number is required"),
        ("name=../up", "names a directory"),
        ("name='a b'", "names a directory"),
        ("model=3", "a mapping"),
        ("train.seed=-1", "at least 0"),
        ("nonsense", "not an override"),
        ("train.lr=[", "not usable as YAML"),
        ("metrics.wandb.api_key=abc", "unknown key"),
        ("data.seq_len=1", "at least 2"),
    ],
)
def test_one_problem(override: str, words: str) -> None:
    assert words in problems(GOOD, override)


def test_overrides_are_yaml_and_make_sections() -> None:
    recipe = make_recipe(GOOD, ["train.lr=3e-4", "model.lora={rank: 4}", "strategy.tp=2", "data.packing=false"])
    assert recipe.train.lr == 3e-4
    assert recipe.model.lora is not None
    assert recipe.model.lora.rank == 4
    assert recipe.strategy.fixed() == {"tp": 2}
    assert recipe.data.packing is False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file is empty"),
        ("- a\n- b\n", "a recipe is a mapping"),
        ("just words", "a recipe is a mapping"),
        ("model: {path: x", "not usable as YAML: line"),
        ("model: !!python/object/apply:os.system ['touch /tmp/pwned']", "not usable as YAML"),
        ("model: {path: x}\nmodel: {path: y}", "duplicate key 'model'"),
        ("\x00\x01", "not usable as YAML"),
        ("a: &a [x]\nb: [" + "*a, " * 200 + "]", "aliases"),
        ("[" * 3000, "not usable as YAML"),
        ("a: &a {b: *a}", "contains itself"),
        ("&a [*a]", "contains itself"),
        (
            "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{f'*a{i - 1}, ' * 9}]}}\n" for i in range(1, 11)),
            "more than 200,000 values",
        ),
    ],
)
def test_bad_files(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        load_recipe(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(BadInput, match="can't be read"):
        load_recipe(tmp_path)


def test_devices_and_pipes_are_not_read(tmp_path: Path) -> None:
    """Reading them would never end."""
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    for path in (Path("/dev/zero"), pipe):
        with pytest.raises(BadInput, match="a file is required"):
            load_recipe(path)


def test_what_is_written_reads_back_the_same(tmp_path: Path) -> None:
    recipe = make_recipe(GOOD, ["strategy.zero_stage=3", "train.betas=[0.9, 0.95]", "metrics.wandb.tags=[a, b]"])
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path) == recipe


def test_every_key_is_documented() -> None:
    keys = list(recipe_keys())
    assert len(keys) > 70
    assert [key.path for key in keys if not key.meaning] == []


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
PATHS = st.sampled_from([key.path for key in recipe_keys()] + ["train.global_bacth", "x.y", "model.config.hidden_size"])


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(PATHS, VALUES, min_size=1, max_size=4))
def test_no_malformed_recipe_gives_a_traceback(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """100 recipes with values from anywhere: a clean exit code and a message, never an exception."""
    recipe: dict[str, Any] = {"model": {"config": {"model_type": "llama", "hidden_size": 64}}, "train": {"steps": 1}}
    for path, value in changes.items():
        target = recipe
        *sections, last = path.split(".")
        for section in sections:
            if not isinstance(target.get(section), dict):
                target[section] = {}
            target = target[section]
        target[last] = value
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe, allow_unicode=True))
    code = main(["plan", str(file), "cluster={device: cpu, devices_per_node: 2}"])
    shown = capsys.readouterr()
    assert code in (0, 2, 3)
    assert code == 0 or shown.err.strip()
    assert "Traceback" not in shown.err
