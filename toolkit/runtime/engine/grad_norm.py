"""The gradient norm over all shards and stages of a replica, exactly once each, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.distributed.process_group import device
from toolkit.runtime.models.parameter_shards import layout_of

EPSILON = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`."""


Held = tuple[torch.nn.Parameter, torch.Tensor]
"""A parameter and its gradient."""


def clip_gradients(parameters: Iterable[torch.nn.Parameter], mesh: Mesh, max_norm: float) -> float:
    """Scale gradients down to `max_norm`; the norm before."""
    held = [(p, p.grad) for p in parameters if p.grad is not None]
    norm = gradient_norm(held, mesh)
    scale = max_norm / (norm + EPSILON)
    if scale < 1:
        torch._foreach_mul_([gradient for _, gradient in held], scale)
    return norm


def gradient_norm(held: Sequence[Held], mesh: Mesh) -> float:
    """The norm of all gradients of a replica. Collective."""
    squares = mesh.sum_over_shards(_squares(g for p, g in held if not _is_expert(p) and _counts(p, mesh)))
    if mesh.plan.ep > 1:  # each rank of an expert group holds other experts; groups repeat dp / ep times
        experts = _squares(g for p, g in held if _is_expert(p))
        squares = squares + mesh.sum_over_tokens(experts) * mesh.plan.ep / mesh.plan.dp
    return float(squares.sqrt())


def _squares(found: Iterable[torch.Tensor]) -> torch.Tensor:
    gradients = list(found)
    if not gradients:
        return torch.zeros((), device=device())
    return torch.stack(torch._foreach_norm(gradients)).square().sum()


def _is_expert(parameter: torch.nn.Parameter) -> bool:
    """Whether DeepSpeed reduces a gradient over ranks with the same experts only."""
    return not getattr(parameter, "allreduce", True)


def _counts(parameter: torch.nn.Parameter, mesh: Mesh) -> bool:
    """Shards count on every rank, whole parameters on the first, copies on another stage not at all."""
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return layout_of(parameter) is not None or mesh.tensor == 0
