"""Square norms of micro-batch gradients, seen as they pass: no gradient is computed or kept for it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.distributed.process_group import device


class NoiseMeter:
    """Adds up, on the device, the square norm of every gradient that reaches a parameter."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], mesh: Mesh) -> None:
        self._mesh = mesh
        self._squares = torch.zeros((), dtype=torch.float32, device=device())
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_hook(self._see)  # type: ignore[no-untyped-call]

    def _see(self, gradient: torch.Tensor) -> None:
        self._squares += torch.linalg.vector_norm(gradient, dtype=torch.float32).square()

    def take(self, accumulated: int) -> float:
        """Mean square norm of a micro-batch's gradient in the last step, over all ranks. Collective.

        What passes is a micro-batch's part of the mean over its rank's `accumulated` micro-batches.
        """
        total = self._mesh.sum_over_tokens(self._squares.clone())
        self._squares.zero_()
        return float(total) * accumulated / self._mesh.token_ranks
