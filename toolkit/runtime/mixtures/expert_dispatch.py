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
from toolkit.runtime.layers.remembered import remembered
from toolkit.runtime.mixtures.balance_loss import Limit, capacity
from toolkit.runtime.mixtures.expert_exchange import (
    SPARE,
    Exchange,
    ExpertGroup,
    Route,
    Sizes,
    arrive,
    counted,
    depart,
    inverse_of,
    land,
    permuted,
    send_back,
    slots_of,
    spread,
)
from toolkit.runtime.sharding.styles import wrap

ARGUMENTS = ("hidden states", "numbers of the chosen experts", "their weights")
"""What the experts of a mixture are called with, in transformers 5.22.2."""
UNDER_ADAPTER = ".base_layer"
"""What peft 0.21 adds to the name of a module that it wraps."""
Run = Callable[..., torch.Tensor]


class ExpertsRefused(NoPlanFits):
    """The model's experts can't be distributed; the message gives the reason."""


@dataclass(frozen=True)
class Experts:
    """The experts of one layer: a module whose parameters have one entry per expert."""

    name: str
    """Name of the module, or of the outermost adapter around it."""
    module: torch.nn.Module
    number: int
    adapters: tuple[Any, ...] = ()
    """LoRA adapters on the module's parameters; peft 0.21 wraps the module once for each."""

    def factors(self) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        """Both matrices of every adapter: (experts · rank) × inputs, and outputs × (rank · experts)."""
        for adapter in self.adapters:
            for first, second in zip(adapter.lora_A.values(), adapter.lora_B.values(), strict=True):
                yield first.weight, second.weight

    def parameters(self) -> list[torch.nn.Parameter]:
        """Everything that is distributed with the experts."""
        return [*self.module.parameters(recurse=False), *(factor for pair in self.factors() for factor in pair)]


def find_experts(model: torch.nn.Module) -> list[Experts]:
    """The experts of every layer of a model; `ExpertsRefused` if there are none of a known form."""
    found = list(_experts(model))
    if not found:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise ExpertsRefused(
            f"no experts of {kind} can be distributed: they must be one module with a tensor per projection, called "
            f"with {', '.join(ARGUMENTS)}"
        )
    return found


def _experts(model: torch.nn.Module) -> Iterator[Experts]:
    modules = dict(model.named_modules())
    for name, module in modules.items():
        own = dict(module.named_parameters(recurse=False))
        number = getattr(module, "num_experts", None)
        if not isinstance(number, int) or not any(p.ndim == 3 for p in own.values()):
            continue
        given = tuple(inspect.signature(type(module).forward).parameters)[1:]
        if len(given) == len(ARGUMENTS) and all(p.shape[0] == number for p in own.values()):
            adapters = []
            while name.endswith(UNDER_ADAPTER):
                name = name.removesuffix(UNDER_ADAPTER)
                adapters.append(modules[name])
            yield Experts(name, module, number, tuple(adapters))


def distribute(
    experts: Sequence[Experts], group: ExpertGroup, *, overlaps: bool = False, limit: Limit | None = None
) -> None:
    """Let modules that hold this rank's experts compute for the tokens of all ranks of the group.

    `overlaps`: exchange and compute in turns, part by part; `limit`: of the visits that experts take.
    """
    for each in experts:
        own = each.number // group.ranks
        parts = exchange_parts(own) if overlaps else 1
        for holder in (each.module, *each.adapters):
            holder.num_experts = own
        for adapter in each.adapters:
            adapter.get_delta_weight = functools.partial(_delta, adapter)
        names = tuple(name for name, _ in each.module.named_parameters(recurse=False))
        wrap(each.module, functools.partial(_Dispatch, each.module, names, group, own, parts, limit or Limit(0.0)))


def _delta(adapter: Any, name: str) -> torch.Tensor:
    """What an adapter adds to its experts. peft 0.21.2 takes a single expert for a linear layer, whose weight may be
    the transpose; it can go when adapters of one gpt-oss expert per rank are exact without it."""
    left, right, scale = adapter.get_delta_factors(name)
    added: torch.Tensor = scale * (left @ right)
    return added


