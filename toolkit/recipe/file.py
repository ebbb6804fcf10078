"""Read recipe files with `key=value` overrides into a checked `Recipe`, and write recipes back."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import BadInput, Problem
from toolkit.recipe.batch_sections import (
    interval_problems,
    one_bit_problems,
    outer_problems,
    ramp_problems,
    reduce_problems,
)
from toolkit.recipe.data_checks import data_problems, task_of
from toolkit.recipe.objective_sections import (
    SCORED,
    SETTINGS,
    objective_problems,
    reference_problems,
    router_problems,
)
from toolkit.recipe.optimizer_sections import average_problems, optimizer_problems
from toolkit.recipe.schema import build, show
from toolkit.recipe.sections import Recipe, StrategySection, Train
from toolkit.recipe.yaml_file import parse_yaml, read_yaml
from toolkit.secrets import secret_problems

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_OVERRIDE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*)=(.*)", re.DOTALL)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a file with overrides; raises `BadInput` that lists every problem."""
    given = read_yaml(path)
    if given is None:
        raise BadInput(str(path), "the file is empty; a recipe needs at least `model:` with `path` or `config`")
    if not isinstance(given, dict):
        raise BadInput(str(path), f"{show(given)} given; a recipe is a mapping with keys such as model, data, train")
    return make_recipe(given, overrides, source=str(path))


def make_recipe(given: dict[str, Any], overrides: Sequence[str] = (), *, source: str = "recipe") -> Recipe:
    """The recipe of a mapping with overrides; raises `BadInput` that lists every problem."""
    problems: list[Problem] = []
    merged = copy.deepcopy(given)
    for override in overrides:
        _apply(merged, override, problems)
    secrets = list(secret_problems(merged))
    if secrets:  # first, before another message shows the value
        raise BadInput(source, secrets)
    recipe = build(Recipe, merged, "", problems)
    if problems:
        raise BadInput(source, problems)
    problems = _cross_problems(recipe)
    if problems:
        raise BadInput(source, problems)
    return _resolved(recipe)


def dump_recipe(recipe: Recipe) -> str:
    """YAML that `load_recipe` reads back into an equal recipe."""
    return yaml.safe_dump(as_mapping(recipe), sort_keys=False, allow_unicode=True)


def as_mapping(recipe: Recipe) -> dict[str, Any]:
    """A mapping from which `make_recipe` builds an equal recipe."""
    mapping: dict[str, Any] = _plain(asdict(recipe))
    return mapping


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _apply(given: dict[str, Any], override: str, problems: list[Problem]) -> None:
    match = _OVERRIDE.fullmatch(override)
    if not match:
        problems.append(Problem(show(override), "not an override; write key.sub=value"))
        return
    keys, target = match[1].split("."), given
    try:
        value = parse_yaml(match[2], override)
    except BadInput as error:
        problems.append(Problem(match[1], error.problems[0].what))
        return
    for key in keys[:-1]:
        if not isinstance(target.get(key), dict):
            target[key] = {}
        target = target[key]
    target[keys[-1]] = value


def _cross_problems(recipe: Recipe) -> list[Problem]:
    """Problems that involve several keys."""
    problems = [*_model_problems(recipe), *_train_problems(recipe.train), *_strategy_problems(recipe.strategy)]
    train, strategy = recipe.train, recipe.strategy
    problems += one_bit_problems(
        train.optimizer, train.freeze_steps, train.grad_clip, strategy.name, strategy.zero_stage
    )
    problems += data_problems(recipe.data, recipe.train, recipe.model)
    problems += router_problems(train.router)
    problems += interval_problems(strategy.local_steps, train.outer)
    problems += reference_problems(train.objective, train.reference)
    problems += objective_problems(train.objective, {key: getattr(train, key) for key in SETTINGS}, recipe.data.format)
    problems += average_problems(train.optimizer, train.schedule, train.ema)
    problems += optimizer_problems(train.optimizer, train.muon, train.states)
    if train.patience is not None and strategy.name == "local_sgd":
        what = "islands evaluate at different times, so no evaluation can stop them all; remove it"
        problems.append(Problem("train.patience", what))
    if train.label_smoothing and train.objective is not None:
        what = "is for cross-entropy over tokens; use train.preference.label_smoothing, or remove it"
        problems.append(Problem("train.label_smoothing", what))
    if not _NAME.fullmatch(recipe.name):
        what = f"{show(recipe.name)} given; letters, digits, . _ - only, at most 100, because it names a directory"
        problems.append(Problem("name", what))
    if recipe.metrics.noise_scale and recipe.train.optimizer == "onebit_adam":
        problems.append(
            Problem("metrics.noise_scale", "needs reduced gradients, which onebit_adam does not have; use adamw")
        )
    if not recipe.output.strip():
        problems.append(Problem("output", "empty; give a directory"))
    return problems


