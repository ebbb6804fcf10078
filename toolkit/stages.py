"""Where a pipeline is cut: whole layers a stage, so that the slowest stage is as fast as it can be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from toolkit.model_spec import ModelSpec


def pipeline_bounds(model: ModelSpec, stages: int, seq_len: int) -> tuple[int, ...]:
    """First layer of each stage, and the number of layers, by FLOPs a token.

    The head's matrix counts with the last stage; an embedding is a lookup and costs nothing.
    """
    attention = 4.0 * model.heads * model.head_dim * seq_len
    layers = [2.0 * params + attention for params in model.layer_active_params]
    return balance(layers, stages, last=2.0 * model.vocab * model.hidden)


def even_bounds(layers: int, stages: int) -> tuple[int, ...]:
    """Bounds for layers of which nothing is known."""
    return balance([1.0] * layers, stages)


def balance(costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Bounds that make the dearest stage as cheap as possible; `first` and `last` come on top of the outer stages.

    Every stage has at least one layer.
    """
    layers = len(costs)
    assert 1 <= stages <= layers, f"{stages} stages need at least as many layers; there are {layers}"
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)

    @cache
    def best(stage: int, start: int) -> tuple[float, float, tuple[int, ...]]:
        """Dearest stage, sum of squares (evenness among equals) and bounds of the stages from here on."""
        extra = first if stage == 0 else 0.0
        if stage == stages - 1:
            own = total[layers] - total[start] + extra + last
            return own, own * own, (start, layers)
        options = []
        for end in range(start + 1, layers - (stages - stage - 1) + 1):
            own = total[end] - total[start] + extra
            dearest, squares, bounds = best(stage + 1, end)
            options.append((max(own, dearest), own * own + squares, (start, *bounds)))
        return min(options)

    return best(0, 0)[2]


def bounds_fault(bounds: Sequence[int], layers: int, stages: int) -> str | None:
    """Why bounds that someone gave can't be used; None if they can."""
    example = ", ".join(map(str, even_bounds(layers, stages)))
    if len(bounds) != stages + 1:
        return f"{len(bounds)} numbers given; {stages} stages need {stages + 1}, e.g. [{example}]"
    if bounds[0] != 0 or bounds[-1] != layers:
        return f"must run from 0 to the model's {layers} layers, e.g. [{example}]"
    if any(a >= b for a, b in zip(bounds, bounds[1:], strict=False)):
        return f"must ascend, so that every stage has a layer, e.g. [{example}]"
    return None
