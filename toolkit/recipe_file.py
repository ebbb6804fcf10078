"""Recipe files: YAML and `key=value` overrides in, a checked `Recipe` out; and back."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import BadInput, Problem
from toolkit.recipe import Recipe
from toolkit.schema import build, show
from toolkit.yaml_file import parse_yaml, read_yaml

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_OVERRIDE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*)=(.*)", re.DOTALL)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a file with overrides; `BadInput` with every fault at once."""
    given = read_yaml(path)
    if given is None:
        raise BadInput(str(path), "the file is empty; a recipe needs at least `model:` with `path` or `config`")
    if not isinstance(given, dict):
        raise BadInput(str(path), f"{show(given)} given; a recipe is a mapping with keys such as model, data, train")
    return make_recipe(given, overrides, source=str(path))


def make_recipe(given: dict[str, Any], overrides: Sequence[str] = (), *, source: str = "recipe") -> Recipe:
    """The recipe of a mapping with overrides."""
    problems: list[Problem] = []
    merged = copy.deepcopy(given)
    for override in overrides:
        _apply(merged, override, problems)
    recipe = build(Recipe, merged, "", problems)
    if problems:
        raise BadInput(source, problems)
    problems = _cross_faults(recipe)
    if problems:
        raise BadInput(source, problems)
    return _resolved(recipe)


def dump_recipe(recipe: Recipe) -> str:
    """YAML that `load_recipe` reads back into an equal recipe."""
    return yaml.safe_dump(_plain(asdict(recipe)), sort_keys=False, allow_unicode=True)


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


def _cross_faults(recipe: Recipe) -> list[Problem]:
    """What single fields can't show."""
    faults: list[tuple[bool, str, str]] = [
        (not _NAME.fullmatch(recipe.name), "name", f"{show(recipe.name)} given; letters, digits, . _ - only, at most 100, because it names a directory"),
        (recipe.model.path is None and recipe.model.config is None, "model", "neither path nor config given; give one of them"),
        (recipe.model.path is not None and recipe.model.config is not None, "model", "path and config exclude each other; give one of them"),
        (recipe.model.config is not None and recipe.model.init == "pretrained", "model.init", "'pretrained' needs model.path; an inline config starts from scratch"),
        (recipe.train.steps is not None and recipe.train.epochs is not None, "train", "steps and epochs exclude each other; give one of them"),
        (recipe.train.steps is None and recipe.train.epochs is None, "train", "neither steps nor epochs given; give one of them"),
        (recipe.train.lr_scaling != "none" and recipe.train.base_batch is None, "train.base_batch", f"required with lr_scaling {recipe.train.lr_scaling}: the batch that lr was chosen for"),
        (recipe.train.lr_scaling == "none" and recipe.train.base_batch is not None, "train.base_batch", "unused while lr_scaling is none; set lr_scaling to linear or sqrt, or remove it"),
        (len(recipe.train.betas) != 2 or not all(0 <= beta < 1 for beta in recipe.train.betas), "train.betas", f"{show(list(recipe.train.betas))} given; two numbers of at least 0 and below 1 are required"),
        (recipe.train.steps is not None and recipe.train.warmup >= 1 and recipe.train.warmup > recipe.train.steps, "train.warmup", f"{recipe.train.warmup:g} steps of warm-up in {recipe.train.steps} steps; use fewer, or a fraction below 1"),
        (recipe.strategy.nvme_path is None and (recipe.strategy.offload or "").startswith("nvme"), "strategy.nvme_path", "required with nvme offload: a directory on the fast disk"),
        (recipe.strategy.nvme_path is not None and not (recipe.strategy.offload or "").startswith("nvme"), "strategy.nvme_path", "unused unless strategy.offload is nvme or nvme_params"),
        (not recipe.output.strip(), "output", "empty; a directory is required"),
    ]  # fmt: skip
    return [Problem(where, what) for faulty, where, what in faults if faulty]


def _resolved(recipe: Recipe) -> Recipe:
    """The same recipe with the defaults that depend on other keys written out."""
    if recipe.model.init is not None:
        return recipe
    return replace(recipe, model=replace(recipe.model, init="pretrained" if recipe.model.path else "scratch"))


