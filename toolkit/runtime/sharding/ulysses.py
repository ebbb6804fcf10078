"""Sequence parallel in the way of Ulysses: ranks share a sequence's tokens, and exchange tokens for heads in attention.

It enters through transformers' registry of attention functions, so every model that uses it can be cut this way.
To DeepSpeed, sequence ranks are data-parallel ranks: gradients are summed and states sharded over all of them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from toolkit.errors import NoPlanFits
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.sharding.collectives import TensorGroup

_numbers = itertools.count()


class SequenceRefused(NoPlanFits):
    """The model's attention can't be cut by sequence; the message says why."""


class SequenceGroup(TensorGroup):
    """Ranks that share the tokens of a sequence."""

    def exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        """Entry i of the first dimension goes to rank i; entry j of the result came from rank j."""
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, tensor.contiguous(), group=self.group)
        return received


class SequenceShare:
    """One rank's share of every sequence, and the attention that makes the shares see each other."""

    def __init__(self, group: SequenceGroup) -> None:
        self._group = group
        self._mask: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._pieces: list[DocumentSpan] = []
        """Documents of the micro-batch at hand."""
        self._masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}
        """Of the micro-batch at hand, by window: layers share one, and none keeps its own for the backward pass."""

    def install(self, model: PreTrainedModel) -> None:
        """Make a model attend through this share."""
        name = f"ulysses-{next(_numbers)}"
        ALL_ATTENTION_FUNCTIONS.register(name, self._attend)
        # Each rank would make masks for its own tokens only: attention makes them here, over all tokens.
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, lambda *args, **kwargs: None)
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            kind = model.config.model_type
            raise SequenceRefused(f"{kind} does not use transformers' registry of attention functions")

    def slice_batch(self, micro: MicroBatch) -> MicroBatch:
        """This rank's tokens of a micro-batch; what attention must know of all tokens is kept here."""
        assert micro.input_ids is not None, "images are not cut by sequence"
        batch, length = micro.input_ids.shape
        if length % self._group.ranks:
            raise SequenceRefused(f"{length} tokens can't be shared by {self._group.ranks} ranks")
        self._mask, self._positions, self._masks = micro.attention_mask, micro.position_ids, {}
        self._pieces = _pieces(micro.position_ids, batch, length)
        positions = micro.position_ids
        if positions is None:
            positions = torch.arange(length, device=micro.input_ids.device).expand(batch, length)
        width = length // self._group.ranks
        own = slice(self._group.index * width, (self._group.index + 1) * width)
        return MicroBatch(micro.input_ids[:, own], micro.labels[:, own], None, positions[:, own])

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **settings: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention over all tokens, for this rank's heads. transformers' registry dictates the signature."""
        scaling: float | None = settings.pop("scaling", None)
        dropout: float = settings.pop("dropout", 0.0)
        sliding_window: int | None = settings.pop("sliding_window", None)
        self._refuse(module, attention_mask, settings)
        key, value = (self._divisible(tensor, query.shape[1]) for tensor in (key, value))
        query, key, value = (self._to_heads(tensor) for tensor in (query, key, value))
        how: dict[str, Any] = {"dropout_p": dropout, "scale": scaling, "enable_gqa": key.shape[1] != query.shape[1]}
        if self._mask is None and all(piece.length <= (sliding_window or piece.length) for piece in self._pieces):
            output = _by_document(query, key, value, self._pieces, how)
        else:
            output = scaled_dot_product_attention(query, key, value, self._bias(query, sliding_window), **how)
        return self._to_tokens(output).transpose(1, 2).contiguous(), None

    def _refuse(self, module: torch.nn.Module, mask: torch.Tensor | None, others: dict[str, Any]) -> None:
        known = {"position_ids", "is_causal", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
        strange = sorted(k for k, v in others.items() if k not in known and v is not None and not isinstance(v, bool))
        if mask is not None or strange:
            what = "a bias of its own" if mask is not None else ", ".join(strange)
            raise SequenceRefused(f"{type(module).__name__} gives attention {what}, which is not cut by sequence")

    def _bias(self, query: torch.Tensor, window: int | None) -> torch.Tensor:
        """What is added to scores where padding or a window cuts through documents."""
        kind = (window, query.dtype)
        if kind not in self._masks:
            allowed = self._allowed(query.shape[2], window, query.device)
            self._masks[kind] = torch.zeros_like(allowed, dtype=query.dtype).masked_fill_(~allowed, float("-inf"))
        return self._masks[kind]

    def _allowed(self, length: int, window: int | None, device: torch.device) -> torch.Tensor:
        """Which keys a query may see."""
        place = torch.arange(length, device=device)
        allowed = place[None, :] <= place[:, None]
        if window:
            allowed &= place[:, None] - place[None, :] < window
        allowed = allowed[None, None]
        if self._mask is not None:
            # A query without any key gives NaN: padding sees itself.
            visible = self._mask.bool()[:, None, None, :] | torch.eye(length, dtype=torch.bool, device=device)
            allowed = allowed & visible
        if self._positions is not None:
            document = (self._positions == 0).cumsum(-1)
            allowed = allowed & (document[:, None, :, None] == document[:, None, None, :])
        return allowed

    def _divisible(self, tensor: torch.Tensor, heads: int) -> torch.Tensor:
        """Key/value heads as they are if every rank gets some, else once for every query head that uses them."""
        return (
            tensor
            if tensor.shape[1] % self._group.ranks == 0
            else tensor.repeat_interleave(heads // tensor.shape[1], 1)
        )

    def _to_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """(batch, heads, own tokens, width) → (batch, own heads, tokens, width)."""
        parts = torch.stack(tensor.chunk(self._group.ranks, 1))
        return torch.cat(list(_exchanged(parts, self._group)), 2)

    def _to_tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        """(batch, own heads, tokens, width) → (batch, heads, own tokens, width)."""
        parts = torch.stack(tensor.chunk(self._group.ranks, 2))
        return torch.cat(list(_exchanged(parts, self._group)), 1)


@dataclass(frozen=True)
class DocumentSpan:
    """A document, or one in the same place of several rows."""

    rows: slice
    start: int
    end: int

    @property
    def length(self) -> int:
        """Tokens."""
        return self.end - self.start


def _pieces(positions: torch.Tensor | None, batch: int, length: int) -> list[DocumentSpan]:
    """The documents of packed sequences; rows without any other document than one are one piece together."""
    if positions is None:
        return [DocumentSpan(slice(0, batch), 0, length)]
    starts: list[list[int]] = [[0] for _ in range(batch)]
    for row, place in torch.nonzero(positions[:, 1:] == 0).tolist():
        starts[row].append(place + 1)
    if all(row == [0] for row in starts):
        return [DocumentSpan(slice(0, batch), 0, length)]
    return [
        DocumentSpan(slice(row, row + 1), start, end)
        for row, own in enumerate(starts)
        for start, end in itertools.pairwise([*own, length])
    ]


def _by_document(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pieces: list[DocumentSpan], how: dict[str, Any]
) -> torch.Tensor:
    """Causal attention inside every document: a mask over all pairs of tokens would have no room on long sequences."""
    rows: dict[int, list[torch.Tensor]] = {}
    for piece in pieces:
        q, k, v = (tensor[piece.rows, :, piece.start : piece.end] for tensor in (query, key, value))
        rows.setdefault(piece.rows.start, []).append(scaled_dot_product_attention(q, k, v, is_causal=True, **how))
    return torch.cat([torch.cat(row, 2) for row in rows.values()])


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        ctx.group = group
        return group.exchange(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.exchange(gradient), None


def _exchanged(parts: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    return _Exchange.apply(parts, group)  # type: ignore[no-untyped-call, no-any-return]