@dataclass(frozen=True)
class _Dispatch:
    module: Any
    names: tuple[str, ...]
    """Names of its parameters; while adapters are added to them they are no parameters of the module."""
    group: ExpertGroup
    own: int
    """Experts of each rank."""
    parts: int
    """Parts that these are cut into."""
    limit: Limit
    run: Run
    """The model's own experts, for rows that each visit one of this rank's."""

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        tokens, visits = top_k_index.shape
        parts = self.parts if _has_grouped_products(self.module, hidden_states.dtype) else 1
        route = remembered(lambda: self._route(top_k_index, top_k_weights, parts))
        there, back = (Exchange(self.group, route.sent, route.received) for _ in range(2))
        weights = self._weights(parts)
        # Nested, so that no copy of all rows is held longer than the next step needs it.
        tickets = depart(spread(hidden_states, route, visits), there)
        visited = land(
            [
                send_back(
                    self._computed(arrive(ticket, there, part), route.arriving[:, part], weights[part]), back, part
                )
                for part, ticket in enumerate(tickets)
            ],
            back,
        )
        visited = permuted(visited, route.slots, route.source, padded=route.padded).view(tokens, visits, -1)
        return (visited * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)

    def _route(self, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, parts: int) -> Route:
        """Sort visits by expert. Without a limit per expert the host waits here, for the sizes of the exchange."""
        places = _places(top_k_index.reshape(-1), self.group.ranks, self.own, parts)
        if self.limit.applies and torch.is_grad_enabled():
            return self._limited(places, top_k_weights.reshape(-1), top_k_index.shape, parts)
        order = places.argsort(stable=True)
        counts = counted(places, self.group.ranks * self.own).view(parts, self.group.ranks, -1)
        counts = counts.transpose(0, 1).contiguous()
        arriving = self.group.swap(counts)
        sent, received = exchange_sizes(counts, arriving, len(order))
        return Route(order, inverse_of(order), sent, received, arriving, padded=False)

    def _limited(self, places: torch.Tensor, weights: torch.Tensor, shape: Sequence[int], parts: int) -> Route:
        """Every expert has the same number of slots, known before routers are: nothing waits for the device.

        Micro-batches of all ranks have the same shape. Dropped visits have no weight."""
        all_experts = self.group.ranks * self.own
        most = min(
            capacity(shape[0], shape[1], all_experts, self.limit.factor), shape[0]
        )  # a token visits an expert once
        places = torch.where(weights == 0, all_experts, places)
        source, slots = slots_of(places, all_experts, most)
        sizes = [[most * self.own // parts] * self.group.ranks for _ in range(parts)]
        arriving = places.new_full((self.group.ranks, parts, self.own // parts), most)
        return Route(source, slots, sizes, sizes, arriving, padded=True)

    def _weights(self, parts: int) -> list[dict[str, torch.Tensor]]:
        """Weights of the experts of every part."""
        own = {name: getattr(self.module, name) for name in self.names}
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
        sizes = arriving.sum(0)
        sizes[0] += SPARE
        if arriving.shape[1] == 1:
            return _grouped(self.module, weights, rows, numbers, sizes)
        order = numbers.argsort(stable=True)
        inverse = inverse_of(order)
        placed = permuted(rows, order, inverse)
        del rows
        return permuted(_grouped(self.module, weights, placed, numbers[order], sizes), inverse, order)


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


def exchange_sizes(sent: torch.Tensor, received: torch.Tensor, rows: int) -> tuple[Sizes, Sizes]:
    """Rows for and from each rank by part, on the host, of at most `rows`; both tensors: ranks × parts × experts.

    It waits for the device once per layer and micro-batch: an exchange without a limit per expert has sizes that only
    the routers know, and torch.distributed takes sizes from the host. A rehearsal assumes even loads here.
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
