"""`toolkit verify`: is every byte of a checkpoint as it was written?"""

from __future__ import annotations

import argparse
from pathlib import Path

from toolkit.checkpoints import store
from toolkit.checkpoints.format import INDEX, MANIFEST, faults, parse_index, read_manifest, read_small
from toolkit.errors import BadInput, Problem
from toolkit.run_dir.layout import RunDir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a run directory: all of its"
    )


def run(args: argparse.Namespace) -> int:
    """0 if all is whole; `BadInput` that names each file and what is wrong with it."""
    problems: list[Problem] = []
    for path in _checkpoints(args.checkpoint):
        found = check(path)
        problems.extend(Problem(f"{path.name}/{fault.where}", fault.what) for fault in found)
        if not found:
            files, step = read_manifest(path)
            size = sum(entry.bytes for entry in files.values())
            print(f"{path}: whole: step {step}, {len(files)} files, {size:,} bytes")
    roots = [root for root in (RunDir(args.checkpoint).checkpoints, args.checkpoint) if store.steps(root)]
    problems.extend(fault for root in roots[:1] if (fault := store.latest_fault(root)))
    if problems:
        raise BadInput(f"{args.checkpoint} is damaged", problems)
    return 0


def check(path: Path) -> list[Problem]:
    """Every fault of one checkpoint: bytes first, and only if they are whole what they say."""
    found = faults(path)
    if not found:
        try:
            parse_index(read_small(path / INDEX), read_manifest(path)[0])
        except BadInput as error:
            found = list(error.problems)
    return found


def _checkpoints(given: Path) -> list[Path]:
    if not given.is_dir():
        raise BadInput(str(given), "no such directory; give a checkpoint or a run directory")
    if (given / MANIFEST).exists():
        return [given]
    for root in (RunDir(given).checkpoints, given):
        found = store.steps(root)
        if found:
            return [store.path_of(root, step) for step in found]
    raise BadInput(str(given), f"holds no checkpoint (no {MANIFEST}, no step-… directories)")
