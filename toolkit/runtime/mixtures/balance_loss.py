"""Balancing losses of one router on the tokens of a micro-batch, as functions of its logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from toolkit.runtime.models.micro_batch import MicroBatch

Slice = Callable[[MicroBatch], MicroBatch]
"""This rank's tokens of a micro-batch."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of a micro-batch that this rank routes."""

    documents: torch.Tensor
    """Number of each token's document."""
    counts: torch.Tensor
    """1 for a token, 0 for padding."""
    lengths: torch.Tensor
    """Tokens of each document, on all sequence ranks together."""
    total: int
    """Tokens of the micro-batch without padding, on all sequence ranks together."""

    @classmethod
    def of(cls, micro: MicroBatch, total: int, own: Slice) -> Tokens:
        """Tokens of a located micro-batch. Document numbers are cut as the micro-batch is, by `own`."""
        documents, mask = micro.documents, micro.attention_mask
        assert micro.input_ids is not None, "routers are balanced for language models"
        assert documents is not None, "the micro-batch is located"
        place = micro.input_ids.device
        numbers = documents.numbers(place).long()
        seen = torch.ones_like(numbers) if mask is None else mask.long()
        cut = own(MicroBatch(numbers, seen, position_ids=micro.position_ids, documents=documents))
        assert cut.input_ids is not None
        lengths = torch.tensor(documents.lengths, dtype=torch.float32).to(place, non_blocking=True)
        return cls(cut.input_ids.flatten(), cut.labels.flatten().float(), lengths, total)


def routed_tokens(micro: MicroBatch) -> int:
    """Tokens of a micro-batch without padding; call it while the micro-batch is on the host."""
    return micro.shape.numel() if micro.attention_mask is None else int(micro.attention_mask.sum())


def expert_counts(tokens: Tokens, experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """How many tokens of each document go to each expert: documents × experts."""
    flat = tokens.documents[:, None] * num_experts + experts
    counts = tokens.counts.new_zeros(tokens.lengths.numel() * num_experts)
    counts.scatter_add_(0, flat.flatten(), tokens.counts[:, None].expand_as(experts).flatten())
    return counts.view(-1, num_experts)


class Limit:
    """How many visits experts take. The balancer drops the others; experts on several ranks get slots for so many."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        """Most visits of an expert relative to an even share; 0: no limit."""
        self.applies = False
        """Whether visits of the running micro-batch are dropped; evaluations drop nothing."""


def capacity(tokens: int, visits: int, num_experts: int, factor: float) -> int:
    """Most visits that an expert takes of so many tokens with so many visits each."""
    return math.ceil(factor * tokens * visits / num_experts)


def within_capacity(experts: torch.Tensor, counts: torch.Tensor, num_experts: int, most: int) -> torch.Tensor:
    """Which visits are among the first `most` of their expert, in the order of tokens; padding visits none.

    `experts`: chosen experts, a row per token; `counts`: 1 for a token, 0 for padding."""
    chosen = torch.where(counts[:, None] > 0, experts, num_experts).flatten()
    order = chosen.argsort(stable=True)
    loads = torch.zeros(num_experts + 1, dtype=torch.long, device=chosen.device)
    loads.scatter_add_(0, chosen, torch.ones_like(chosen))
    firsts = loads.cumsum(0) - loads
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    kept = (places - firsts[chosen] < most) & (chosen < num_experts)
    return kept.view_as(experts)


def sequence_loss(scores: torch.Tensor, tokens: Tokens, counts: torch.Tensor) -> torch.Tensor:
    """Sum over documents of their tokens times `experts · Σ f · P`: f is the share of a document's tokens that goes to
    an expert, P the expert's mean score. It is `top_k` per token if both are even.
    """
    shares = (counts / tokens.lengths[:, None]).to(scores.dtype)
    return scores.shape[-1] * ((scores * shares[tokens.documents]).sum(-1) * tokens.counts).sum()


def micro_batch_loss(scores: torch.Tensor, tokens: Tokens, chosen: torch.Tensor, rows: int) -> torch.Tensor:
    """This router's part of transformers' loss (5.22.2) over a micro-batch.

    `chosen`: tokens of each expert over all layers; `rows`: tokens times layers. transformers multiplies the sums over
    all layers, so layers balance each other.
    """
    summed = (scores * tokens.counts[:, None]).sum(0)
    return scores.shape[-1] * (summed * chosen.to(scores.dtype)).sum() / rows**2


def z_loss(logits: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Sum over tokens of the squared log-sum-exp of their logits."""
    return (logits.logsumexp(-1).square() * tokens.counts).sum()
