"""Two ways of doing the same, in turn and in one run: a steady ratio from a machine that is never quite quiet."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Block = Callable[[], float]
"""Does some work; the seconds that count of it."""
RESAMPLES = 4000


@dataclass(frozen=True)
class Ratio:
    """The median over pairs, and where it lies with 95% confidence (bootstrap over pairs)."""

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.4f} (95%: {self.low:.4f} to {self.high:.4f}, {self.pairs} pairs)"


def in_turn(
    first: Block, second: Block, seconds: float, agree: Callable[[bool], bool] = lambda going_on: going_on
) -> list[tuple[float, float]]:
    """Pairs of blocks until the time is up; who begins alternates, so that what drifts does not count.

    `agree` collects from each process whether it would continue, and returns one answer to all of them.
    """
    first(), second()  # caches fill
    pairs: list[tuple[float, float]] = []
    began = time.perf_counter()
    while agree(time.perf_counter() - began < seconds or not pairs):
        if len(pairs) % 2:
            b, a = second(), first()
        else:
            a, b = first(), second()
        pairs.append((a, b))
    return pairs


def ratio(pairs: Sequence[tuple[float, float]], seed: int = 0) -> Ratio:
    """Of the first over the second."""
    found = [a / b for a, b in pairs]
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(found, k=len(found))) for _ in range(RESAMPLES))
    low, high = medians[RESAMPLES // 40], medians[-RESAMPLES // 40]
    return Ratio(statistics.median(found), low, high, len(found))
