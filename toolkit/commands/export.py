"""`toolkit export`: a checkpoint as a Hugging Face directory."""

from __future__ import annotations

import argparse
from pathlib import Path

from toolkit.run_dir.layout import newest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a run: its newest")
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="directory to make")
    parser.add_argument("--merge", action="store_true", help="LoRA: merge the adapters into the base")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that comes with the model of the recipe"
    )


def run(args: argparse.Namespace) -> int:
    """Write the directory."""
    checkpoint = newest(args.checkpoint)
    from toolkit.runtime.checkpoint.export import export

    recipe = export(checkpoint, args.out, merge=args.merge, trust_remote_code=args.trust_remote_code)
    print(f"{checkpoint} → {args.out} ({recipe.model.precision})")
    return 0
