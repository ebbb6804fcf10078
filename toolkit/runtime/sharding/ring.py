"""Ring attention: ranks share the tokens of a sequence, and keys and values travel round them.

A sequence is cut into twice as many chunks as the ring has ranks; rank i holds chunks i and 2·cp − 1 − i (zig-zag), so
that causal work is even. What a rank computes with the keys of another one is a list of rectangles: inside a chunk each
document is a causal square, and between two chunks a document that reaches into both is a full rectangle. So packed
documents need no mask. Results of rectangles are merged by their log-sum-exp. In the backward pass gradients of keys
and values travel with them and are home after one turn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from toolkit.errors import first_line
from toolkit.runtime.distributed.process_group import send_wait
from toolkit.runtime.layers.recompute import kept_result
from toolkit.runtime.models.documents import Documents


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


def zigzag(length: int, ranks: int, index: int) -> list[range]:
    """The two chunks of a sequence that a rank holds, in its order."""
    width = length // (2 * ranks)
    return [range(chunk * width, (chunk + 1) * width) for chunk in (index, 2 * ranks - 1 - index)]


@dataclass(frozen=True)
class Rectangle:
    """Queries of this rank that see keys of another one, by their places there."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool


def rectangles(documents: Documents, ranks: int, own: int, other: int) -> list[Rectangle]:
    """What rank `own` computes with the keys of rank `other`."""
    rows = list(_spans(documents))
    alike = all(row == rows[0] for row in rows)
    found = []
    for number, spans in enumerate(rows[:1] if alike else rows):
        which = slice(0, len(rows)) if alike else slice(number, number + 1)
        chunks = (_placed(documents.row_length, ranks, index) for index in (own, other))
        for (q_at, q), (k_at, k) in itertools.product(*chunks):
            if k.start > q.start:
                continue  # keys of later tokens
            for start, end in spans:
                a, b, c, d = max(start, q.start), min(end, q.stop), max(start, k.start), min(end, k.stop)
                if a < b and c < d:
                    queries, keys = slice(q_at + a, q_at + b), slice(k_at + c, k_at + d)
                    found.append(Rectangle(which, queries, keys, q == k))
    return found


def _spans(documents: Documents) -> Iterator[list[tuple[int, int]]]:
    """First token and last + 1 of every document, row by row."""
    row: list[tuple[int, int]] = []
    for length in documents.lengths:
        start = row[-1][1] if row else 0
        row.append((start, start + length))
        if start + length == documents.row_length:
            yield row
            row = []


def _placed(length: int, ranks: int, index: int) -> list[tuple[int, range]]:
    """Chunks of a rank, each with what leads from a token's place in the sequence to its place on the rank."""
    first, second = zigzag(length, ranks, index)
    return [(-first.start, first), (len(first) - second.start, second)]


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


Work = Callable[[int], list[Rectangle]]


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, ring: RingGroup, work: Work
) -> torch.Tensor:
    """Attention of this rank's queries over the whole ring: (rows, heads, own tokens, width) each.

    `work`: rectangles by the rank whose keys they read. Key heads may be fewer than query heads.
    """
    width = value.shape[-1]
    value = pad(value, (0, query.shape[-1] - width)) if width < query.shape[-1] else value
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    found: torch.Tensor = _Ring.apply(query, key, value, scale, ring, work)  # type: ignore[no-untyped-call]
    return found[..., :width]


def _turn(
    query: torch.Tensor, pair: torch.Tensor, scale: float, ring: RingGroup, work: Work
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) of the queries over the keys and values of all ranks; the next ones come meanwhile."""
    wide = torch.promote_types(query.dtype, torch.float32)
    total = torch.zeros_like(query, dtype=wide)
    lse = torch.full(query.shape[:-1], -math.inf, dtype=wide, device=query.device)
    for step in range(ring.ranks):
        coming = ring.start(pair) if step + 1 < ring.ranks else None
        for one in work((ring.index - step) % ring.ranks):
            at, there = (one.rows, slice(None), one.queries), (one.rows, slice(None), one.keys)
            part, part_lse = _forward(query[at], pair[0][there], pair[1][there], one.causal, scale)
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
        scale: float,
        ring: RingGroup,
        work: Work,
    ) -> torch.Tensor:
        query = query.contiguous()
        output, lse = kept_result(lambda: _turn(query, torch.stack([key, value]), scale, ring, work))
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.how = scale, ring, work
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        scale, ring, work = ctx.how
        gradient = gradient.contiguous()
        wide = torch.promote_types(query.dtype, torch.float32)
        of_query = torch.zeros_like(query, dtype=wide)
        pair = torch.stack([key, value])
        on_its_way: tuple[torch.Tensor, list[Any]] | None = None
        for step in range(ring.ranks):
            coming = ring.start(pair) if step + 1 < ring.ranks else None
            of_pair = torch.zeros_like(pair, dtype=wide)
            for one in work((ring.index - step) % ring.ranks):
                at, there = (one.rows, slice(None), one.queries), (one.rows, slice(None), one.keys)
                read = gradient[at], query[at], pair[0][there], pair[1][there], output[at], lse[at]
                of_q, of_k, of_v = _backward(read, one.causal, scale)
                of_query[at] += of_q
                of_pair[0][there] += of_k
                of_pair[1][there] += of_v
            if on_its_way is not None:  # what the ranks before have for the same keys
                of_pair += finish(on_its_way)
            on_its_way = ring.start(of_pair)
            pair = finish(coming) if coming is not None else pair
        assert on_its_way is not None
        of_pair = finish(on_its_way)  # after one turn it is home
        return of_query.to(query.dtype), of_pair[0].to(key.dtype), of_pair[1].to(value.dtype), None, None, None


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) of one rectangle by torch's flash kernels, which take fewer key heads as they are."""
    aten = torch.ops.aten
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            query, key, value, 0.0, causal, scale=scale
        )
    output, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
    return output, lse


def _backward(
    given: tuple[torch.Tensor, ...], causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of one rectangle. `given`: gradient, query, key, value, and output and log-sum-exp over all keys."""
    aten, (_, query, key, *_) = torch.ops.aten, given
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            *given, 0.0, causal, scale=scale
        )
    none = torch.empty(0, dtype=torch.long, device=query.device)  # of random numbers for dropout
    lengths = query.shape[2], key.shape[2]
    found = aten._scaled_dot_product_flash_attention_backward(
        *given, None, None, *lengths, 0.0, causal, none, none, scale=scale
    )
    return found[0], found[1], found[2]
