"""Tokenising into our cache, against `datasets.map` written by hand with as many workers, in turns.

python benchmarks/tokenising.py [--rounds 3] [--workers 2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from toolkit.data_files import data_files
from toolkit.recipe import Data
from toolkit.runtime.together import Alone
from toolkit.runtime.token_cache import TokenCache, find_or_make
from toolkit.runtime.tokenizer import HuggingFace
from toolkit.runtime.tokenizer_training import train_tokenizer

PARAGRAPH = 2000
"""Characters of a document."""


def main() -> None:
    """Print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        path = write_text(work)
        train_tokenizer(str(path), "text", 4096, work / "tokenizer")
        ratios = []
        for number in range(args.rounds):
            by_hand = hand_written(path, work, args.workers, number)
            started = time.perf_counter()
            cache = TokenCache(work / f"cache-{number}", args.workers)
            documents = find_or_make(cache, Data(), str(path), load(work), Alone())
            ours = time.perf_counter() - started
            ratios.append(by_hand / ours)
            rate = len(documents.tokens) / ours / 1e6
            print(
                f"by hand {by_hand:.1f} s, ours {ours:.1f} s ({rate:.2f} M tokens/s), ratio {ratios[-1]:.2f}",
                flush=True,
            )
    print(f"throughput of ours / datasets.map by hand: {statistics.median(ratios):.2f}")


def write_text(work: Path) -> Path:
    """The standard library's sources, in pieces."""
    files = data_files("python-stdlib")
    assert files is not None
    text = "\n".join(file.read_text(errors="replace") for file in files)
    rows = [json.dumps({"text": text[start : start + PARAGRAPH]}) for start in range(0, len(text), PARAGRAPH)]
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
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
