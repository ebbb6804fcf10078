"""`toolkit sample`: text from a run's newest checkpoint, so that people see what it learned."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from toolkit.commands.common import positive
from toolkit.run_dir.layout import newest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument(
        "run", type=Path, metavar="RUN_DIR", help="a run, whose newest checkpoint is taken, or a checkpoint"
    )
    parser.add_argument("prompt", help="what the text begins with; for chat and instruction: what the user says")
    parser.add_argument("--tokens", type=positive, default=128, metavar="N", help="most new tokens (default 128)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: the likeliest (default 0.8)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="the same seed gives the same text (default 0)"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that comes with the model of the recipe"
    )


def run(args: argparse.Namespace) -> int:
    """Print the prompt and what the model makes of it."""
    checkpoint = newest(args.run)
    with contextlib.redirect_stdout(sys.stderr):  # libraries greet on standard output, which is for the answer
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
