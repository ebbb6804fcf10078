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
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from toolkit.runtime.layers.later_gradients import later_linear
from toolkit.runtime.sharding.styles import is_wrapped, put_off_weights

Place = tuple[int, int]
"""Stage and micro-batch."""
Waiting = tuple[torch.Tensor, Callable[[], torch.Tensor]]
"""A weight, and what computes its gradient."""


class WeightGradients:
    """The gradients of a rank's linear layers that still have to be computed."""

    def __init__(self, stages: torch.nn.Module) -> None:
        self._lists: dict[Place, list[Waiting]] = {}
        self._open: list[Waiting] | None = None
        """Where gradients are put that are not computed now; None: all are computed at once."""
        for module in stages.modules():
            if is_wrapped(module):
                put_off_weights(module, self)
            elif _can_wait(module):
                module.forward = _later(module, self)

    @contextlib.contextmanager
    def collecting(self, place: Place) -> Iterator[None]:
        """Let the layers of a backward pass put off their weights' gradients."""
        self._open = self._lists[place] = []
        try:
            yield
        finally:
            self._open = None

    def gradient(self, weight: torch.Tensor, compute: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """The gradient of a weight, as a layer's backward pass asks for it."""
        if self._open is None:
            return compute()
        self._open.append((weight, compute))
        return None

    def compute(self, place: Place) -> None:
        """Compute what was put off, and add it to the weights' gradients; hooks of the weights run as usual."""
        for weight, compute in self._lists.pop(place):
            torch.autograd.backward([weight], [compute()])


def _can_wait(module: torch.nn.Module) -> bool:
    """Plain linear layers with a weight to train on this stage; not those that compute something else (the loss)."""
    plain = type(module) in (torch.nn.Linear, Conv1D) and "forward" not in vars(module)
    return plain and isinstance(weight := module.weight, torch.nn.Parameter) and weight.requires_grad


def _later(module: Any, waiting: WeightGradients) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        weight = module.weight.t() if isinstance(module, Conv1D) else module.weight
        return later_linear(x, weight, module.bias, waiting)

    return forward
