"""Paths of shipped files, in a checkout and in an installed wheel alike, and of this user's cache."""

from __future__ import annotations

import os
import tempfile
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


def user_cache() -> Path:
    """Return the directory for this user's caches and crash logs; it may not exist yet.

    Without a home directory (a container's user without HOME and without an entry in passwd) it is in the temporary
    directory, private to this user: another one who has created it first gets nothing to write into or to read from.
    """
    home = os.path.expanduser("~")
    if os.path.isabs(home) and os.path.isdir(home):
        return Path(home) / ".cache" / "zero-toolkit"
    path = Path(tempfile.gettempdir()) / f"zero-toolkit-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    private = found.st_uid == os.getuid() and not found.st_mode & 0o077 and not path.is_symlink()
    return path if private else Path(tempfile.mkdtemp(prefix="zero-toolkit-"))
