"""Verify checkpoints: is every byte as it was written, and does the index describe it?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoints import store
from toolkit.checkpoints.format import INDEX, MANIFEST, faults, parse_index, read_manifest, read_small
from toolkit.errors import BadInput, Problem
from toolkit.run_dir.layout import RunDir


@dataclass(frozen=True)
class Verification:
    """What was found in one checkpoint."""

    path: Path
    problems: tuple[Problem, ...]
    """Empty: every byte is as it was written; then the numbers below are known."""
    step: int = 0
    num_files: int = 0
    size_bytes: int = 0


def verify(given: Path) -> tuple[list[Verification], list[Problem]]:
    """Verify a checkpoint, or all checkpoints of a run directory, and the pointer to the latest one.

    Returns what was found in each, and all problems with their paths.
    """
    found = [_verify_one(path) for path in _checkpoints(given)]
    problems = [
        Problem(f"{each.path.name}/{problem.where}", problem.what) for each in found for problem in each.problems
    ]
    roots = [root for root in (RunDir(given).checkpoints, given) if store.steps(root)]
    problems.extend(problem for root in roots[:1] if (problem := store.latest_fault(root)))
    return found, problems


def check(path: Path) -> list[Problem]:
    """Return every problem of one checkpoint: damaged files or, if there are none, errors in its index."""
    found = faults(path)
    if not found:
        try:
            parse_index(read_small(path / INDEX), read_manifest(path)[0])
        except BadInput as error:
            found = list(error.problems)
    return found


def _verify_one(path: Path) -> Verification:
    problems = tuple(check(path))
    if problems:
        return Verification(path, problems)
    files, step = read_manifest(path)
    return Verification(path, (), step, len(files), sum(entry.bytes for entry in files.values()))


def _checkpoints(given: Path) -> list[Path]:
    if not given.is_dir():
        raise BadInput(str(given), "no such directory; give a checkpoint or a run directory")
    if (given / MANIFEST).exists():
        return [given]
    for root in (RunDir(given).checkpoints, given):
        found = store.steps(root)
        if found:
            return [store.path_of(root, step) for step in found]
    raise BadInput(str(given), f"contains no checkpoint (no {MANIFEST}, no step-… directories)")
