"""What routers do, in figures: how evenly each layer spreads its tokens over experts, and advice if it does not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

COLLAPSED = 4.0
"""A layer whose busiest expert has this many times the mean load has collapsed: most of its experts learn nothing.
Layers with few experts can't reach it: eight, of which each token visits two, end at 4 (see `_limit`)."""
HEADER = 4
"""Numbers before the loads in a step's figures: layers, added loss, balancing loss, dropped visits."""

Loads = list[list[float]]
"""Tokens of each expert, layer by layer."""


def loads_of(figures: Sequence[float]) -> Loads:
    """The loads in a step's figures; layers that were not counted are left out."""
    layers = int(figures[0]) if figures else 0
    if not layers:
        return []
    width = (len(figures) - HEADER) // layers
    rows = [list(figures[HEADER + layer * width : HEADER + (layer + 1) * width]) for layer in range(layers)]
    return [row for row in rows if sum(row) > 0]


def summarise(figures: Sequence[float]) -> dict[str, float] | None:
    """Figures of a step for metrics.jsonl; None for dense models."""
    loads = loads_of(figures)
    if not loads:
        return None
    return {
        "loss": figures[1],
        "balance": figures[2],
        "entropy": sum(map(entropy, loads)) / len(loads),
        "max_over_mean": max(map(max_over_mean, loads)),
        "dead_experts": float(sum(load == 0 for row in loads for load in row)),
        "experts": float(sum(map(len, loads))),
        "layers": float(len(loads)),
        "dropped": figures[3] / sum(map(sum, loads)),
    }


def shares(loads: Loads) -> Loads:
    """Loads relative to their layer's mean, for the heat map: 1 is even."""
    return [[round(load * len(row) / sum(row), 4) for load in row] for row in loads]


def entropy(row: Sequence[float]) -> float:
    """Of a layer's load, relative to that of an even one: 1 is even, 0 is a single expert."""
    total = sum(row)
    parts = [load / total for load in row if load > 0]
    return -sum(part * math.log(part) for part in parts) / math.log(len(row)) if len(row) > 1 else 1.0


def max_over_mean(row: Sequence[float]) -> float:
    """Load of the busiest expert over the mean."""
    return max(row) * len(row) / sum(row)


def recovered(found: Mapping[str, Any] | None) -> bool:
    """Whether routers are far from collapse: a load near the limit would otherwise be reported again and again."""
    return not found or float(found.get("max_over_mean", 0.0)) < (1 + _limit(found)) / 2


def _limit(found: Mapping[str, Any]) -> float:
    """Load over the mean from which on a layer has collapsed: at most 1 + a quarter of its experts."""
    layers = float(found.get("layers", 0.0))
    return min(COLLAPSED, 1 + float(found.get("experts", 0.0)) / layers / 4) if layers else COLLAPSED


def advice(found: Mapping[str, Any] | None) -> str:
    """A sentence about a step's figures if routers have collapsed; empty if they have not."""
    if not found:
        return ""
    busiest, dead, experts = (float(found.get(name, 0.0)) for name in ("max_over_mean", "dead_experts", "experts"))
    if busiest < _limit(found) and dead < experts / 4:
        return ""
    facts = f"the busiest expert of a layer has {busiest:.1f} times the mean load, and {dead:.0f} of {experts:.0f} "
    return (
        f"routing has collapsed: {facts}experts had no token in this step; set train.router.loss: sequence, a larger "
        "train.router.weight, or train.router.bias_update if the router has a bias"
    )
