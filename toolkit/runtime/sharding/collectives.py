"""Collectives of tensor parallelism, each with the backward pass that keeps gradients equal to one process's."""

from __future__ import annotations

import weakref
from typing import Any

import deepspeed.comm as dist
import torch
from torch.nn.functional import linear, pad

from toolkit.runtime.distributed.process_group import all_reduce_wait
from toolkit.runtime.layers.later_gradients import AT_ONCE, Later, weight_gradient
from toolkit.runtime.layers.recompute import is_summed, keeps_products, note_sum
from toolkit.runtime.models.parameter_shards import shares


class TensorGroup:
    """The ranks that hold the shards of one model."""

    def __init__(self, group: Any, index: int, ranks: int) -> None:
        self.group = group
        self.index = index
        self.ranks = ranks
        self._entered: tuple[weakref.ref[torch.Tensor], tuple[int, bool], torch.Tensor] | None = None
        """The last value that entered a sharded region, its version and mode, and what it became there."""
        self._read: tuple[weakref.ref[torch.Tensor], tuple[int, bool], torch.Tensor, Reduction] | None = None
        """As `_entered`, for values that `linear` reads."""

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """A replicated value that several sharded linears read (query, key and value, or gate and up) enters once.

        Its gradient is then reduced once, after autograd has summed what the linears give it.
        """
        mode = (tensor._version, torch.is_grad_enabled())
        if self._entered is None or self._entered[0]() is not tensor or self._entered[1] != mode:
            entered: torch.Tensor = _CopyIn.apply(tensor, self, True)  # type: ignore[no-untyped-call]
            self._entered = (weakref.ref(tensor), mode, entered)
        return self._entered[2]

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, later: Later = AT_ONCE
    ) -> torch.Tensor:
        """A linear over a replicated value whose gradient is reduced while weight gradients are computed."""
        mode = (x._version, torch.is_grad_enabled())
        known = self._read
        if known is None or known[0]() is not x or known[1] != mode or known[3].begun:
            reduction = Reduction(self)
            entered: torch.Tensor = _Enter.apply(x, reduction)  # type: ignore[no-untyped-call]
            known = self._read = (weakref.ref(x), mode, entered, reduction)
        return _Linear.apply(known[2], weight, bias, known[3], later)  # type: ignore[no-untyped-call, no-any-return]

    def forget(self) -> None:
        """Let go of the last value that was read: a gradient is done, so this is a backward pass.

        The value would hold its memory until the next forward pass. In a layer that is recomputed it is not the one
        whose gradient is done, but its copy, with the graph of all that was recomputed before it.
        """
        self._entered = self._read = None

    def start_sum(self, tensor: torch.Tensor) -> Any:
        """Start a sum over ranks in a contiguous tensor; `wait` of what is returned ends it."""
        return dist.all_reduce(tensor, group=self.group, async_op=True)

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

    def start_gather(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start to gather the tensors of all ranks, stacked; `wait` of what is returned with them ends it."""
        stacked = tensor.new_empty((self.ranks, *tensor.shape))
        work = dist.all_gather_into_tensor(
            stacked.view(-1), tensor.contiguous().view(-1), group=self.group, async_op=True
        )
        return stacked, work

    def start_scatter(self, stacked: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start to sum stacked tensors over ranks, of which each rank gets its own; `wait` of the second ends it."""
        own = stacked.new_empty(stacked.shape[1:])
        work = dist.reduce_scatter_tensor(own.view(-1), stacked.view(-1), group=self.group, async_op=True)
        return own, work

    def join(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        """All-gather slices of the last dimension, whose total size is `size`."""
        sizes = shares(size, self.ranks)
        parts = self.gather(pad(tensor, (0, sizes[0] - tensor.shape[-1])))
        return torch.cat([part[..., :width] for part, width in zip(parts, sizes, strict=True)], -1)

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the last dimension."""
        sizes = shares(tensor.shape[-1], self.ranks)
        return tensor.narrow(-1, sum(sizes[: self.index]), sizes[self.index]).contiguous()


class Reduction:
    """The gradient of a value that several sharded linears read (query, key and value, or gate and up).

    Their gradients are summed in the order of the backward pass, as autograd would. The last of them starts the sum
    over ranks before it computes the gradient of its weight; the sum is waited for where the value entered.
    """

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self._readers = self._left = 0
        self._total: torch.Tensor | None = None
        self._work: Any = None
        self.begun = False
        """Whether a backward pass has begun: a layer that is recomputed must not be counted as a further reader."""

    def expect(self) -> None:
        """A further linear reads the value."""
        self._readers += 1
        self._left += 1

    def add(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Take the gradient of one linear. The last one gets the sum, which is on its way; the others None."""
        self.begun = True
        self._total = gradient if self._total is None else self._total.add_(gradient)
        self._left -= 1
        if self._left:
            return None
        self._work = self._group.start_sum(self._total)
        return self._total

    def finish(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The sum over ranks. If not every linear was part of this backward pass, it starts only now."""
        self._group.forget()
        total, work = self._total, self._work
        self._total, self._work, self._left = None, None, self._readers
        if work is not None:
            all_reduce_wait(work)
            return total
        found = gradient if total is None else total
        return None if found is None else self._group.sum_into(found)


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
        ctx.group.forget()
        # The gradient of a linear's input is a new tensor; other modules may pass one on that is used elsewhere, too.
        return ctx.group.sum_into(gradient) if ctx.own else ctx.group.sum(gradient), None, None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        ctx.reduction = reduction
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return ctx.reduction.finish(gradient), None


class _Linear(torch.autograd.Function):
    """`torch.nn.functional.linear` with the gradients of autograd, in another order: of the input first."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        reduction: Reduction,
        later: Later,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.reduction, ctx.later = reduction, later
        if ctx.needs_input_grad[0]:
            reduction.expect()
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        on_its_way = ctx.reduction.add(rows.mm(weight).view(x.shape)) if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = ctx.later.gradient(weight, lambda: weight_gradient(rows, x))
        return on_its_way, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None, None


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup, in_place: bool) -> torch.Tensor:
        if not (in_place and tensor.is_contiguous()):
            return group.sum(tensor)
        if is_summed(tensor):
            return tensor
        if not keeps_products():
            ctx.mark_dirty(tensor)
        note_sum(tensor)
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
