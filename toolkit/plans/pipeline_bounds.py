"""Stage bounds of a pipeline: complete layers per stage, with the slowest stage as fast as possible."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence
from functools import lru_cache

from toolkit.models.spec import ModelSpec
from toolkit.plans.pipeline_orders import V_CHUNKS, rank_of


@lru_cache
def pipeline_bounds(
    model: ModelSpec, pp: int, seq_len: int, schedule: str = "1f1b", chunks: int = 1
) -> tuple[int, ...]:
    """First layer of each stage, and the number of layers, balanced by FLOPs per token.

    The output matrix counts towards the last stage; an embedding is a lookup and costs nothing.
    """
    layers = layer_flops(model, seq_len)
    head = 2.0 * model.vocab * model.hidden
    if chunks == 1 or model.encoder_layers:  # decoder layers take longer than an encoder's
        return balance(layers, pp * chunks, last=head)
    return balance_ranks(len(layers), head * len(layers) / sum(layers), schedule, pp, chunks)


def layer_flops(model: ModelSpec, seq_len: int) -> list[float]:
    """FLOPs per token of each layer; the layers after an encoder attend to its output, too."""
    attention = 4.0 * model.heads * model.head_dim * seq_len
    alone = model.encoder_layers or model.layers
    scores = [attention if number < alone else 2 * attention for number in range(model.layers)]
    return [2.0 * params + each for params, each in zip(model.layer_active_params, scores, strict=True)]


SHARED_BIAS = ("t5", "mt5")
"""Types whose first encoder and first decoder layer make a bias of attention scores that the layers after them use."""


def crossing(model: ModelSpec, bound: int, micro_batch: int, seq_len: int) -> float:
    """What crosses the boundary before a layer, relative to the hidden states of a micro-batch.

    After an encoder its output alone; in a decoder it passes on beside the hidden states.
    """
    after = bound - model.encoder_layers
    if not model.encoder_layers or after == 0:
        return 1.0
    bias = model.heads * seq_len / (micro_batch * model.hidden) if model.model_type in SHARED_BIAS else 0.0
    return (1.0 if after < 0 else 2.0) + bias


def balance_ranks(layers: int, head: float, schedule: str, pp: int, chunks: int) -> tuple[int, ...]:
    """Bounds that even out the work of the ranks, each of which has several stages.

    `head`: cost of the output head, in layers. Layers count alike. The next layer always goes to the rank with the
    least work, into its shortest stage; of several, the last one, which keeps activations for the shortest time.
    """
    stages = [1] * (pp * chunks)
    own: list[list[int]] = [[] for _ in range(pp)]
    for stage in range(pp * chunks):
        own[rank_of(schedule, pp, stage)].append(stage)
    work = [(float(chunks), rank) for rank in range(pp)]
    last = rank_of(schedule, pp, pp * chunks - 1)
    work[last] = (chunks + head, last)
    heapq.heapify(work)
    for _ in range(layers - pp * chunks):
        load, rank = heapq.heappop(work)
        stages[min(own[rank], key=lambda stage: (stages[stage], -stage))] += 1
        heapq.heappush(work, (load + 1, rank))
    return tuple(itertools.accumulate(stages, initial=0))


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


def chunks_problem(layers: int, pp: int | None, schedule: str | None, chunks: int | None) -> tuple[str, str] | None:
    """The recipe key and reason if a schedule and its chunks per rank can't be used; None if they can.

    `pp`, `schedule` and `chunks`: as the recipe fixes them, None where it does not.
    """
    if pp == 1 and (schedule not in (None, "1f1b") or (chunks or 1) > 1):
        key = "strategy.schedule" if schedule not in (None, "1f1b") else "strategy.chunks"
        return key, f"{schedule or chunks} given; needs a pipeline: set strategy.pp above 1, or leave it out"
    if schedule is None and chunks is None:
        return None
    required = {"1f1b": "1", "zero_bubble": str(V_CHUNKS), "interleaved": "2 or more"}.get(schedule or "")
    if chunks is None:
        least = 1 if schedule == "1f1b" else V_CHUNKS
        if schedule != "1f1b" and (pp or 2) * least > layers:
            return "strategy.schedule", f"{schedule} needs {(pp or 2) * least} layers; the model has {layers}; use 1f1b"
        return None
    if required and (required != str(chunks) if required in ("1", str(V_CHUNKS)) else chunks < V_CHUNKS):
        return "strategy.chunks", f"{chunks} given; schedule {schedule} requires {required}"
    even = [number for number in range(1, layers + 1) if layers % number == 0]
    # Of a prime number of layers, two chunks per rank are as even as can be.
    usable = [number for number in ({1, 2} if len(even) == 2 else even) if number * (pp or 1) <= layers]
    if chunks in usable:
        return None
    nearest = sorted(usable, key=lambda number: (abs(number - chunks), number))[:2]
    where = f" with at least one layer on each of {pp} ranks" if pp else ""
    return (
        "strategy.chunks",
        f"{chunks} given; must divide the model's {layers} layers{where}; use {' or '.join(map(str, sorted(nearest)))}",
    )


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
