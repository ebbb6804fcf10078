"""`toolkit tokenizer train`: train a byte-level BPE tokenizer on local text."""

from __future__ import annotations

import argparse
from pathlib import Path

from toolkit.commands.common import positive
from toolkit.errors import BadInput
from toolkit.recipe.data_files import data_files

LEAST_VOCAB = 261
"""All 256 bytes and the special tokens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    train = actions.add_parser("train", help="train a tokenizer on text", description="train a tokenizer on text")
    train.add_argument("path", help="file, glob or directory, as in data.path")
    train.add_argument("out", type=Path, help="directory to create, for use as data.tokenizer")
    train.add_argument(
        "--vocab", type=positive, default=8192, metavar="N", help="vocabulary size in tokens (default 8192)"
    )
    train.add_argument(
        "--text-column",
        default="text",
        metavar="NAME",
        help="column with the text, in files that have columns (default text)",
    )


def run(args: argparse.Namespace) -> int:
    """Train the tokenizer and save it."""
    if args.vocab < LEAST_VOCAB:
        raise BadInput(
            "--vocab", f"{args.vocab} given; at least {LEAST_VOCAB} are required: all bytes and special tokens"
        )
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise BadInput(str(args.out), "already exists and is not empty; choose another directory")
    if data_files(args.path) is None:
        raise BadInput(args.path, "no such file or directory; a tokenizer is trained on local text")
    from toolkit.runtime.corpus.tokenizer import train_tokenizer

    trained = train_tokenizer(args.path, args.text_column, args.vocab, args.out)
    print(f"{trained.tokens:,} tokens, {trained.bytes_per_token:.2f} bytes of text per token → {args.out}")
    return 0
