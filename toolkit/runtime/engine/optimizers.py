"""Lion, LAMB and LARS in plain torch: equal on every device and under every ZeRO stage.

LAMB and LARS scale each layer's update by norms of that layer. A sharded optimizer holds flat pieces of many layers.
`Layers` knows which piece belongs to which layer, and sums norms over the ranks that hold the other pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from toolkit.recipe.sections import Train
from toolkit.runtime.engine.onebit_adam import OneBitAdam

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


class LayerwiseOptimizer(torch.optim.Optimizer):
    """An optimizer from an update rule that may need norms of layers.

    `step` does nothing before `begin`: DeepSpeed 0.19.8 takes a step with zero gradients when it creates some of its
    optimizers (see `deepspeed_fixups.undo_first_step`).
    """

    def __init__(self, parameters: Iterable[torch.Tensor], rule: Rule, train: Train, lr: float) -> None:
        self._rule, self._train = rule, train
        self._layers: Layers | None = None
        super().__init__(parameters, {"lr": lr, "weight_decay": train.weight_decay})

    def begin(self, layers: Layers) -> None:
        """Take steps from now on."""
        self._layers = layers

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every tensor that has a gradient."""
        if self._layers is None:
            return
        for group in self.param_groups:
            train = replace(self._train, weight_decay=float(group["weight_decay"]))
            for weight in group["params"]:
                if weight.grad is not None:
                    change = self._rule(weight, weight.grad, self.state[weight], train, self._layers)
                    weight.sub_(change, alpha=float(group["lr"]))


Rule = Callable[[torch.Tensor, torch.Tensor, dict[str, Any], Train, Layers], torch.Tensor]
"""(weight, gradient, optimizer state, settings, layers) → what to subtract at learning rate 1."""


def lion(weight: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], train: Train, layers: Layers) -> torch.Tensor:
    """Lion (Chen et al. 2023): the sign of a moment, with decoupled weight decay; element-wise."""
    (first, second), moment = train.betas, _kept(state, "exp_avg", weight)
    change = moment.mul(first).add_(grad, alpha=1 - first).sign_().add_(weight, alpha=train.weight_decay)
    moment.mul_(second).add_(grad, alpha=1 - second)
    return change


def lamb(weight: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], train: Train, layers: Layers) -> torch.Tensor:
    """LAMB (You et al. 2020): Adam's update, rescaled to the norm of its layer's weights."""
    first, second = train.betas
    mean, square = _kept(state, "exp_avg", weight), _kept(state, "exp_avg_sq", weight)
    state["step"] = int(state.get("step", 0)) + 1
    mean.mul_(first).add_(grad, alpha=1 - first)
    square.mul_(second).addcmul_(grad, grad, value=1 - second)
    root = square.div(1 - second ** state["step"]).sqrt_().add_(train.eps)
    change = mean.div(1 - first ** state["step"]).div_(root).add_(weight, alpha=train.weight_decay)
    size, length = layers.norms(weight, [weight, change])
    factors = torch.where((size > 0) & (length > 0), size / length, torch.ones_like(size))
    return layers.scale(weight, change, factors)


def lars(weight: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], train: Train, layers: Layers) -> torch.Tensor:
    """LARS (You et al. 2017): SGD with momentum, with updates proportional to each layer's norm."""
    momentum, decay = _kept(state, "momentum_buffer", weight), train.weight_decay
    size, steep = layers.norms(weight, [weight, grad])
    factors = TRUST * size / (steep + decay * size)
    factors = torch.where((size > 0) & (steep > 0), factors, torch.ones_like(size))
    change = layers.scale(weight, grad.add(weight, alpha=decay), factors)
    return momentum.mul_(train.betas[0]).add_(change)


RULES: dict[str, Rule] = {"lion": lion, "lamb": lamb, "lars": lars}


Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


def own_optimizer(train: Train, config: dict[str, Any]) -> tuple[Make | None, dict[str, Any]]:
    """(factory of the optimizer if it is one of ours, DeepSpeed config to use with it)."""
    lr = float(config["optimizer"]["params"]["lr"])
    rest = {key: value for key, value in config.items() if key != "optimizer"}
    if train.optimizer == "onebit_adam":
        return (lambda parameters: OneBitAdam(parameters, train, lr)), rest
    rule = RULES.get(train.optimizer)
    if rule is None:
        return None, config
    return (lambda parameters: LayerwiseOptimizer(parameters, rule, train, lr)), rest


def _kept(state: dict[str, Any], name: str, like: torch.Tensor) -> torch.Tensor:
    if name not in state:
        state[name] = torch.zeros_like(like, memory_format=torch.preserve_format)
    kept: torch.Tensor = state[name]
    return kept
