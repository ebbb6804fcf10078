"""Collectives of tensor parallelism, each with the backward pass that keeps gradients equal to one process's."""

from __future__ import annotations

import weakref
from typing import Any

import deepspeed.comm as dist
import torch
from torch.nn.functional import pad

from toolkit.runtime.models.parameter_shards import shares


class TensorGroup:
    """The ranks that hold the shards of one model."""

    def __init__(self, group: Any, index: int, ranks: int) -> None:
        self.group = group
        self.index = index
        self.ranks = ranks
        self._entered: tuple[weakref.ref[torch.Tensor], tuple[int, bool], torch.Tensor] | None = None
        """The last value that entered a sharded region, its version and mode, and what it became there."""

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """A replicated value that several sharded linears read (query, key and value, or gate and up) enters once.

        Its gradient is then reduced once, after autograd has summed what the linears give it.
        """
        mode = (tensor._version, torch.is_grad_enabled())
        if self._entered is None or self._entered[0]() is not tensor or self._entered[1] != mode:
            entered: torch.Tensor = _CopyIn.apply(tensor, self, True)  # type: ignore[no-untyped-call]
            self._entered = (weakref.ref(tensor), mode, entered)
        return self._entered[2]

    def sum_into(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in the tensor itself if it is contiguous."""
        total = tensor.contiguous()
        dist.all_reduce(total, group=self.group)
        return total

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in a new tensor."""
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Maximum over ranks, in a new tensor."""
        top = tensor.contiguous().clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.group)
        return top

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, which have the same shape."""
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.ranks)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return parts

    def join(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        """All-gather slices of the last dimension, whose total size is `size`."""
        sizes = shares(size, self.ranks)
        parts = self.gather(pad(tensor, (0, sizes[0] - tensor.shape[-1])))
        return torch.cat([part[..., :width] for part, width in zip(parts, sizes, strict=True)], -1)

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the last dimension."""
        sizes = shares(tensor.shape[-1], self.ranks)
        return tensor.narrow(-1, sum(sizes[: self.index]), sizes[self.index]).contiguous()


def copy_in(tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """A replicated value enters a sharded region; its gradient is summed over ranks."""
    return _CopyIn.apply(tensor, group, False)  # type: ignore[no-untyped-call, no-any-return]


def sum_out(tensor: torch.Tensor, group: TensorGroup, *, in_place: bool = False) -> torch.Tensor:
    """Partial results leave a sharded region as their sum. `in_place`: nothing else reads the partial results."""
    return _SumOut.apply(tensor, group, in_place)  # type: ignore[no-untyped-call, no-any-return]


def join_out(tensor: torch.Tensor, size: int, group: TensorGroup) -> torch.Tensor:
    """Slices of the last dimension leave a sharded region gathered."""
    return _JoinOut.apply(tensor, size, group)  # type: ignore[no-untyped-call, no-any-return]


def cut_in(tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """A replicated value enters a sharded region as this rank's slice of the last dimension."""
    return _CutIn.apply(tensor, group)  # type: ignore[no-untyped-call, no-any-return]


def whole_weight(piece: torch.Tensor, dim: int, group: TensorGroup) -> torch.Tensor:
    """Gather a weight that is stored in slices, for replicated computation."""
    return _WholeWeight.apply(piece, dim, group)  # type: ignore[no-untyped-call, no-any-return]


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup, own: bool) -> torch.Tensor:
        ctx.group, ctx.own = group, own
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # The gradient of a linear's input is a new tensor; other modules may pass one on that is used elsewhere, too.
        return ctx.group.sum_into(gradient) if ctx.own else ctx.group.sum(gradient), None, None


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup, in_place: bool) -> torch.Tensor:
        if not (in_place and tensor.is_contiguous()):
            return group.sum(tensor)
        ctx.mark_dirty(tensor)
        return group.sum_into(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient, None, None


class _JoinOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, size: int, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        return group.join(tensor, size)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.group.cut(gradient), None, None


class _CutIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group, ctx.size = group, tensor.shape[-1]
        return group.cut(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.join(gradient, ctx.size), None


class _WholeWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor, dim: int, group: TensorGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return torch.cat(group.gather(piece), dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.chunk(ctx.group.ranks, ctx.dim)[ctx.group.index].contiguous(), None, None
