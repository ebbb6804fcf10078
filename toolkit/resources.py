"""Paths of the files that ship with the toolkit, in a checkout and in an installed wheel alike."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
CONFIGS = _ROOT / "configs"
RECIPES = _ROOT / "recipes"


def find_recipe(name: str) -> Path:
    """Return the path of a recipe, given a path or the name of a shipped one; unchanged if neither exists."""
    given = Path(name)
    if given.exists():
        return given
    shipped = RECIPES / given.with_suffix(".yaml").name
    return shipped if shipped.exists() and given.parent in (Path(), Path("recipes")) else given
