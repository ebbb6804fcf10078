"""All-to-all of rows between the ranks that hold the experts of a layer, part by part; gradients go back the same way.

A rank's experts are cut into parts. While one part computes, rows of the next one arrive and results of the one before
leave: `depart` starts the exchanges of all parts, `arrive` waits for one, `send_back` starts its way back, and `land`
waits for all of those. In the backward pass each of them does what its mirror image does in the forward pass.
Before that, `spread` puts the rows of tokens into the slots of the experts that they visit; afterwards `permuted` takes
results back to their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch

Sizes = list[list[int]]
"""Rows by part of the experts, and by rank."""
SPARE = 1
"""Rows of zeros after those that arrive for a part. They visit its first expert: a rank without any token would have no
gradients, and ranks that reduce gradients with it would wait."""


class ExpertGroup:
    """The ranks that experts are distributed over."""

    def __init__(self, group: Any, index: int, ranks: int) -> None:
        self.group, self.index, self.ranks = group, index, ranks

    def swap(self, counts: torch.Tensor) -> torch.Tensor:
        """All-to-all of equal shares: entry i goes to rank i, entry j of the result comes from rank j."""
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        return received

    def start(self, rows: torch.Tensor, into: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Any:
        """Start an all-to-all of rows: `sent[i]` of them go to rank i, `received[j]` come from rank j.

        Wait for the result before `into` is read."""
        return dist.all_to_all_single(
            into, rows.contiguous(), list(received), list(sent), group=self.group, async_op=True
        )


class Exchange:
    """One layer's rows between this rank and the ranks of their experts, for one micro-batch.

    Each direction of a pass has an exchange of its own, because both are under way at the same time.
    """

    def __init__(self, group: ExpertGroup, sent: Sizes, received: Sizes) -> None:
        """`sent`: this rank's rows for others; `received`: rows of others for this rank's experts."""
        self._group, self._sent, self._received = group, sent, received
        self.parts = len(sent)
        self._bounds = _bounds([sum(part) for part in sent])
        """Where each part begins and ends among this rank's rows."""
        self._works: list[Any] = [None] * self.parts
        """What each part waits for, and the rows that are being read until then."""
        self._pieces: list[torch.Tensor | None] = [None] * self.parts
        self._rows: torch.Tensor | None = None

    def send(self, rows: torch.Tensor, *, last_first: bool = False) -> None:
        """Start sending rows that are sorted by part, every part to the ranks of its experts."""
        for part in reversed(range(self.parts)) if last_first else range(self.parts):
            low, high = self._bounds[part]
            total = sum(self._received[part])
            into = rows.new_empty(total + SPARE, rows.shape[1])
            into[total:] = 0
            self._start(part, rows[low:high], into[:total], self._sent[part], self._received[part])
            self._pieces[part] = into

    def receive(self, part: int) -> torch.Tensor:
        """Rows that other ranks have sent for a part, and the spare ones."""
        self._wait(part)
        piece, self._pieces[part] = self._pieces[part], None
        assert piece is not None
        return piece

    def send_back(self, part: int, rows: torch.Tensor) -> None:
        """Start returning a part's rows, without the spare ones, to where they came from."""
        if self._rows is None:
            self._rows = rows.new_empty(self._bounds[-1][1], rows.shape[1])
        low, high = self._bounds[part]
        total = sum(self._received[part])
        self._start(part, rows[:total], self._rows[low:high], self._received[part], self._sent[part])

    def receive_back(self) -> torch.Tensor:
        """This rank's rows of all parts."""
        for part in range(self.parts):
            self._wait(part)
        rows, self._rows = self._rows, None
        assert rows is not None
        return rows

    def _start(self, part: int, rows: torch.Tensor, *how: Any) -> None:
        self._works[part] = self._group.start(rows, *how), rows

    def _wait(self, part: int) -> None:
        (work, _), self._works[part] = self._works[part], None
        work.wait()


def _bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    ends = [sum(sizes[: part + 1]) for part in range(len(sizes))]
    return list(zip([0, *ends[:-1]], ends, strict=True))


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: Exchange) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        exchange.send(rows)
        return tuple(rows.new_empty(0) for _ in range(exchange.parts))

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[Any, ...]:
        return ctx.exchange.receive_back(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: torch.Tensor, exchange: Exchange, part: int) -> torch.Tensor:
        ctx.how = exchange, part
        return exchange.receive(part)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        exchange, part = ctx.how
        exchange.send_back(part, gradient)
        return gradient.new_empty(0), None, None


