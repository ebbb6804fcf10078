"""Where numbers go bad: a module is at fault if what went in was finite and what came out is not."""

from __future__ import annotations

from typing import Any

import torch


class NonFiniteCounter:
    """Counts, on the device and without a wait, the passes of one rank that made non-numbers of numbers."""

    def __init__(self, device: torch.device) -> None:
        self.count = torch.zeros((), device=device)
        self._arrived = torch.zeros((), device=device)
        """What came from others that was no number already, in either pass."""

    def reset(self) -> None:
        """A step begins."""
        self.count.zero_()
        self._arrived.zero_()

    def forward(self, taken: tuple[torch.Tensor, ...], given: tuple[torch.Tensor, ...]) -> None:
        """Look at one forward pass, and at the backward pass that will follow it."""
        self._arrived += _bad(taken)
        self.count += _bad(given) * (self._arrived == 0)
        for tensor in given:
            if tensor.requires_grad:
                tensor.register_hook(self._arrives)  # type: ignore[no-untyped-call]
        for tensor in taken:
            self.after_embedding(None, None, tensor)

    def after_embedding(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        """A forward hook: the gradient that reaches this tensor has passed the whole of the rank's layers."""
        if output.requires_grad:
            output.register_hook(self._leaves)  # type: ignore[no-untyped-call]

    def _arrives(self, gradient: torch.Tensor) -> None:
        self._arrived += _bad((gradient,))

    def _leaves(self, gradient: torch.Tensor) -> None:
        self.count += _bad((gradient,)) * (self._arrived == 0)


def _bad(tensors: tuple[torch.Tensor, ...]) -> Any:
    """1 if any element is no number, else 0, still on the device."""
    found = [(~torch.isfinite(tensor.detach())).any() for tensor in tensors if tensor.is_floating_point()]
    return torch.stack(found).any().float() if found else 0.0
