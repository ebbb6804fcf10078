"""`toolkit export`: write a checkpoint as a Hugging Face model directory."""

from __future__ import annotations

import argparse
from pathlib import Path

from toolkit.commands.common import positive
from toolkit.run_dir.layout import best, newest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a run directory to export its newest"
    )
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="directory to create")
    parser.add_argument(
        "--best",
        type=positive,
        nargs="?",
        const=1,
        metavar="N",
        help="of a run directory, the checkpoint with the lowest loss of an evaluation, or the N-th lowest",
    )
    parser.add_argument("--merge", action="store_true", help="merge LoRA adapters into the base model")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="execute Python code that comes with the recipe's model"
    )


def run(args: argparse.Namespace) -> int:
    """Export the checkpoint."""
    checkpoint = best(args.checkpoint, args.best) if args.best else newest(args.checkpoint)
    from toolkit.runtime.checkpoint.export import export

    recipe = export(checkpoint, args.out, merge=args.merge, trust_remote_code=args.trust_remote_code)
    print(f"{checkpoint} → {args.out} ({recipe.model.precision})")
    return 0
