"""Weight gradients that are computed later than input gradients (zero bubble).

In a backward pass a matrix product has two products to compute: the gradient of its input, which the previous stage
waits for, and the gradient of its weight, which nobody waits for until the update. While gradients are collected,
linear layers keep their input and the gradient of their output instead of computing the second one. What other modules
compute (norms, embeddings, experts, the loss) is small or can't be separated, and is computed at once.

torch 2.13 can take the two apart for any module (`torch.distributed.pipelining._backward`), but it searches the graph
of every micro-batch in Python, computes custom functions twice, and bypasses parameters' hooks, which DeepSpeed needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

Place = tuple[int, int]
"""Stage and micro-batch."""
Waiting = tuple[torch.nn.Module, torch.Tensor, torch.Tensor]
"""A linear layer, its input, and the gradient of its output."""


class WeightGradients:
    """The gradients of a rank's linear layers that still have to be computed."""

    def __init__(self, stages: torch.nn.Module) -> None:
        self._lists: dict[Place, list[Waiting]] = {}
        self.open: list[Waiting] | None = None
        """Where layers put what they do not compute; None: they compute everything."""
        for module in stages.modules():
            if _can_wait(module):
                module.forward = _later(module, self)

    @contextlib.contextmanager
    def collecting(self, place: Place) -> Iterator[None]:
        """Let the layers of a backward pass put off their weights' gradients."""
        self.open = self._lists[place] = []
        try:
            yield
        finally:
            self.open = None

    def compute(self, place: Place) -> None:
        """Compute what was put off, and add it to the weights' gradients; hooks of the weights run as usual."""
        for module, inputs, gradient in self._lists.pop(place):
            weight: Any = module.weight
            torch.autograd.backward([weight], [_weight_gradient(module, inputs, gradient)])


def _can_wait(module: torch.nn.Module) -> bool:
    """Plain linear layers with a weight to train on this stage; not those that compute something else (the loss)."""
    plain = type(module) in (torch.nn.Linear, Conv1D) and "forward" not in vars(module)
    return plain and isinstance(weight := module.weight, torch.nn.Parameter) and weight.requires_grad


def _later(module: torch.nn.Module, waiting: WeightGradients) -> Any:
    return lambda inputs: _Product.apply(inputs, module.weight, module.bias, module, waiting)  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """A linear layer whose backward pass may leave the weight for later."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: Any, module: Any, waiting: WeightGradients
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.module, ctx.waiting, ctx.bias = module, waiting, bias is not None
        return type(module).forward(module, inputs)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        onward = None
        if ctx.needs_input_grad[0]:
            onward = gradient @ (weight.t() if isinstance(ctx.module, Conv1D) else weight)
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.bias and ctx.needs_input_grad[2] else None
        if ctx.waiting.open is not None:
            ctx.waiting.open.append((ctx.module, inputs, gradient))
            return onward, None, of_bias, None, None
        return onward, _weight_gradient(ctx.module, inputs, gradient), of_bias, None, None


def _weight_gradient(module: torch.nn.Module, inputs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    rows, columns = gradient.reshape(-1, gradient.shape[-1]), inputs.reshape(-1, inputs.shape[-1])
    return columns.t() @ rows if isinstance(module, Conv1D) else rows.t() @ columns