def _principal_problems(recipe: Recipe) -> Iterator[Problem]:
    """What adapters that start as a part of their weights can't be combined with."""
    key, lora = "model.lora.start", recipe.model.lora
    assert lora is not None
    if lora.quantize != "none" or lora.dora or recipe.model.trust_remote_code:
        yield Problem(key, "pissa needs plain weights: not quantize, dora or trust_remote_code; use zero")
    if recipe.train.objective is not None:
        yield Problem(key, "pissa changes the frozen weights, which an objective's reference may need; use zero")


def _model_problems(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    if model.path is None and model.config is None:
        yield Problem("model", "neither path nor config given; give one of them")
    if model.freeze and model.lora is not None:
        yield Problem("model.freeze", "unused with model.lora, which freezes all but the adapters; remove it")
    if model.lora is not None and model.lora.start == "pissa":
        yield from _principal_problems(recipe)
    if model.path is not None and model.config is not None:
        yield Problem("model", "path and config exclude each other; give one of them")
    if model.config is not None and model.init == "pretrained":
        yield Problem("model.init", "'pretrained' needs model.path; an inline config starts from scratch")
    needs_tokenizer = recipe.data.format != "image-classification" and recipe.data.path != "synthetic"
    if model.path is None and recipe.data.tokenizer is None and needs_tokenizer:
        yield Problem("data.tokenizer", "required with an inline model config: a hub id, a directory, or bytes")


def _rate_problems(train: Train) -> Iterator[Problem]:
    """Unused and impossible settings of learning rates and weight decay."""
    for key, value, schedule in (
        ("decay_fraction", train.decay_fraction, "wsd"),
        ("cycles", train.cycles, "cosine_restarts"),
    ):
        if value is not None and train.schedule != schedule:
            yield Problem(f"train.{key}", f"unused with schedule {train.schedule}; remove it, or use {schedule}")
    for pattern, factor in (train.lr_multipliers or {}).items():
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
            yield Problem(f"train.lr_multipliers.{pattern}", f"{show(factor)} given; a factor above 0 is required")
    if train.optimizer == "onebit_adam" and (train.lr_multipliers or (train.weight_decay and train.decay != "all")):
        key = "lr_multipliers" if train.lr_multipliers else "decay"
        what = "onebit_adam exchanges all parameters as one group; use decay: all, and no lr_multipliers"
        yield Problem(f"train.{key}", what)


def _train_problems(train: Train) -> Iterator[Problem]:
    yield from _rate_problems(train)
    yield from reduce_problems(train.reduce)
    yield from outer_problems(train.outer)
    yield from ramp_problems(train.batch_ramp, train.global_batch)
    if train.steps is not None and train.epochs is not None:
        yield Problem("train", "steps and epochs exclude each other; give one of them")
    if train.steps is None and train.epochs is None:
        yield Problem("train", "neither steps nor epochs given; give one of them")
    if train.lr_scaling != "none" and train.base_batch is None:
        yield Problem("train.base_batch", f"required with lr_scaling {train.lr_scaling}: the batch that lr is for")
    if train.lr_scaling == "none" and train.base_batch is not None:
        yield Problem("train.base_batch", "unused while lr_scaling is none; set lr_scaling, or remove it")
    if len(train.betas) != 2 or not all(0 <= beta < 1 for beta in train.betas):
        given = show(list(train.betas))
        yield Problem("train.betas", f"{given} given; two numbers of at least 0 and below 1 are required")
    if train.steps is not None and train.warmup >= 1 and train.warmup > train.steps:
        what = f"{train.warmup:g} steps of warm-up in {train.steps} steps; use fewer, or a fraction below 1"
        yield Problem("train.warmup", what)


def _strategy_problems(strategy: StrategySection) -> Iterator[Problem]:
    to_disk = (strategy.offload or "").startswith("nvme")
    if to_disk and strategy.nvme_path is None:
        yield Problem("strategy.nvme_path", "required with nvme offload: a directory on the fast disk")
    if strategy.nvme_path is not None and not to_disk:
        yield Problem("strategy.nvme_path", "unused unless strategy.offload is nvme or nvme_params")


def _resolved(recipe: Recipe) -> Recipe:
    """The recipe with defaults that depend on other keys filled in."""
    init = recipe.model.init or ("pretrained" if recipe.model.path else "scratch")
    task = recipe.model.task or task_of(recipe.data.format, recipe.train.objective)
    labels = 1 if recipe.train.objective in SCORED else recipe.model.num_labels
    return replace(recipe, model=replace(recipe.model, init=init, task=task, num_labels=labels))
