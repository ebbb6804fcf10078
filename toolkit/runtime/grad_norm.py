"""The gradient norm over all shards and stages of a replica, exactly once each, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from toolkit.runtime.distributed import device
from toolkit.runtime.mesh import Mesh
from toolkit.runtime.shards import layout_of

EPSILON = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`."""


def clip_gradients(parameters: Iterable[torch.nn.Parameter], mesh: Mesh, max_norm: float) -> float:
    """Scale gradients down to `max_norm`; the norm before."""
    held = [p for p in parameters if p.grad is not None]
    counted = [p.grad for p in held if p.grad is not None and _counts(p, mesh)]
    squares = torch.zeros((), device=device())
    if counted:
        squares = torch.stack(torch._foreach_norm(counted)).square().sum()
    norm = float(mesh.sum_over_shards(squares).sqrt())
    scale = max_norm / (norm + EPSILON)
    if scale < 1:
        torch._foreach_mul_([p.grad for p in held if p.grad is not None], scale)
    return norm


def _counts(parameter: torch.nn.Parameter, mesh: Mesh) -> bool:
    """Shards count on every rank, whole parameters on the first, copies on another stage not at all."""
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return layout_of(parameter) is not None or mesh.tensor == 0
