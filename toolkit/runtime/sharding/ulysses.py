"""Ulysses sequence parallelism: ranks share the tokens of a sequence, and exchange tokens for heads around attention.

It is registered as an attention function of transformers, so it works for every model that uses that registry. To
DeepSpeed, sequence ranks are data-parallel ranks: gradients are summed and states sharded over all of them.
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
    """The model's attention can't be split by sequence; the message gives the reason."""


class SequenceGroup(TensorGroup):
    """The ranks that share the tokens of a sequence."""

    def exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-to-all: entry i of the first dimension goes to rank i, entry j of the result comes from rank j."""
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, tensor.contiguous(), group=self.group)
        return received


class SequenceShare:
    """One rank's slice of every sequence, and the attention that connects the slices."""

    def __init__(self, group: SequenceGroup) -> None:
        self._group = group
        self._mask: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._documents: list[DocumentSpan] = []
        """Documents of the current micro-batch."""
        self._masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}
        """Masks of the current micro-batch by window, shared by all layers and their backward passes."""

    def install(self, model: PreTrainedModel) -> None:
        """Make a model use this attention."""
        name = f"ulysses-{next(_numbers)}"
        ALL_ATTENTION_FUNCTIONS.register(name, self._attend)
        # transformers 5.22.2 builds masks from the tokens that the model sees, here only this rank's. Without this the
        # masks would have the wrong size; `_attend` builds them over all tokens instead.
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, lambda *args, **kwargs: None)
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            kind = model.config.model_type
            raise SequenceRefused(f"{kind} does not use transformers' registry of attention functions")

    def slice_batch(self, micro: MicroBatch) -> MicroBatch:
        """This rank's tokens of a micro-batch; masks and positions of all tokens are kept for attention."""
        assert micro.input_ids is not None, "images are not split by sequence"
        batch, length = micro.input_ids.shape
        if length % self._group.ranks:
            raise SequenceRefused(f"{length} tokens are not divisible by {self._group.ranks} ranks")
        self._mask, self._positions, self._masks = micro.attention_mask, micro.position_ids, {}
        self._documents = _documents(micro.position_ids, batch, length)
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
        if self._mask is None and all(piece.length <= (sliding_window or piece.length) for piece in self._documents):
            output = _by_document(query, key, value, self._documents, how)
        else:
            output = scaled_dot_product_attention(query, key, value, self._bias(query, sliding_window), **how)
        return self._to_tokens(output).transpose(1, 2).contiguous(), None

    def _refuse(self, module: torch.nn.Module, mask: torch.Tensor | None, others: dict[str, Any]) -> None:
        known = {"position_ids", "is_causal", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
        strange = sorted(k for k, v in others.items() if k not in known and v is not None and not isinstance(v, bool))
        if mask is not None or strange:
            what = "a bias of its own" if mask is not None else ", ".join(strange)
            raise SequenceRefused(
                f"{type(module).__name__} passes {what} to attention, which can't be split by sequence"
            )

    def _bias(self, query: torch.Tensor, window: int | None) -> torch.Tensor:
        """Attention bias for batches with padding or with a window shorter than a document."""
        kind = (window, query.dtype)
        if kind not in self._masks:
            allowed = self._allowed(query.shape[2], window, query.device)
            self._masks[kind] = torch.zeros_like(allowed, dtype=query.dtype).masked_fill_(~allowed, float("-inf"))
        return self._masks[kind]

    def _allowed(self, length: int, window: int | None, device: torch.device) -> torch.Tensor:
        """Which keys each query may attend to."""
        place = torch.arange(length, device=device)
        allowed = place[None, :] <= place[:, None]
        if window:
            allowed &= place[:, None] - place[None, :] < window
        allowed = allowed[None, None]
        if self._mask is not None:
            # A query without any key gives NaN, so padding attends to itself.
            visible = self._mask.bool()[:, None, None, :] | torch.eye(length, dtype=torch.bool, device=device)
            allowed = allowed & visible
        if self._positions is not None:
            document = (self._positions == 0).cumsum(-1)
            allowed = allowed & (document[:, None, :, None] == document[:, None, None, :])
        return allowed

    def _divisible(self, tensor: torch.Tensor, heads: int) -> torch.Tensor:
        """Key/value heads, repeated for every query head if their number is not divisible by the ranks."""
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
    """A document, or documents with the same bounds in several rows."""

    rows: slice
    start: int
    end: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.end - self.start


def _documents(positions: torch.Tensor | None, batch: int, length: int) -> list[DocumentSpan]:
    """Documents of packed sequences; if no row has more than one, all rows are one span."""
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
    """Causal attention inside every document: a mask over all pairs of tokens would not fit for long sequences."""
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
