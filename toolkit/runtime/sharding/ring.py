"""Ring attention: ranks share the tokens of a sequence, and keys and values travel round them.

What a rank computes with the keys of another one is a list of blocks (`ring_blocks.py`), so packed documents and
windows need no mask. Results of blocks are merged by their log-sum-exp. In the backward pass gradients of keys and
values travel with them and are home after one turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from toolkit.errors import first_line
from toolkit.runtime.distributed.process_group import send_wait
from toolkit.runtime.layers.recompute import kept_result
from toolkit.runtime.models.attention_kernels import Request
from toolkit.runtime.sharding.ring_blocks import Block, Sees

QUERIES = 128
"""Queries at a time where scores are written out: they have as many rows, not one per token."""


class RingGroup:
    """Ranks in a circle; `peers` are their global ranks in order."""

    def __init__(self, group: Any, index: int, peers: Sequence[int]) -> None:
        self._group, self._peers = group, peers
        self.index, self.ranks = index, len(peers)

    def start(self, tensor: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """Start to send a tensor to the next rank and to receive the previous one's, which is returned."""
        received = torch.empty_like(tensor)
        ahead, behind = self._peers[(self.index + 1) % self.ranks], self._peers[self.index - 1]
        point = torch.distributed.P2POp
        works = torch.distributed.batch_isend_irecv(
            [
                point(torch.distributed.isend, tensor, ahead, self._group),
                point(torch.distributed.irecv, received, behind, self._group),
            ]
        )
        return received, works


def finish(started: tuple[torch.Tensor, list[Any]]) -> torch.Tensor:
    """Wait for what `start` has begun; the tensor from the previous rank."""
    for work in started[1]:
        send_wait(work)
    return started[0]


def use_flash_3() -> str:
    """Let torch's flash operators, which a ring calls, run flash-attn 3's kernels; why they can't, or nothing.

    torch 2.13 replaces the CUDA kernels of `aten::_scaled_dot_product_flash_attention` and of its backward pass for the
    whole process. It calls them with the log-sum-exp over all keys, as a ring needs.
    """
    try:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError) as error:
        return f"flash-attn 3 can't be used: {first_line(error)}"
    return ""


Work = Callable[[int], list[Block]]
"""Blocks by the rank whose keys they read."""


@dataclass(frozen=True)
class _Turn:
    """What a turn of the ring does."""

    scale: float
    """Of scores."""
    softcap: float | None
    """Scores become softcap × tanh(score / softcap)."""
    ring: RingGroup
    work: Work


def ring_attention(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], ask: Request, ring: RingGroup, work: Work
) -> torch.Tensor:
    """Attention of this rank's queries over the whole ring: (rows, heads, own tokens, width) each.

    Key heads may be fewer than query heads. `ask`: what the layer asks for, without dropout; `work` knows its window.
    """
    query, key, value = qkv
    width = value.shape[-1]
    value = pad(value, (0, query.shape[-1] - width)) if width < query.shape[-1] else value
    turn = _Turn(query.shape[-1] ** -0.5 if ask.scale is None else ask.scale, ask.softcap, ring, work)
    found: torch.Tensor = _Ring.apply(query, key, value, ask.sinks, turn)  # type: ignore[no-untyped-call]
    return found[..., :width]


def _run(
    query: torch.Tensor, pair: torch.Tensor, sinks: torch.Tensor | None, turn: _Turn
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) of the queries over the keys and values of all ranks; the next ones come meanwhile."""
    ring = turn.ring
    wide = torch.promote_types(query.dtype, torch.float32)
    total = torch.zeros_like(query, dtype=wide)
    lse = torch.full(query.shape[:-1], -math.inf, dtype=wide, device=query.device)
    if sinks is not None:
        lse.copy_(sinks[:, None].expand_as(lse))  # as a key that was seen before all others, with nothing as its value
    for step in range(ring.ranks):
        coming = ring.start(pair) if step + 1 < ring.ranks else None
        for one in turn.work((ring.index - step) % ring.ranks):
            at, there = (one.rows, slice(None), one.queries), (one.rows, slice(None), one.keys)
            part, part_lse = _forward((query[at], pair[0][there], pair[1][there]), one.sees, turn)
            both = torch.logaddexp(lse[at], part_lse.to(wide))
            total[at] *= (lse[at] - both).exp_().unsqueeze(-1)
            total[at] += part * (part_lse - both).exp_().unsqueeze(-1)
            lse[at] = both
        pair = finish(coming) if coming is not None else pair
    return total.to(query.dtype), lse


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        turn: _Turn,
    ) -> torch.Tensor:
        query = query.contiguous()
        output, lse = kept_result(lambda: _run(query, torch.stack([key, value]), sinks, turn))
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        ctx.turn = turn
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, output, lse = ctx.saved_tensors
        turn: _Turn = ctx.turn
        ring = turn.ring
        gradient = gradient.contiguous()
        wide = torch.promote_types(query.dtype, torch.float32)
        of_query = torch.zeros_like(query, dtype=wide)
        pair = torch.stack([key, value])
        on_its_way: tuple[torch.Tensor, list[Any]] | None = None
        for step in range(ring.ranks):
            coming = ring.start(pair) if step + 1 < ring.ranks else None
            of_pair = torch.zeros_like(pair, dtype=wide)
            for one in turn.work((ring.index - step) % ring.ranks):
                at, there = (one.rows, slice(None), one.queries), (one.rows, slice(None), one.keys)
                read = gradient[at], query[at], pair[0][there], pair[1][there], output[at], lse[at]
                of_q, of_k, of_v = _backward(read, one.sees, turn)
                of_query[at] += of_q
                of_pair[0][there] += of_k
                of_pair[1][there] += of_v
            if on_its_way is not None:  # what the ranks before have for the same keys
                of_pair += finish(on_its_way)
            on_its_way = ring.start(of_pair)
            pair = finish(coming) if coming is not None else pair
        assert on_its_way is not None
        of_pair = finish(on_its_way)  # after one turn it is home
        of_sinks = None if sinks is None else _of_sinks(sinks, gradient, output, lse)
        return of_query.to(query.dtype), of_pair[0].to(key.dtype), of_pair[1].to(value.dtype), of_sinks, None


def _of_sinks(sinks: torch.Tensor, gradient: torch.Tensor, output: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Gradient of the sinks: the probability that each took away, times what it was taken from."""
    taken = (sinks[:, None] - lse).exp()
    return -(taken * (gradient * output).sum(-1)).sum((0, 2)).to(sinks.dtype)


