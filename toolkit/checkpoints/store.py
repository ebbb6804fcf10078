"""The directory of checkpoints: list, commit atomically, prune, and set damaged ones aside."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from toolkit.checkpoints.format import (
    MANIFEST,
    FileEntry,
    canonical_json,
    directory_name,
    dump_manifest,
    read_small,
    sha256,
    step_of,
)
from toolkit.errors import BadInput, Problem
from toolkit.units import GB

LATEST = "latest"
BEST = "best"
_WORK = (".writing-", ".old-")
"""Prefixes of directories that are being written or removed; the next save clears what a crash leaves."""


def steps(root: Path) -> list[int]:
    """Steps of all checkpoints, newest first, including damaged ones."""
    if not root.is_dir():
        return []
    found = (step_of(entry.name) for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False))
    return sorted((step for step in found if step is not None), reverse=True)


def path_of(root: Path, step: int) -> Path:
    """Path of the checkpoint of a step."""
    return root / directory_name(step)


def begin(root: Path, step: int, need_bytes: int) -> Path:
    """Create an empty directory to write into; raises `BadInput` if the disk has less than `need_bytes` free."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        clear_leftovers(root)
        free = shutil.disk_usage(root).free
        if free < need_bytes:
            raise BadInput(
                str(root),
                f"a checkpoint needs {need_bytes / GB:.3f} GB and {free / GB:.3f} GB are free; "
                "free some space, or lower checkpoint.keep",
            )
        path = root / f".writing-{directory_name(step)}"
        path.mkdir()
    except OSError as error:
        raise BadInput(str(root), f"can't be written: {error.strerror}") from None
    return path


def clear_leftovers(root: Path) -> None:
    """Remove checkpoints that a crash left half-written or half-removed."""
    for entry in list(os.scandir(root)):
        if entry.name.startswith(_WORK):
            shutil.rmtree(entry.path, ignore_errors=True)


def commit(writing: Path, files: dict[str, FileEntry], step: int) -> Path:
    """Write the manifest, rename the directory, update `latest`: the checkpoint appears atomically."""
    root = writing.parent
    missing = [name for name in files if not (writing / name).is_file()]
    if missing:
        raise BadInput(
            str(root),
            f"{missing[0]} was written by another host and is not visible here; checkpoints need a shared directory",
        )
    write_synced(writing / MANIFEST, dump_manifest(files, step))
    sync_directory(writing)
    final = path_of(root, step)
    set_aside(final)
    os.rename(writing, final)
    sync_directory(root)
    point_to(root, final)
    return final


def point_to(root: Path, final: Path) -> None:
    """Replace `latest`, which holds the name of the newest checkpoint and the hash of its manifest."""
    text = canonical_json({"checkpoint": final.name, "manifest_sha256": sha256(final / MANIFEST)})
    temporary = root / f".{LATEST}.tmp"
    write_synced(temporary, text)
    os.replace(temporary, root / LATEST)
    sync_directory(root)


def latest_problem(root: Path) -> Problem | None:
    """The problem with `latest`, if there is one. The toolkit does not depend on it, but other tools may."""
    try:
        given = json.loads(read_small(root / LATEST))
        manifest = root / given["checkpoint"] / MANIFEST
        if step_of(given["checkpoint"]) is None or sha256(manifest) != given["manifest_sha256"]:
            raise ValueError("it does not name a checkpoint with that manifest")
        if canonical_json(given) != read_small(root / LATEST):
            raise ValueError("its bytes changed")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return Problem(LATEST, f"is damaged: {error}; the newest intact checkpoint is found without it")
    return None


def set_aside(path: Path) -> Path | None:
    """Rename a damaged checkpoint so that nothing loads it, and return the new path; None if there is none."""
    if not path.exists():
        return None
    for number in range(1, 1000):
        aside = path.with_name(f"damaged-{path.name}-{number}")
        if not aside.exists():
            os.rename(path, aside)
            sync_directory(path.parent)
            return aside
    raise BadInput(str(path.parent), "contains 1000 damaged checkpoints; remove them")


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and the best ones, each atomically."""
    spared = all_best(root)
    for step in steps(root)[keep:]:
        if step not in spared:
            remove(root, step)


def mark_best(root: Path, step: int, loss: float, keep: int = 1) -> None:
    """Mark a checkpoint by its loss on held-out data; of all marked ones the best `keep` stay. Pruning keeps them."""
    found = [(known, other) for known, other in _marked(root) if other != step and path_of(root, other).is_dir()]
    found = sorted([*found, (loss, step)])[:keep]
    first, *others = [{"checkpoint": directory_name(other), "eval_loss": known} for known, other in found]
    temporary = root / f".{BEST}.tmp"
    write_synced(temporary, canonical_json({**first, "others": others} if others else first))
    os.replace(temporary, root / BEST)


def all_best(root: Path) -> list[int]:
    """Steps of the marked checkpoints that exist, the best first."""
    return [step for _, step in _marked(root) if path_of(root, step).is_dir()]


def best(root: Path) -> int | None:
    """Step of the best checkpoint; None if none is marked or it is gone."""
    return next(iter(all_best(root)), None)


def _marked(root: Path) -> list[tuple[float, int]]:
    """(loss, step) of the marked checkpoints, the best first; nothing if the file is missing or damaged."""
    try:
        first = json.loads(read_small(root / BEST))
        found = [
            (float(one["eval_loss"]), step_of(str(one["checkpoint"]))) for one in (first, *first.get("others", ()))
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    return [(loss, step) for loss, step in found if step is not None]


def remove(root: Path, step: int) -> None:
    """Remove one checkpoint: rename it first, so that no half-removed one remains visible."""
    trash = root / f".old-{directory_name(step)}"
    os.rename(path_of(root, step), trash)
    shutil.rmtree(trash, ignore_errors=True)


def write_synced(path: Path, data: bytes) -> None:
    """Write a small file and sync it to disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Sync the entries of a directory to disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
