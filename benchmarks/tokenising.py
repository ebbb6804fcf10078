"""Tokenising into our cache, against `datasets.map` written by hand with as many workers, in turns.

python -m benchmarks.tokenising [--seconds 80] [--workers 2]
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.paired import in_turn, ratio
from toolkit.recipe.data_files import data_files
from toolkit.recipe.sections import Data
from toolkit.runtime.corpus.token_cache import TokenCache, find_or_make
from toolkit.runtime.corpus.tokenizer import HuggingFace, train_tokenizer
from toolkit.runtime.distributed.rank_zero_first import SingleProcess

PARAGRAPH, CHARACTERS = 2000, 8_000_000
"""Of a document, and of all."""


def main() -> None:
    """Print the ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        path = write_text(work)
        train_tokenizer(str(path), "text", 4096, work / "tokenizer")
        numbers = itertools.count()
        pairs = in_turn(
            lambda: hand_written(path, work, args.workers, next(numbers)),
            lambda: ours(path, work, args.workers, next(numbers)),
            args.seconds,
        )
    found = ratio(pairs)
    print(f"throughput of ours / datasets.map by hand: {found}")
    print(json.dumps(asdict(found)))


def ours(path: Path, work: Path, workers: int, number: int) -> float:
    """Seconds of a cold cache."""
    tokenizer, root = load(work), work / f"cache-{number}"
    started = time.perf_counter()
    find_or_make(TokenCache(root, workers), Data(), str(path), tokenizer, SingleProcess())
    seconds = time.perf_counter() - started
    shutil.rmtree(root)
    return seconds


def write_text(work: Path) -> Path:
    """The standard library's sources, in pieces."""
    files = data_files("python-stdlib")
    assert files is not None
    text = "\n".join(file.read_text(errors="replace") for file in files)
    rows = [
        json.dumps({"text": text[start : start + PARAGRAPH]})
        for start in range(0, min(len(text), CHARACTERS), PARAGRAPH)
    ]
    path = work / "text.jsonl"
    path.write_text("\n".join(rows) + "\n")
    return path


def load(work: Path) -> HuggingFace:
    """A fresh tokenizer: one that has run threads would not be forked well."""
    from transformers import AutoTokenizer

    return HuggingFace(AutoTokenizer.from_pretrained(str(work / "tokenizer")))


def hand_written(path: Path, work: Path, workers: int, number: int) -> float:
    """Seconds of what anybody would write."""
    import datasets

    datasets.disable_progress_bars()
    tokenizer = load(work).tokenizer
    started = time.perf_counter()
    rows = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(work / f"by-hand-{number}"))
    rows.map(
        lambda batch: {"input_ids": [[*ids, tokenizer.eos_token_id] for ids in tokenizer(batch["text"])["input_ids"]]},
        batched=True,
        remove_columns=["text"],
        num_proc=workers,
        load_from_cache_file=False,
    )
    seconds = time.perf_counter() - started
    shutil.rmtree(work / f"by-hand-{number}")
    return seconds


if __name__ == "__main__":
    main()
