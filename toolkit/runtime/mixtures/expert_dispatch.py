"""Sends tokens to their experts on other ranks and back: no expert has a limit, so no token is dropped.

Every rank routes its own tokens. Rows are sorted by expert and exchanged; a rank runs the model's own code on its
experts with what it received; results come back and are weighed where they came from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch
from transformers.integrations import moe

from toolkit.errors import NoPlanFits
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


class ExpertGroup:
    """The ranks that experts are distributed over."""

    def __init__(self, group: Any, index: int, ranks: int) -> None:
        self.group, self.index, self.ranks = group, index, ranks

    def swap(self, counts: torch.Tensor) -> torch.Tensor:
        """All-to-all of equal shares: entry i goes to rank i, entry j of the result comes from rank j."""
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        return received

    def send(self, rows: torch.Tensor, into: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> None:
        """All-to-all of rows: `sent[i]` of them go to rank i, `received[j]` come from rank j."""
        dist.all_to_all_single(into, rows.contiguous(), list(received), list(sent), group=self.group)


def distribute(experts: Sequence[Experts], group: ExpertGroup) -> None:
    """Let modules that hold this rank's experts compute for the tokens of all ranks of the group."""
    for each in experts:
        own = each.number // group.ranks
        each.module.num_experts = own  # type: ignore[assignment]
        wrap(each.module, lambda inner, module=each.module, own=own: _Dispatch(inner, module, group, own))  # type: ignore[misc]


@dataclass(frozen=True)
class _Dispatch:
    run: Run
    """The model's own experts, for rows that each visit one of this rank's."""
    module: Any
    group: ExpertGroup
    own: int
    """Experts of each rank."""

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        ranks, (tokens, visits) = self.group.ranks, top_k_index.shape
        chosen = top_k_index.reshape(-1)
        order = chosen.argsort(stable=True)
        counts = torch.zeros(ranks * self.own, dtype=torch.long, device=chosen.device)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        arriving = self.group.swap(counts.view(ranks, self.own))
        sent, received = exchange_sizes(counts.view(ranks, self.own), arriving, len(order))
        # Nested, so that no copy of all rows is held longer than the next step needs it.
        computed = self._computed(
            _exchanged(_spread(hidden_states, order, visits), sent, received, self.group, spare=1), arriving
        )
        visited = _permuted(_exchanged(computed, received, sent, self.group, spare=0), _inverse(order), order)
        del computed
        visited = visited.view(tokens, visits, -1)
        return (visited * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)

    def _computed(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        """What this rank's experts return for rows that came rank by rank, without the last, spare one."""
        numbers = _experts_of(arriving, len(rows) - 1)
        if not _has_grouped_products(self.module, rows.dtype):
            return self.run(rows, numbers[:, None], rows.new_ones(len(rows), 1))[:-1]
        order = numbers.argsort(stable=True)
        inverse = _inverse(order)
        sizes = arriving.sum(0)
        sizes[0] += 1
        placed = _permuted(rows, order, inverse)
        del rows
        return _permuted(_grouped(self.module, placed, numbers[order], sizes), inverse, order)[:-1]


def _has_grouped_products(module: Any, dtype: torch.dtype) -> bool:
    """Whether a module would run transformers' grouped products; torch 2.13's have no float64."""
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return chosen == "grouped_mm" and dtype != torch.float64


def _grouped(module: Any, rows: torch.Tensor, numbers: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Experts of rows that are sorted by expert, as transformers' `grouped_mm_experts_forward` (5.22.2) computes them.

    That function sorts, weighs, sorts back and sums over visits: five copies of all rows that are not needed here. A
    test compares both; if its parts are renamed, expert parallel fails in the first forward pass.
    """
    ends = sizes.cumsum(0, dtype=torch.int32)
    up, turned = ("gate_up_proj" if module.has_gate else "up_proj"), module.is_transposed

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        bias = getattr(module, f"{name}_bias")[numbers] if module.has_bias else None
        product: torch.Tensor = moe._grouped_linear(x, getattr(module, name), ends, bias=bias, is_transposed=turned)
        return product

    inner = linear(rows, up)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    found = linear(inner, "down_proj")
    return module.post_expert_norm(found) if module.has_post_expert_norm else found


def _inverse(order: torch.Tensor) -> torch.Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


def exchange_sizes(sent: torch.Tensor, received: torch.Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Rows for and from each rank, on the host; `rows` are sent in all.

    It waits for the device once per layer and pass: an exchange without a limit per expert has sizes that only the
    routers know, and torch.distributed takes sizes from the host. A rehearsal assumes even loads here.
    """
    both: list[list[int]] = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    assert sum(both[0]) == rows, "every row goes to one expert"
    return both[0], both[1]


def _experts_of(arriving: torch.Tensor, rows: int) -> torch.Tensor:
    """The own expert of every row that arrives: rows come rank by rank, and from each rank expert by expert.

    The spare row at the end visits the first expert: a rank without any token would have no gradients, and ranks that
    reduce gradients with it would wait.
    """
    ranks, own = arriving.shape
    numbers = torch.arange(own, device=arriving.device).repeat(ranks)
    found = numbers.repeat_interleave(arriving.flatten(), output_size=rows)
    return torch.nn.functional.pad(found, (0, 1))


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


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: ExpertGroup, spare: int
    ) -> torch.Tensor:
        ctx.how = sent, received, group
        total = sum(received)
        into = rows.new_empty(total + spare, rows.shape[1])
        into[total:] = 0
        group.send(rows, into[:total], sent, received)
        return into

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        sent, received, group = ctx.how
        into = gradient.new_empty(sum(sent), gradient.shape[1])
        group.send(gradient[: sum(received)], into, received, sent)
        return into, None, None, None, None


def _exchanged(
    rows: torch.Tensor, sent: list[int], received: list[int], group: ExpertGroup, spare: int
) -> torch.Tensor:
    """Rows of other ranks for this one, and some spare rows of zeros; gradients go back the same way."""
    return _Exchange.apply(rows, sent, received, group, spare)  # type: ignore[no-untyped-call, no-any-return]
