"""Attribution of NaN and infinite values to a rank: its inputs were finite and its outputs are not."""

from __future__ import annotations

from typing import Any

import torch


class NonFiniteCounter:
    """Counts the passes in which this rank turned finite values into NaN or infinity; on the device, without a sync."""

    def __init__(self, device: torch.device) -> None:
        self.count = torch.zeros((), device=device)
        self._arrived = torch.zeros((), device=device)
        """Number of NaN or infinite inputs from other ranks, in either pass."""

    def reset(self) -> None:
        """Start a step."""
        self.count.zero_()
        self._arrived.zero_()

    def forward(self, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
        """Check one forward pass (its inputs and outputs), and register checks on its backward pass."""
        self._arrived += _nonfinite(inputs)
        self.count += _nonfinite(outputs) * (self._arrived == 0)
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(self._arrives)  # type: ignore[no-untyped-call]
        for tensor in inputs:
            self.after_embedding(None, None, tensor)

    def after_embedding(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        """A forward hook: the gradient that reaches this tensor has passed through all of the rank's layers."""
        if output.requires_grad:
            output.register_hook(self._leaves)  # type: ignore[no-untyped-call]

    def _arrives(self, gradient: torch.Tensor) -> None:
        self._arrived += _nonfinite((gradient,))

    def _leaves(self, gradient: torch.Tensor) -> None:
        self.count += _nonfinite((gradient,)) * (self._arrived == 0)


def _nonfinite(tensors: tuple[torch.Tensor, ...]) -> Any:
    """1 if any element is NaN or infinite, else 0; stays on the device."""
    found = [(~torch.isfinite(tensor.detach())).any() for tensor in tensors if tensor.is_floating_point()]
    return torch.stack(found).any().float() if found else 0.0
