"""Sends tokens to their experts on other ranks and back: unless the recipe limits experts, no token is dropped.

Every rank routes its own tokens. Rows are sorted by expert and exchanged; a rank runs the model's own code on its
experts with what it received; results come back and are weighed where they came from.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.integrations import moe

from toolkit.errors import NoPlanFits
from toolkit.plans.router_balance import exchange_parts
from toolkit.runtime.mixtures.expert_exchange import (
    SPARE,
    Exchange,
    ExpertGroup,
    Sizes,
    arrive,
    depart,
    land,
    send_back,
)
from toolkit.runtime.sharding.styles import wrap

ARGUMENTS = ("hidden states", "numbers of the chosen experts", "their weights")
"""What the experts of a mixture are called with, in transformers 5.22.2."""
Run = Callable[..., torch.Tensor]


class ExpertsRefused(NoPlanFits):
    """The model's experts can't be distributed; the message gives the reason."""


@dataclass(frozen=True)
class Experts:
    """The experts of one layer: a module whose parameters have one entry per expert."""

    name: str
    module: torch.nn.Module
    number: int


def find_experts(model: torch.nn.Module) -> list[Experts]:
    """The experts of every layer of a model; `ExpertsRefused` if there are none of a known form."""
    found = list(_experts(model))
    if not found:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise ExpertsRefused(
            f"no experts of {kind} can be distributed: they must be one module with a tensor per projection, called "
            f"with {', '.join(ARGUMENTS)}"
        )
    if any("base_layer" in each.name.split(".") for each in found):
        raise ExpertsRefused(
            "adapters on experts can't be distributed with them; name linear layers in model.lora.targets, such as "
            "[q_proj, k_proj, v_proj, o_proj]"
        )
    return found


def _experts(model: torch.nn.Module) -> Iterator[Experts]:
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        number = getattr(module, "num_experts", None)
        if not isinstance(number, int) or not any(p.ndim == 3 for p in own.values()):
            continue
        given = tuple(inspect.signature(type(module).forward).parameters)[1:]
        if len(given) == len(ARGUMENTS) and all(p.shape[0] == number for p in own.values()):
            yield Experts(name, module, number)


def distribute(
    experts: Sequence[Experts], group: ExpertGroup, *, overlaps: bool = False, limited: bool = False
) -> None:
    """Let modules that hold this rank's experts compute for the tokens of all ranks of the group.

    `overlaps`: exchange and compute in turns, part by part; `limited`: leave out visits without weight.
    """
    for each in experts:
        own = each.number // group.ranks
        parts = exchange_parts(own) if overlaps else 1
        each.module.num_experts = own  # type: ignore[assignment]
        wrap(each.module, functools.partial(_Dispatch, each.module, group, own, parts, limited))


@dataclass(frozen=True)
class _Dispatch:
    module: Any
    group: ExpertGroup
    own: int
    """Experts of each rank."""
    parts: int
    """Parts that these are cut into."""
    limited: bool
    run: Run
    """The model's own experts, for rows that each visit one of this rank's."""

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        tokens, visits = top_k_index.shape
        parts = self.parts if _has_grouped_products(self.module, hidden_states.dtype) else 1
        places = _places(top_k_index.reshape(-1), self.group.ranks, self.own, parts)
        if self.limited:  # a place after all others
            places = torch.where(top_k_weights.reshape(-1) == 0, self.group.ranks * self.own, places)
        order = places.argsort(stable=True)
        counts = self._counted(places, parts)
        arriving = self.group.swap(counts)
        sent, received = exchange_sizes(counts, arriving, len(order))
        there, back = (Exchange(self.group, sent, received) for _ in range(2))
        weights = self._weights(parts)
        # Nested, so that no copy of all rows is held longer than the next step needs it.
        tickets = depart(self._within_limits(_spread(hidden_states, order, visits), sent), there)
        visited = land(
            [
                send_back(self._computed(arrive(ticket, there, part), arriving[:, part], weights[part]), back, part)
                for part, ticket in enumerate(tickets)
            ],
            back,
        )
        if self.limited:
            visited = torch.nn.functional.pad(visited, (0, 0, 0, len(order) - len(visited)))
        visited = _permuted(visited, _inverse(order), order).view(tokens, visits, -1)
        return (visited * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)

    def _counted(self, places: torch.Tensor, parts: int) -> torch.Tensor:
        """Rows for each rank's experts: ranks × parts × experts of a part."""
        all_experts = self.group.ranks * self.own
        counts = torch.zeros(all_experts + 1, dtype=torch.long, device=places.device)
        counts.scatter_add_(0, places, torch.ones_like(places))
        return counts[:all_experts].view(parts, self.group.ranks, -1).transpose(0, 1).contiguous()

    def _within_limits(self, rows: torch.Tensor, sent: Sizes) -> torch.Tensor:
        """Rows without those at the end that no expert takes."""
        return rows[: sum(map(sum, sent))] if self.limited else rows

    def _weights(self, parts: int) -> list[dict[str, torch.Tensor]]:
        """Weights of the experts of every part."""
        own = dict(self.module.named_parameters(recurse=False))
        if parts == 1:
            return [own]
        pieces = {name: weight.chunk(parts) for name, weight in own.items()}
        return [{name: piece[part] for name, piece in pieces.items()} for part in range(parts)]

    def _computed(
        self, rows: torch.Tensor, arriving: torch.Tensor, weights: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """What a part of this rank's experts returns for rows that came rank by rank."""
        numbers = _experts_of(arriving, len(rows) - SPARE)
        if not _has_grouped_products(self.module, rows.dtype):
            return self.run(rows, numbers[:, None], rows.new_ones(len(rows), 1))
        order = numbers.argsort(stable=True)
        inverse = _inverse(order)
        sizes = arriving.sum(0)
        sizes[0] += SPARE
        placed = _permuted(rows, order, inverse)
        del rows
        return _permuted(_grouped(self.module, weights, placed, numbers[order], sizes), inverse, order)


def _places(chosen: torch.Tensor, ranks: int, own: int, parts: int) -> torch.Tensor:
    """Where experts are in the order of parts, then ranks, then experts of a part."""
    if parts == 1:
        return chosen
    numbers = torch.arange(ranks * own, device=chosen.device).view(parts, ranks, own // parts)
    return numbers.transpose(0, 1).reshape(-1)[chosen]


def _has_grouped_products(module: Any, dtype: torch.dtype) -> bool:
    """Whether a module would run transformers' grouped products; torch 2.13's have no float64."""
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return chosen == "grouped_mm" and dtype != torch.float64


def _grouped(
    module: Any, weights: Mapping[str, torch.Tensor], rows: torch.Tensor, numbers: torch.Tensor, sizes: torch.Tensor
) -> torch.Tensor:
    """Experts of rows that are sorted by expert, as transformers' `grouped_mm_experts_forward` (5.22.2) computes them.

    That function sorts, weighs, sorts back and sums over visits: five copies of all rows that are not needed here. A
    test compares both; if its parts are renamed, expert parallel fails in the first forward pass.
    """
    ends = sizes.cumsum(0, dtype=torch.int32)
    up, turned = ("gate_up_proj" if module.has_gate else "up_proj"), module.is_transposed

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        bias = weights[f"{name}_bias"][numbers] if module.has_bias else None
        product: torch.Tensor = moe._grouped_linear(x, weights[name], ends, bias=bias, is_transposed=turned)
        return product

    inner = linear(rows, up)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    found = linear(inner, "down_proj")
    return module.post_expert_norm(found) if module.has_post_expert_norm else found


def _inverse(order: torch.Tensor) -> torch.Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


def exchange_sizes(sent: torch.Tensor, received: torch.Tensor, rows: int) -> tuple[Sizes, Sizes]:
    """Rows for and from each rank by part, on the host, of at most `rows`; both tensors: ranks × parts × experts.

    It waits for the device once per layer and pass: an exchange without a limit per expert has sizes that only the
    routers know, and torch.distributed takes sizes from the host. A rehearsal assumes even loads here.
    """
    both: list[Sizes] = torch.stack([sent.sum(2).T, received.sum(2).T]).tolist()
    assert sum(map(sum, both[0])) <= rows, "every row goes to one expert"
    return both[0], both[1]


def _experts_of(arriving: torch.Tensor, rows: int) -> torch.Tensor:
    """The own expert of every row that arrives: rows come rank by rank, and from each rank expert by expert.

    Spare rows at the end visit the first expert.
    """
    ranks, own = arriving.shape
    numbers = torch.arange(own, device=arriving.device).repeat(ranks)
    found = numbers.repeat_interleave(arriving.flatten(), output_size=rows)
    return torch.nn.functional.pad(found, (0, SPARE))


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse], None, None


def _permuted(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Rows in another order; the backward pass reads rows instead of adding to them, so it is deterministic."""
    return _Permuted.apply(rows, order, inverse)  # type: ignore[no-untyped-call, no-any-return]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, order: torch.Tensor, visits: int) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.visits = visits
        return tokens[order // visits]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (order,) = ctx.saved_tensors
        places = _inverse(order)
        return gradient[places].view(-1, ctx.visits, gradient.shape[-1]).sum(1), None, None


def _spread(tokens: torch.Tensor, order: torch.Tensor, visits: int) -> torch.Tensor:
    """A row for every visit of a token, in the order of experts."""
    return _Spread.apply(tokens, order, visits)  # type: ignore[no-untyped-call, no-any-return]
