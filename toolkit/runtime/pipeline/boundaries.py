"""Boundaries between stages: stand-ins for other stages' layers, and how values enter and leave a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    """Marks another tensor in the template of a layer's output; some of its sizes follow those of the hidden states."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None: that of the hidden states."""
    rows: frozenset[int]
    """Dims that are as long as the batch."""
    tokens: frozenset[int]
    """Dims that are as long as the sequence."""
    constant: bool
    """Whether it is zeros that depend on nothing (T5's bias of cross-attention): every stage makes its own."""

    @classmethod
    def of(cls, found: Sequence[torch.Tensor], hidden: Sequence[torch.Tensor]) -> Side:
        """From a tensor in passes of different sizes, with their hidden states."""
        first = found[0]
        differs = [dim for dim in range(first.dim()) if len({tensor.shape[dim] for tensor in found}) > 1]

        def follow(place: int) -> frozenset[int]:
            pairs = list(zip(found, hidden, strict=True))
            return frozenset(dim for dim in differs if all(f.shape[dim] == h.shape[place] for f, h in pairs))

        constant = not any(tensor.requires_grad or bool(tensor.any()) for tensor in found)
        dtype = first.dtype if first.dtype != hidden[0].dtype else None
        return cls(tuple(first.shape), dtype, follow(0), follow(1), constant and first.is_floating_point())

    def make(self, hidden: torch.Tensor) -> torch.Tensor:
        """Zeros in the shape that goes with these hidden states; constant ones in one element of storage."""
        sizes = [
            hidden.shape[0] if dim in self.rows else hidden.shape[1] if dim in self.tokens else size
            for dim, size in enumerate(self.shape)
        ]
        zero = torch.zeros((), dtype=self.dtype or hidden.dtype, device=hidden.device).expand(sizes)
        return zero if self.constant else zero.clone(memory_format=torch.contiguous_format)


def template_of(outputs: Sequence[Any], hidden: Sequence[torch.Tensor]) -> Any:
    """The structure of a layer's output, without its values; `outputs` and `hidden` of passes of different sizes."""

    def kind(leaves: Sequence[Any]) -> Any:
        first = leaves[0]
        if not torch.is_tensor(first):
            return first if isinstance(first, int | float | str) else None
        if first.shape == hidden[0].shape and first.is_floating_point():
            return Hidden()
        return Side.of(leaves, hidden)

    flat = [tree_flatten(output)[0] for output in outputs]
    return tree_unflatten([kind(leaves) for leaves in zip(*flat, strict=True)], tree_flatten(outputs[0])[1])


def fill_template(template: Any, hidden: torch.Tensor, on_side: Callable[[torch.Tensor], None] | None = None) -> Any:
    """A layer's output with these hidden states and with zeros as side tensors; `on_side` sees those that vary."""

    def value(leaf: Any) -> Any:
        if isinstance(leaf, Side):
            side = leaf.make(hidden)
            if on_side is not None and not leaf.constant:
                on_side(side)
            return side
        return hidden if isinstance(leaf, Hidden) else leaf

    return tree_map(value, template)


def pass_by(template: Any, is_first: bool) -> Callable[[Arguments], Any]:
    """Forward pass of a stand-in for an earlier layer: zeros of the right shapes, made once and handed on."""

    def act(arguments: Arguments) -> Any:
        hidden = hidden_of(arguments)
        fresh = is_first or hidden.requires_grad
        return fill_template(template, torch.zeros_like(hidden, requires_grad=False) if fresh else hidden)

    return act


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

    In place if the shapes allow it: code around the layer may hold the same tensor (a residual outside the layer, or an
    encoder's output, which later layers get as well).
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
