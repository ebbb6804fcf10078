"""Local files that `data.path` refers to. Imports nothing heavy, so a wrong path is reported before a run starts."""

from __future__ import annotations

import glob
import os
import re
import sysconfig
from pathlib import Path

from toolkit.errors import BadInput

TABLE_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
TEXT_FORMATS = (".txt", ".md", ".py", ".text")
IMAGE_FORMATS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_NO_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:[\w.-]+)?")


def data_files(path: str) -> list[Path] | None:
    """The files, sorted; None if the path is a hub id. Raises `BadInput` if there is nothing to read."""
    if path == "python-stdlib":
        return _stdlib()
    found = _local(path)
    if found is None:
        if _HUB_ID.fullmatch(path):
            return None
        raise BadInput("data.path", f"{path}: no such file or directory")
    files = sorted(p for p in found if p.is_file() and p.suffix in (*TABLE_FORMATS, *TEXT_FORMATS))
    if not files:
        known = ", ".join((*TEXT_FORMATS, *TABLE_FORMATS))
        raise BadInput("data.path", f"{path}: no data file found; supported types: {known}")
    unreadable = [p for p in files if not os.access(p, os.R_OK)]
    if unreadable:
        raise BadInput("data.path", f"{unreadable[0]} can't be read; check its permissions")
    if all(p.stat().st_size == 0 for p in files):
        raise BadInput("data.path", f"{path}: empty; at least one sequence of text is needed")
    return files


def image_folders(path: str) -> dict[str, list[Path]]:
    """Class → images, for a directory with one subdirectory per class; empty for any other path."""
    root = Path(path).expanduser()
    if not root.is_dir():
        return {}
    classes = {
        entry.name: sorted(p for p in entry.rglob("*") if p.suffix.lower() in IMAGE_FORMATS)
        for entry in sorted(root.iterdir())
        if entry.is_dir()
    }
    return {name: files for name, files in classes.items() if files}


def _local(path: str) -> list[Path] | None:
    if any(character in path for character in "*?["):
        return [Path(p) for p in glob.glob(path, recursive=True)]
    given = Path(path).expanduser()
    if given.is_dir():
        return list(given.rglob("*"))
    if given.is_file():
        return [given]
    return None


def _stdlib() -> list[Path]:
    """Source files of this machine's Python standard library: real text without a download."""
    found = []
    for folder, inner, names in os.walk(sysconfig.get_paths()["stdlib"]):
        inner[:] = [
            name for name in inner if name not in _NO_LIBRARY
        ]  # skip these early: they contain most of the files
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(path for path in found if path.stat().st_size)