def _forward(given: tuple[torch.Tensor, ...], sees: Sees, turn: _Turn) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) of a block's (query, key, value) by torch's flash kernels.

    They take fewer key heads as they are. The edge of a window is a causal square if both sides are read backwards.
    """
    aten, causal, scale = torch.ops.aten, sees is not Sees.ALL, turn.scale
    query, key, value = _backwards(given) if sees is Sees.LATER else given
    if turn.softcap is not None:
        output, lse = _capped((query, key, value), scale, turn.softcap, causal=causal)
        return (output.flip(2), lse.flip(2)) if sees is Sees.LATER else (output, lse)
    if query.device.type == "cpu":
        output, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    else:
        output, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
    return (output.flip(2), lse.flip(2)) if sees is Sees.LATER else (output, lse)


def _backward(given: tuple[torch.Tensor, ...], sees: Sees, turn: _Turn) -> tuple[torch.Tensor, ...]:
    """Gradients of a block. `given`: gradient, query, key, value, and output and log-sum-exp over all keys."""
    aten, causal, scale = torch.ops.aten, sees is not Sees.ALL, turn.scale
    given = _backwards(given) if sees is Sees.LATER else given
    if turn.softcap is not None:
        of_block = _capped_backward(given, scale, turn.softcap, causal=causal)
        return _backwards(of_block) if sees is Sees.LATER else of_block
    _, query, key, *_ = given
    if query.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal, scale=scale)
    else:
        none = torch.empty(0, dtype=torch.long, device=query.device)  # of random numbers for dropout
        lengths = query.shape[2], key.shape[2]
        found = aten._scaled_dot_product_flash_attention_backward(
            *given, None, None, *lengths, 0.0, causal, none, none, scale=scale
        )
    return _backwards(found[:3]) if sees is Sees.LATER else tuple(found[:3])


def _backwards(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Tensors with their tokens in the opposite order."""
    return tuple(tensor.flip(2) for tensor in tensors)


def _capped(
    given: tuple[torch.Tensor, ...], scale: float, cap: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) of a block with capped scores, which flash kernels lack; key heads may be fewer."""
    query, key, value = given
    outputs, sums = [], []
    for at, scores, _ in _pieces(query, key, scale, cap, causal=causal):
        lse = scores.logsumexp(-1)
        chances = (scores - lse[..., None]).exp_()
        outputs.append((chances @ _repeated(value[:, :, : at.stop] if causal else value, query)).to(query.dtype))
        sums.append(lse)
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def _capped_backward(
    given: tuple[torch.Tensor, ...], scale: float, cap: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of such a block; its scores are computed again from the log-sum-exp over all keys."""
    gradient, query, key, value, output, lse = given
    wide = torch.promote_types(query.dtype, torch.float32)
    of_key, of_value = (torch.zeros(each.shape, dtype=wide, device=each.device) for each in (key, value))
    of_query = torch.empty(query.shape, dtype=wide, device=query.device)
    lost = (gradient.to(wide) * output.to(wide)).sum(-1, keepdim=True)
    for at, scores, slope in _pieces(query, key, scale, cap, causal=causal):
        seen = slice(0, at.stop if causal else None)
        slopes, chances = gradient[:, :, at].to(wide), (scores - lse[:, :, at, None]).exp_()
        of_value[:, :, seen] += _summed(chances.transpose(-1, -2) @ slopes, value)
        values = _repeated(value[:, :, seen].to(wide), query)
        of_scores = chances * (slopes @ values.transpose(-1, -2) - lost[:, :, at]) * slope * scale
        of_query[:, :, at] = of_scores @ _repeated(key[:, :, seen].to(wide), query)
        of_key[:, :, seen] += _summed(of_scores.transpose(-1, -2) @ query[:, :, at].to(wide), key)
    return of_query, of_key, of_value


def _pieces(
    query: torch.Tensor, key: torch.Tensor, scale: float, cap: float, *, causal: bool
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Places of some queries, their capped scores, and the slope of the cap there."""
    wide = torch.promote_types(query.dtype, torch.float32)
    for start in range(0, query.shape[2], QUERIES):
        at = slice(start, min(start + QUERIES, query.shape[2]))
        keys = _repeated(key[:, :, : at.stop] if causal else key, query).to(wide)
        share = torch.tanh(query[:, :, at].to(wide) @ keys.transpose(-1, -2) * (scale / cap))
        scores = share * cap
        if causal:
            later = (
                torch.arange(at.stop, device=query.device) > torch.arange(start, at.stop, device=query.device)[:, None]
            )
            scores = scores.masked_fill(later, float("-inf"))
        yield at, scores, 1 - share.square()


def _repeated(heads: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Key or value heads, one per query head."""
    return heads.repeat_interleave(query.shape[1] // heads.shape[1], 1)


def _summed(gradient: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Gradients of repeated heads, summed for each head that was repeated."""
    rows, several, *rest = gradient.shape
    return gradient.view(rows, heads.shape[1], several // heads.shape[1], *rest).sum(2)
