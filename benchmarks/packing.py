"""Packing on log-normal lengths: useful share of positions, and tokens per second on one core.

python benchmarks/packing.py
"""

from __future__ import annotations

import time

import numpy as np

from toolkit.runtime.corpus.token_documents import Documents
from toolkit.runtime.data.packing import BestFit, cut

SEQ_LEN, DOCUMENTS, MEDIAN, SIGMA, REPEATS = 2048, 10_000, 350, 1.0, 5


def main() -> None:
    """Print both."""
    lengths = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, DOCUMENTS)
    lengths = np.maximum(2, lengths).astype(np.int64)
    documents = Documents(np.zeros(lengths.sum(), np.int32), np.concatenate([[0], np.cumsum(lengths)]))
    seconds, batch_seconds = [], []
    for _ in range(REPEATS):
        started = time.perf_counter()
        pieces = cut(documents, np.arange(len(documents)), SEQ_LEN, "split")
        packed = BestFit.pack(documents, pieces, SEQ_LEN, pad=0)
        seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
        for start in range(0, len(packed) - 16, 16):
            packed.batch(np.arange(start, start + 16))
        batch_seconds.append(time.perf_counter() - started)
    tokens = int(lengths.sum())
    print(f"{DOCUMENTS:,} documents, {tokens:,} tokens → {len(packed):,} sequences of {SEQ_LEN}")
    print(f"useful positions: {packed.positions_used / packed.positions:.3%}")
    print(f"packing: {tokens / min(seconds) / 1e6:,.0f} M tokens/s (best of {REPEATS})")
    print(f"batches of 16 sequences: {tokens / min(batch_seconds) / 1e6:,.0f} M tokens/s")


if __name__ == "__main__":
    main()
