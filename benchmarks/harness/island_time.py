"""Where the time of islands went: which records count, and what an island did while none of its steps counted."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Span = tuple[float, float]
"""Begin and end, in seconds since 1970."""


@dataclass(frozen=True)
class Life:
    """One island: when it lived, what it recorded, and when it was stopped or cut off."""

    span: Span
    records: Sequence[Mapping[str, Any]]
    stopped: Sequence[Span] = ()
    cut: Sequence[Span] = ()


def counting(lives: Iterable[Life]) -> dict[int, Mapping[str, Any]]:
    """Step → the record that counts: the latest, because a step is done again only if its round was lost."""
    found: dict[int, Mapping[str, Any]] = {}
    for life in lives:
        for record in life.records:
            if record["time"] > found.get(record["step"], {"time": 0.0})["time"]:
                found[record["step"]] = record
    return found


def split(life: Life, counted: Mapping[int, Mapping[str, Any]], round_steps: int) -> Counter[str]:
    """Seconds of an island by what it did; they sum to its life.

    `training`: steps that count. `repeated`: steps that somebody did again. `starting`: until its first step.
    `disturbed`: stopped or cut off, as far as it did not train. `ending`: after its last step. `between steps`: the
    exchange, claims, data and checkpoints. The last step of a round contains the exchange and counts like the others.
    """
    begin, end = life.span
    if not life.records:
        return Counter({"starting": end - begin})
    usual = statistics.median(record["step_seconds"] for record in life.records)
    found: Counter[str] = Counter()
    spans = []
    for record in life.records:
        seconds = record["step_seconds"]
        span = (record["time"] - seconds, record["time"])
        held = sum(_overlap(span, stop) for stop in life.stopped)
        took = min(usual, seconds) if record["step"] % round_steps == 0 else seconds - held
        spans.append((span[1] - took, span[1]))
        found["training" if counted[record["step"]] is record else "repeated"] += took
    first, last = min(span[0] for span in spans), max(span[1] for span in spans)
    found["starting"] = max(0.0, first - begin)
    found["ending"] = max(0.0, end - last)
    found["disturbed"] = sum(_unused((max(first, a), min(last, b)), spans, cut=False) for a, b in life.stopped)
    found["disturbed"] += sum(_unused((max(first, a), min(last, b)), spans, cut=True) for a, b in life.cut)
    found["between steps"] = max(0.0, end - begin - found.total())
    return found


def _unused(away: Span, steps: Sequence[Span], *, cut: bool) -> float:
    """Seconds of an interval without training. A cut island trains on until its round ends; a stopped one can't."""
    length = max(0.0, away[1] - away[0])
    return length - (sum(_overlap(away, step) for step in steps) if cut else 0.0)


def _overlap(one: Span, other: Span) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
