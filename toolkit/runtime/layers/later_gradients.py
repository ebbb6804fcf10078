"""Linear layers whose weight gradients may be computed later than the gradients of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn.functional import linear


class Later(Protocol):
    """Decides in a backward pass when the gradient of a weight is computed."""

    def gradient(self, weight: torch.Tensor, compute: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """The gradient of a weight; None if it is computed later, and then added to the weight's."""


class AtOnce:
    """Null object: gradients of weights are computed in the backward pass, as usual."""

    def gradient(self, weight: torch.Tensor, compute: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """Compute it."""
        return compute()


AT_ONCE = AtOnce()


def later_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, later: Later) -> torch.Tensor:
    """`torch.nn.functional.linear`, whose weight's gradient may come later."""
    if later is AT_ONCE:
        return linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, later)  # type: ignore[no-untyped-call, no-any-return]


def weight_gradient(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gradient of a linear's weight from the gradient of its output, as rows, and its input."""
    return rows.t().mm(x.reshape(-1, x.shape[-1]))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, later: Later
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later = later
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_x = rows.mm(weight).view(x.shape) if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = ctx.later.gradient(weight, lambda: weight_gradient(rows, x))
        return of_x, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None
