"""Where the files that ship with the toolkit are: the same in a checkout and in an installed wheel."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
CONFIGS = _ROOT / "configs"
RECIPES = _ROOT / "recipes"


def find_recipe(name: str) -> Path:
    """A recipe by path, or by name among those that ship with the toolkit."""
    given = Path(name)
    if given.exists():
        return given
    shipped = RECIPES / given.with_suffix(".yaml").name
    return shipped if shipped.exists() and given.parent in (Path(), Path("recipes")) else given
