"""`toolkit sample`: generate text from a run's newest checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from toolkit.commands.common import positive
from toolkit.run_dir.layout import newest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "run", type=Path, metavar="RUN_DIR", help="a run directory, whose newest checkpoint is used, or a checkpoint"
    )
    parser.add_argument("prompt", help="start of the text; for chat and instruction data, the user's message")
    parser.add_argument(
        "--tokens", type=positive, default=128, metavar="N", help="largest number of new tokens (default 128)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="sampling temperature; 0 picks the likeliest token (default 0.8)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="random seed; the same seed gives the same text (default 0)"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="execute Python code that comes with the recipe's model"
    )


def run(args: argparse.Namespace) -> int:
    """Print the prompt and the text that the model generates after it."""
    checkpoint = newest(args.run)
    with contextlib.redirect_stdout(sys.stderr):  # libraries print banners; standard output is for the text
        from toolkit.runtime.generate_text import sample

        text = sample(
            checkpoint,
            args.prompt,
            tokens=args.tokens,
            temperature=args.temperature,
            seed=args.seed,
            trust_remote_code=args.trust_remote_code,
        )
    print(f"{checkpoint}", file=sys.stderr)
    print(text)
    return 0
