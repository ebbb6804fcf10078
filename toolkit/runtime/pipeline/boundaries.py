"""Boundaries between stages: stand-ins for other stages' layers, and how values enter and leave a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from toolkit.runtime.sharding.token_shards import wrap_call

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


class Cut(Exception):
    """Carries the values that cross a boundary out of the model's forward pass."""

    def __init__(self, arguments: Arguments) -> None:
        super().__init__("the stage ends here")
        self.arguments = arguments


class StandIn(torch.nn.Module):
    """Replaces a layer of another stage: it has the layer's plain attributes and no parameters."""

    def __init__(self, layer: torch.nn.Module, act: Callable[[Arguments], Any]) -> None:
        super().__init__()
        # Not registered as a submodule: code around the layers reads its attributes (`attention_type`), never weights.
        object.__setattr__(self, "_layer", layer)
        object.__setattr__(self, "_act", act)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function that the stand-in was made with."""
        return object.__getattribute__(self, "_act")((args, kwargs))


@dataclass(frozen=True)
class Hidden:
    """Marks the hidden states in the template of a layer's output."""


@dataclass(frozen=True)
class Side:
    """Marks another tensor in the template of a layer's output; its sizes follow those of the hidden states."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    hidden: tuple[int, ...]

    def make(self, hidden: torch.Tensor) -> torch.Tensor:
        """Zeros in the shape that goes with these hidden states."""
        batch, length = self.hidden[0], self.hidden[1]
        sizes = [
            hidden.shape[0] if place == 0 and size == batch else hidden.shape[1] if size == length else size
            for place, size in enumerate(self.shape)
        ]
        return torch.zeros(sizes, dtype=self.dtype, device=hidden.device)


def template_of(output: Any, hidden: torch.Tensor) -> Any:
    """The structure of a layer's output, without its values."""

    def kind(leaf: Any) -> Any:
        if not torch.is_tensor(leaf):
            return leaf if isinstance(leaf, int | float | str) else None
        if leaf.shape == hidden.shape and leaf.is_floating_point():
            return Hidden()
        return Side(tuple(leaf.shape), leaf.dtype, tuple(hidden.shape))

    return tree_map(kind, output)


def fill_template(template: Any, hidden: torch.Tensor, on_side: Callable[[torch.Tensor], None] | None = None) -> Any:
    """A layer's output with these hidden states and with zeros as side tensors."""

    def value(leaf: Any) -> Any:
        if isinstance(leaf, Side):
            side = leaf.make(hidden)
            if on_side is not None:
                on_side(side)
            return side
        return hidden if isinstance(leaf, Hidden) else leaf

    return tree_map(value, template)


def hidden_of(arguments: Arguments) -> torch.Tensor:
    """The hidden states among a layer's arguments: the first floating-point tensor."""
    for leaf in tree_flatten(arguments)[0]:
        if torch.is_tensor(leaf) and leaf.is_floating_point():
            return leaf
    raise ValueError("a layer is called without hidden states")


def chosen(arguments: Arguments, positions: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """The arguments at these positions."""
    leaves = tree_flatten(arguments)[0]
    return tuple(leaves[position].contiguous() for position in positions)


def put_in(arguments: Arguments, positions: tuple[int, ...], values: tuple[torch.Tensor, ...]) -> Arguments:
    """The arguments with received values at these positions.

    In place if the shapes allow it: code around the layer may hold the same tensor (a residual outside the layer).
    """
    leaves, structure = tree_flatten(arguments)
    for position, value in zip(positions, values, strict=True):
        old = leaves[position]
        if torch.is_tensor(old) and old.shape == value.shape and old.dtype == value.dtype:
            old.copy_(value)
        else:
            leaves[position] = value
    filled: Arguments = tree_unflatten(leaves, structure)
    return filled


def enter_at(
    layer: torch.nn.Module, positions: tuple[int, ...], received: Callable[[], tuple[torch.Tensor, ...]]
) -> None:
    """Make a layer use the values received from the previous stage.

    Forward pre-hooks would not do: torch 2.13 runs them again when a checkpointed layer is recomputed, and the values
    of the next micro-batch would enter.
    """

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            args_in, kwargs_in = put_in((args, kwargs), positions, received())
            return call(*args_in, **kwargs_in)

        return run

    wrap_call(layer, around)


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


def anchored(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Pass tensors through one identity, so that an unused one gets a zero gradient.

    DeepSpeed 0.19.8 sends back a gradient for every received floating-point tensor and fails if it is None
    (`_exec_send_grads`). This can go when it sends zeros by itself.
    """
    floats = iter(_Anchor.apply(*[t for t in tensors if t.is_floating_point()]))  # type: ignore[no-untyped-call]
    return tuple(next(floats) if t.is_floating_point() else t for t in tensors)
