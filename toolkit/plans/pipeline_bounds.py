"""Stage bounds of a pipeline: complete layers per stage, with the slowest stage as fast as possible."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from functools import lru_cache

from toolkit.models.spec import ModelSpec


@lru_cache
def pipeline_bounds(model: ModelSpec, stages: int, seq_len: int) -> tuple[int, ...]:
    """First layer of each stage, and the number of layers, balanced by FLOPs per token.

    The output matrix counts towards the last stage; an embedding is a lookup and costs nothing.
    """
    attention = 4.0 * model.heads * model.head_dim * seq_len
    layers = [2.0 * params + attention for params in model.layer_active_params]
    return balance(layers, stages, last=2.0 * model.vocab * model.hidden)


def even_bounds(layers: int, stages: int) -> tuple[int, ...]:
    """Bounds for layers of equal cost."""
    return balance([1.0] * layers, stages)


def balance(costs: Sequence[float], stages: int, *, last: float = 0.0) -> tuple[int, ...]:
    """Bounds that minimise the cost of the most expensive stage; among equals, the most even ones.

    `last` is added to the cost of the last stage. Every stage has at least one layer.
    """
    layers = len(costs)
    assert 1 <= stages <= layers, f"{stages} stages need at least as many layers; there are {layers}"
    total = list(itertools.accumulate([*costs[:-1], costs[-1] + last], initial=0.0))
    limit = _cheapest_limit(total, stages)
    earliest = _earliest_starts(total, stages, limit)
    bounds = [0]
    for stage in range(1, stages):
        start = bounds[-1]
        fair = (total[-1] - total[start]) / (stages - stage + 1)
        ends = range(max(start + 1, earliest[stage]), layers - (stages - stage) + 1)
        allowed = [end for end in ends if total[end] - total[start] <= limit]
        bounds.append(min(allowed, key=lambda end: abs(total[end] - total[start] - fair)))
    return (*bounds, layers)


def _cheapest_limit(total: Sequence[float], stages: int) -> float:
    """The lowest cost limit that every stage can meet."""
    low, high = 0.0, total[-1]
    while high - low > 1e-9 * total[-1]:
        middle = (low + high) / 2
        low, high = (low, middle) if _earliest_starts(total, stages, middle)[0] == 0 else (middle, high)
    return high


def _earliest_starts(total: Sequence[float], stages: int, limit: float) -> list[int]:
    """The earliest first layer of each stage with which it and all later stages meet the limit."""
    starts, end = [], len(total) - 1
    for stage in reversed(range(stages)):
        start = bisect.bisect_left(total, total[end] - limit)
        end = max(stage, start)  # earlier stages need a layer each
        if total[min(end + 1, len(total) - 1)] - total[end] > limit:
            return [len(total)] * stages
        starts.append(end)
    return starts[::-1]


def bounds_problem(bounds: Sequence[int], layers: int, stages: int) -> str | None:
    """Why the bounds in a recipe can't be used; None if they can."""
    example = ", ".join(map(str, even_bounds(layers, stages)))
    if len(bounds) != stages + 1:
        return f"{len(bounds)} numbers given; {stages} stages need {stages + 1}, e.g. [{example}]"
    if bounds[0] != 0 or bounds[-1] != layers:
        return f"must run from 0 to the model's {layers} layers, e.g. [{example}]"
    if any(a >= b for a, b in itertools.pairwise(bounds)):
        return f"must ascend, so that every stage has a layer, e.g. [{example}]"
    return None
