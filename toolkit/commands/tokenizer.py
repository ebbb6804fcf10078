"""`toolkit tokenizer train`: a byte-level BPE tokenizer from local text."""

from __future__ import annotations

import argparse
from pathlib import Path

from toolkit.commands.common import positive
from toolkit.errors import BadInput
from toolkit.recipe.data_files import data_files

LEAST_VOCAB = 261
"""All bytes, and the special tokens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    train = actions.add_parser("train", help="learn a vocabulary from text", description="learn a vocabulary from text")
    train.add_argument("path", help="file, glob or directory, as data.path takes it")
    train.add_argument("out", type=Path, help="directory to make; data.tokenizer takes it")
    train.add_argument("--vocab", type=positive, default=8192, metavar="N", help="tokens (default 8192)")
    train.add_argument(
        "--text-column", default="text", metavar="NAME", help="in files that have columns (default text)"
    )


def run(args: argparse.Namespace) -> int:
    """Learn and save."""
    if args.vocab < LEAST_VOCAB:
        raise BadInput(
            "--vocab", f"{args.vocab} given; at least {LEAST_VOCAB} are required: all bytes and special tokens"
        )
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise BadInput(str(args.out), "already exists and is not empty; choose another directory")
    if data_files(args.path) is None:
        raise BadInput(args.path, "no such file or directory; a tokenizer is learned from local text")
    from toolkit.runtime.corpus.tokenizer import train_tokenizer

    learned = train_tokenizer(args.path, args.text_column, args.vocab, args.out)
    print(f"{learned.tokens:,} tokens, {learned.bytes_per_token:.2f} bytes of the text each → {args.out}")
    return 0
