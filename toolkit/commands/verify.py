"""`toolkit verify`: check that every byte of a checkpoint is as it was written."""

from __future__ import annotations

import argparse
from pathlib import Path

from toolkit.errors import BadInput
from toolkit.run_dir.layout import verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a run directory to verify all of its own"
    )


def run(args: argparse.Namespace) -> int:
    """Return 0 if nothing is damaged; else raise `BadInput` that names each file and what is wrong with it."""
    found, problems = verify(args.checkpoint)
    for each in found:
        if not each.problems:
            print(f"{each.path}: intact: step {each.step}, {each.num_files} files, {each.size_bytes:,} bytes")
    if problems:
        raise BadInput(f"{args.checkpoint} is damaged", problems)
    return 0
