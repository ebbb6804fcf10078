"""Update rules in plain torch: equal on every device and under every ZeRO stage.

LAMB and LARS scale each layer's update by norms of that layer. A sharded optimizer holds flat pieces of many layers.
`Layers` knows which piece belongs to which layer, and sums norms over the ranks that hold the other pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from toolkit.recipe.sections import Train

TRUST = 0.001
"""LARS: size of one update at learning rate 1 relative to the layer's norm (You et al. 2017)."""
Sum = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Span:
    """The elements of a layer inside a tensor that the optimizer updates."""

    layer: int
    start: int
    stop: int


@dataclass(frozen=True)
class Layers:
    """Which elements of the optimizer's tensors form a layer."""

    spans: Mapping[torch.Tensor, Sequence[Span]] = field(default_factory=dict)
    """Spans of flattened tensors that hold pieces of layers; empty if every tensor is one complete layer."""
    count: int = 0
    """Number of layers in the model."""
    sum_over_ranks: Sum = lambda squares: squares
    """Sums over the ranks that hold the other pieces. Collective."""

    def norms(self, owner: torch.Tensor, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Norms of every layer: one row for each of `values`, which are laid out like `owner`."""
        if not self.spans:
            return torch.stack([torch.linalg.vector_norm(value).reshape(1) for value in values])
        squares = torch.zeros(len(values), self.count, device=owner.device)
        for row, value in enumerate(values):
            for span in self.spans.get(owner, ()):
                piece = value.view(-1)[span.start : span.stop]
                squares[row, span.layer] = torch.linalg.vector_norm(piece).square()
        return self.sum_over_ranks(squares).sqrt()

    def scale(self, owner: torch.Tensor, value: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Multiply each layer's elements of `value` by its factor, in place."""
        if not self.spans:
            return value.mul_(factors[0])
        for span in self.spans.get(owner, ()):
            value.view(-1)[span.start : span.stop].mul_(factors[span.layer])
        return value


State = dict[str, Any]
"""States of one tensor by name."""
Rule = Callable[[torch.Tensor, torch.Tensor, State, Train, Layers], torch.Tensor]
"""(weight, gradient, optimizer state, settings, layers) → what to subtract at learning rate 1."""


def lion(weight: torch.Tensor, grad: torch.Tensor, state: State, train: Train, layers: Layers) -> torch.Tensor:
    """Lion (Chen et al. 2023): the sign of a moment, with decoupled weight decay; element-wise."""
    (first, second), moment = train.betas, kept(state, "exp_avg", weight)
    change = moment.mul(first).add_(grad, alpha=1 - first).sign_().add_(weight, alpha=train.weight_decay)
    moment.mul_(second).add_(grad, alpha=1 - second)
    return change


def adamw(
    weight: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], train: Train, layers: Layers
) -> torch.Tensor:
    """AdamW (Loshchilov and Hutter 2019); element-wise."""
    first, second = train.betas
    mean, square = kept(state, "exp_avg", weight), kept(state, "exp_avg_sq", weight)
    state["step"] = int(state.get("step", 0)) + 1
    mean.mul_(first).add_(grad, alpha=1 - first)
    square.mul_(second).addcmul_(grad, grad, value=1 - second)
    root = square.div(1 - second ** state["step"]).sqrt_().add_(train.eps)
    return mean.div(1 - first ** state["step"]).div_(root).add_(weight, alpha=train.weight_decay)


def lamb(weight: torch.Tensor, grad: torch.Tensor, state: State, train: Train, layers: Layers) -> torch.Tensor:
    """LAMB (You et al. 2020): Adam's update, rescaled to the norm of its layer's weights."""
    change = adamw(weight, grad, state, train, layers)
    size, length = layers.norms(weight, [weight, change])
    factors = torch.where((size > 0) & (length > 0), size / length, torch.ones_like(size))
    return layers.scale(weight, change, factors)


def lars(weight: torch.Tensor, grad: torch.Tensor, state: State, train: Train, layers: Layers) -> torch.Tensor:
    """LARS (You et al. 2017): SGD with momentum, with updates proportional to each layer's norm."""
    momentum, decay = kept(state, "momentum_buffer", weight), train.weight_decay
    size, steep = layers.norms(weight, [weight, grad])
    factors = TRUST * size / (steep + decay * size)
    factors = torch.where((size > 0) & (steep > 0), factors, torch.ones_like(size))
    change = layers.scale(weight, grad.add(weight, alpha=decay), factors)
    return momentum.mul_(train.betas[0]).add_(change)


def adopt(weight: torch.Tensor, grad: torch.Tensor, state: State, train: Train, layers: Layers) -> torch.Tensor:
    """ADOPT (Taniguchi et al. 2024): as Adam, but divides by the second moment of the steps before; element-wise.

    The first step only begins the second moment. Ratios are limited to ⁴√step, as in the authors' code.
    """
    first, second = train.betas
    step = int(state.get("step", 0))
    mean, square = kept(state, "exp_avg", weight), kept(state, "exp_avg_sq", weight)
    state["step"] = step + 1
    if step == 0:
        square.copy_(grad.square())
        return torch.zeros_like(weight)
    ratio = grad.div(square.sqrt().clamp_(min=train.eps)).clamp_(-(step**0.25), step**0.25)
    mean.mul_(first).add_(ratio, alpha=1 - first)
    square.mul_(second).addcmul_(grad, grad, value=1 - second)
    return mean.add(weight, alpha=train.weight_decay)


RULES: dict[str, Rule] = {"lion": lion, "lamb": lamb, "lars": lars, "adopt": adopt}


def kept(state: dict[str, Any], name: str, like: torch.Tensor) -> torch.Tensor:
    """A state of a tensor, zero at first."""
    if name not in state:
        state[name] = torch.zeros_like(like, memory_format=torch.preserve_format)
    found: torch.Tensor = state[name]
    return found