class _SendBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: Exchange, part: int) -> torch.Tensor:
        ctx.how = exchange, part
        exchange.send_back(part, rows)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        exchange, part = ctx.how
        return exchange.receive(part), None, None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tickets: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.receive_back()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        exchange = ctx.exchange
        exchange.send(gradient, last_first=True)  # the order in which their backward passes wait
        return None, *(gradient.new_empty(0) for _ in range(exchange.parts))


def depart(rows: torch.Tensor, exchange: Exchange) -> tuple[torch.Tensor, ...]:
    """Start sending rows to their experts; a ticket for each part, by which autograd knows what depends on it."""
    return _Depart.apply(rows, exchange)  # type: ignore[no-untyped-call, no-any-return]


def arrive(ticket: torch.Tensor, exchange: Exchange, part: int) -> torch.Tensor:
    """Wait for the rows of a part."""
    return _Arrive.apply(ticket, exchange, part)  # type: ignore[no-untyped-call, no-any-return]


def send_back(rows: torch.Tensor, exchange: Exchange, part: int) -> torch.Tensor:
    """Start returning the rows of a part; a ticket for `land`."""
    return _SendBack.apply(rows, exchange, part)  # type: ignore[no-untyped-call, no-any-return]


def land(tickets: Sequence[torch.Tensor], exchange: Exchange) -> torch.Tensor:
    """Wait for the results of all parts."""
    return _Land.apply(exchange, *tickets)  # type: ignore[no-untyped-call, no-any-return]


@dataclass(frozen=True)
class Route:
    """Where the visits of a micro-batch go in one layer."""

    source: torch.Tensor
    """Visit in each slot, in the order of parts, ranks and experts; the number of visits if the slot is empty."""
    slots: torch.Tensor
    """Slot of each visit; the number of slots if the visit was dropped."""
    sent: Sizes
    received: Sizes
    arriving: torch.Tensor
    """Slots from each rank for this rank's experts: ranks × parts × experts of a part."""
    padded: bool
    """Whether slots may be empty, and visits dropped."""


def counted(places: torch.Tensor, number: int) -> torch.Tensor:
    """How often each of the first so many places occurs."""
    return torch.zeros(number, dtype=torch.long, device=places.device).scatter_add_(0, places, torch.ones_like(places))


def slots_of(places: torch.Tensor, experts: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The visit in each of `most` slots per expert, and the slot of each visit, in the order of visits.

    `places`: each visit's expert, `experts` for visits to none. Visits beyond the last slot of their expert have none.
    """
    order = places.argsort(stable=True)
    counts = counted(places, experts + 1)
    chosen = places[order]
    number = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[chosen]
    held = (chosen < experts) & (number < most)
    slot = torch.where(held, chosen * most + number, experts * most)
    source = torch.full((experts * most + 1,), len(order), dtype=order.dtype, device=order.device)
    source[slot] = order
    slots = torch.empty_like(order)
    slots[order] = slot
    return source[:-1], slots


def inverse_of(order: torch.Tensor) -> torch.Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


def _picked(rows: torch.Tensor, numbers: torch.Tensor, *, padded: bool) -> torch.Tensor:
    """Rows of these numbers; if `padded`, zeros for numbers after the last row.

    `index_select` copies complete rows; on a CPU indexing takes eight times as long."""
    if not padded:
        return rows.index_select(0, numbers)
    found = rows.index_select(0, numbers.clamp_max(len(rows) - 1))
    return found.masked_fill_((numbers >= len(rows))[:, None], 0)


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, padded: bool) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.padded = padded
        return _picked(rows, order, padded=padded)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (inverse,) = ctx.saved_tensors
        return _picked(gradient, inverse, padded=ctx.padded), None, None, None


def permuted(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, *, padded: bool = False) -> torch.Tensor:
    """Rows in another order; the backward pass reads rows instead of adding to them, so it is deterministic."""
    return _Permuted.apply(rows, order, inverse, padded)  # type: ignore[no-untyped-call, no-any-return]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, route: Route, visits: int) -> torch.Tensor:
        ctx.save_for_backward(route.slots)
        ctx.visits, ctx.padded = visits, route.padded
        return _picked(tokens, route.source // visits, padded=route.padded)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (slots,) = ctx.saved_tensors
        rows = _picked(gradient, slots, padded=ctx.padded)
        return rows.view(-1, ctx.visits, gradient.shape[-1]).sum(1), None, None


def spread(tokens: torch.Tensor, route: Route, visits: int) -> torch.Tensor:
    """A row for every visit of a token, in its slot."""
    return _Spread.apply(tokens, route, visits)  # type: ignore[no-untyped-call, no-any-return]
