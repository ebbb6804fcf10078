"""Arguments that several commands share: the recipe, its overrides and the number of processes."""

from __future__ import annotations

import argparse

from toolkit.errors import BadInput
from toolkit.recipe.file import as_mapping, load_recipe, make_recipe
from toolkit.recipe.sections import Recipe
from toolkit.resources import find_recipe
from toolkit.sessions.tiny_recipe import tiny_recipe


def add_recipe_arguments(parser: argparse.ArgumentParser, *, nproc: bool = True, optional: bool = False) -> None:
    """Add RECIPE, overrides, --tiny and --nproc. `optional`: another argument may replace RECIPE."""
    shape = {"nargs": "?"} if optional else {}
    parser.add_argument("recipe", help="recipe file, or the name of a shipped recipe", **shape)  # type: ignore[arg-type]
    parser.add_argument(
        "--tiny", action="store_true", help="use a tiny model and a few steps, in CPU processes of this machine"
    )
    add_overrides(parser)
    if nproc:
        parser.add_argument(
            "--nproc", type=positive, metavar="N", help="number of processes (default: every device of the cluster)"
        )


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add `key=value` overrides of recipe keys."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to override, parsed as YAML")


def read_recipe(args: argparse.Namespace) -> Recipe:
    """Read the recipe that the arguments name."""
    if args.recipe is None:
        raise BadInput("RECIPE", "required: a recipe file, or the name of a shipped recipe")
    path = find_recipe(args.recipe)
    if not args.tiny:
        return load_recipe(path, args.overrides)
    return make_recipe(as_mapping(tiny_recipe(load_recipe(path))), args.overrides, source=str(path))


def positive(text: str) -> int:
    """Parse an argument of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} given; at least 1 is required")
    return number
