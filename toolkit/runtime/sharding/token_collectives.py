"""Collectives between a rank's share of the tokens and all tokens, with their backward passes.

Hidden states are (batch, tokens, width), or rows of tokens (rows, width) inside some layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

from toolkit.runtime.distributed.process_group import all_reduce_wait
from toolkit.runtime.layers.later_gradients import AT_ONCE, Later, later_linear, weight_gradient
from toolkit.runtime.layers.recompute import note_scattered
from toolkit.runtime.sharding.collectives import TensorGroup

GATHERED = "gathered_tokens"
"""Attribute of a gathered tensor: the share that it was made of, and its `GatheredTokens`."""


def cut_tokens(tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """A complete value that all ranks have becomes this rank's share of its tokens."""
    return _Cut.apply(tensor, group)  # type: ignore[no-untyped-call, no-any-return]


def join_tokens(share: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """All tokens, for computation that all ranks do alike: their gradients are equal and complete."""
    return _Join.apply(share, group)  # type: ignore[no-untyped-call, no-any-return]


def gather_tokens(share: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """All tokens, for computation whose results the ranks count in part: their gradients are summed."""
    return _Gather.apply(share, group)  # type: ignore[no-untyped-call, no-any-return]


def enter_tokens(share: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """All tokens, for a sharded region: gradients are partial sums. Not kept for the backward pass, but gathered again.

    Column linears find the share by an attribute of the result.
    """
    gathered = GatheredTokens(group)
    whole: torch.Tensor = _Enter.apply(share, gathered)  # type: ignore[no-untyped-call]
    setattr(whole, GATHERED, (share.detach(), gathered))
    return whole


def leave_tokens(partial: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Partial results for all tokens leave a sharded region as this rank's share of their sum."""
    return _Leave.apply(partial, group)  # type: ignore[no-untyped-call, no-any-return]


def linear_of_tokens(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, later: Later = AT_ONCE
) -> torch.Tensor:
    """A linear inside a sharded region; of an input that `enter_tokens` made it keeps the share only."""
    found = getattr(x, GATHERED, None)
    if found is None:
        return later_linear(x, weight, bias, later)
    share, gathered = found
    return _Linear.apply(x, share, weight, bias, gathered, later)  # type: ignore[no-untyped-call, no-any-return]


class GatheredTokens:
    """Gathered tokens that several linears of a sharded region read (query, key and value, or gate and up).

    In the backward pass the first of them starts to gather the tokens again, and the last one starts the reduce-scatter
    of the input's gradient before it computes the gradient of its weight. Where those of weights come later, the first
    that is computed gathers the tokens.
    """

    def __init__(self, group: TensorGroup) -> None:
        self.group = group
        self._inputs = self._weights = 0
        self._gradient: torch.Tensor | None = None
        self._sum: tuple[torch.Tensor, Any] | None = None
        self._whole: tuple[torch.Tensor, Any] | None = None

    def expect(self, *, of_input: bool, of_weight: bool) -> None:
        """A further linear reads the tokens, and will have these gradients."""
        self._inputs += of_input
        self._weights += of_weight

    def start(self, share: torch.Tensor) -> None:
        """A linear that needs the tokens has begun its backward pass."""
        if self._whole is None:
            self._whole = self.group.start_gather(share)

    def take(self) -> torch.Tensor:
        """All tokens, stacked by rank; the last linear that needs them lets them go."""
        assert self._whole is not None
        whole, work = self._whole
        if work is not None:
            all_reduce_wait(work)
        self._weights -= 1
        self._whole = (whole, None) if self._weights else None
        return whole

    def add(self, gradient: torch.Tensor) -> None:
        """Take the gradient that one linear has for the tokens."""
        self._gradient = gradient if self._gradient is None else self._gradient.add_(gradient)
        self._inputs -= 1
        if self._inputs == 0:
            self._sum = self.group.start_scatter(_stacked(self._gradient, self.group.ranks))
            self._gradient = None

    def finish(self, others: torch.Tensor | None) -> torch.Tensor | None:
        """Gradient of the share. `others`: what readers that are not linears have for the tokens."""
        rest = self._gradient  # of a backward pass in which not every linear took part
        self._gradient = None
        parts = [part for part in (rest, others) if part is not None]
        total = sum_tokens(sum(parts[1:], parts[0]), self.group) if parts else None
        if self._sum is None:
            return total
        (found, work), self._sum = self._sum, None
        all_reduce_wait(work)
        return found if total is None else found.add_(total)


def whole_tokens(share: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """All tokens from the shares of all ranks."""
    stacked, work = group.start_gather(share)
    all_reduce_wait(work)
    return _joined(stacked)


def own_tokens(whole: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """This rank's share, as a copy: a view would keep all tokens alive."""
    _check(whole, group.ranks)
    share = whole.chunk(group.ranks, _dim(whole))[group.index]
    return share.clone(memory_format=torch.contiguous_format)


def sum_tokens(whole: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """This rank's share of the sum over ranks."""
    found, work = group.start_scatter(_stacked(whole, group.ranks))
    all_reduce_wait(work)
    return found


def _dim(tensor: torch.Tensor) -> int:
    """The dimension of tokens."""
    return tensor.dim() - 2


def _check(whole: torch.Tensor, ranks: int) -> None:
    tokens = whole.shape[_dim(whole)]
    if tokens % ranks:
        raise ValueError(
            f"{tokens} tokens can't be shared by {ranks} tensor ranks; set strategy.sequence_sharded=false"
        )


def _stacked(whole: torch.Tensor, ranks: int) -> torch.Tensor:
    """(batch, tokens, width) → (ranks, batch, own tokens, width), contiguous."""
    _check(whole, ranks)
    dim = _dim(whole)
    shape = *whole.shape[:dim], ranks, -1, whole.shape[-1]
    return whole.reshape(shape).movedim(dim, 0).contiguous()


def _joined(stacked: torch.Tensor) -> torch.Tensor:
    """(ranks, batch, own tokens, width) → (batch, tokens, width)."""
    dim = stacked.dim() - 3
    return stacked.movedim(0, dim).flatten(dim, dim + 1)


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        return own_tokens(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return whole_tokens(gradient, ctx.group), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        return whole_tokens(share, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return own_tokens(gradient, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        return whole_tokens(share, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_tokens(gradient, ctx.group), None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, gathered: GatheredTokens) -> torch.Tensor:
        ctx.gathered = gathered
        ctx.set_materialize_grads(False)
        return whole_tokens(share, gathered.group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return ctx.gathered.finish(gradient), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        note_scattered()
        return sum_tokens(partial, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return whole_tokens(gradient, ctx.group), None


class _Linear(torch.autograd.Function):
    """`torch.nn.functional.linear` that keeps a share of its input; its gradients in the order of `GatheredTokens`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        share: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gathered: GatheredTokens,
        later: Later,
    ) -> torch.Tensor:
        ctx.save_for_backward(share, weight)
        ctx.gathered, ctx.later = gathered, later
        gathered.expect(of_input=ctx.needs_input_grad[0], of_weight=ctx.needs_input_grad[2])
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        share, weight = ctx.saved_tensors
        gathered: GatheredTokens = ctx.gathered
        if ctx.needs_input_grad[2] and ctx.later is AT_ONCE:
            gathered.start(share)
        rows = gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[0]:
            gathered.add(rows.mm(weight).view(*gradient.shape[:-1], weight.shape[1]))

        def of_weight() -> torch.Tensor:
            gathered.start(share)
            return weight_gradient(rows, _joined(gathered.take()))

        found = ctx.later.gradient(weight, of_weight) if ctx.needs_input_grad[2] else None
        return None, None, found, rows.sum(0) if ctx.needs_input_grad[3] else None, None, None
