"""Sequence parallelism: ranks share the tokens of a sequence, and attention connects the shares.

Ulysses ranks exchange tokens for heads around attention. Ring ranks (`ring.py`) pass keys and values on; if both are
used, each place of the ring is a group of ranks that exchange among themselves.

It is registered as an attention function of transformers, so it works for every model that uses that registry. To
DeepSpeed, sequence ranks are data-parallel ranks: gradients are summed and states sharded over all of them.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import deepspeed.comm as dist
import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from toolkit.errors import NoPlanFits
from toolkit.runtime.models.attention import NAMES, DocumentMask, UnknownAttention, current_mask, request
from toolkit.runtime.models.attention_kernels import CHOICES, Request, attend
from toolkit.runtime.models.documents import Documents
from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch
from toolkit.runtime.models.registry_attention import RegistryBloomAttention, set_function
from toolkit.runtime.sharding.collectives import TensorGroup
from toolkit.runtime.sharding.ring import RingGroup, ring_attention, use_flash_3
from toolkit.runtime.sharding.ring_blocks import Block, Reach, blocks, zigzag

Positions = Callable[[torch.Tensor], torch.Tensor]
"""Input ids of complete rows → the position of each token."""
OWN_RULE = "create_position_ids_from_input_ids"
"""RoBERTa and its kin count from the padding id on, and leave padding out (transformers 5.22.2)."""

_numbers = itertools.count()


class SequenceRefused(NoPlanFits):
    """The model's attention can't be split by sequence; the message gives the reason."""


class MaskRead(SequenceRefused, AttributeError):
    """A model computes with a mask that it does not have here; to `hasattr`, the mask lacks an attribute."""

    def __init__(self) -> None:
        super().__init__(
            "its attention computes with the mask of all pairs of tokens itself, to select keys or to add scores, and "
            "ranks that share a sequence have no such mask"
        )


class SharedMask(DocumentMask):
    """Documents of complete rows in the place of a mask. A model that uses it as a tensor is refused."""

    def __getattr__(self, name: str) -> Any:
        raise MaskRead

    def __getitem__(self, place: Any) -> Any:
        raise MaskRead

    def __add__(self, other: Any) -> Any:
        raise MaskRead

    __radd__ = __add__

    @classmethod
    def __torch_function__(cls, *given: Any) -> Any:
        """Called by torch for every operator that gets the mask."""
        raise MaskRead


class SequenceGroup(TensorGroup):
    """The ranks that share the tokens of a sequence."""

    def exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-to-all: entry i of the first dimension goes to rank i, entry j of the result comes from rank j."""
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, tensor.contiguous(), group=self.group)
        return received


class SequenceShare:
    """One rank's slice of every sequence, and the attention that connects the slices."""

    def __init__(self, group: SequenceGroup, ring: RingGroup | None = None, *, in_turn: bool = True) -> None:
        """`in_turn`: a micro-batch is cut right before its forward pass and done before the next one (no pipeline)."""
        self._group, self._ring, self._in_turn = group, ring, in_turn
        self._blocks: weakref.WeakKeyDictionary[Documents, dict[Reach, dict[int, list[Block]]]] = (
            weakref.WeakKeyDictionary()
        )
        """What this rank computes with the keys of each ring rank, by documents and what their queries see."""
        self._documents: Documents | None = None
        """Documents of the current micro-batch, over all tokens of its rows."""
        self._choice = CHOICES["by_document"]
        self._positions: Positions

    def install(self, model: PreTrainedModel) -> None:
        """Make a model use this attention, with the kernel that it was built for."""
        kernels = {registered: kernel for kernel, registered in NAMES.items()}
        self._choice = CHOICES[kernels.get(model.config._attn_implementation, "by_document")]
        if self._ring is not None and self._choice is CHOICES["flash_attention_3"] and (reason := use_flash_3()):
            raise SequenceRefused(f"{reason}; use model.attention: auto")
        name = f"ulysses-{next(_numbers)}"
        ALL_ATTENTION_FUNCTIONS.register(name, self._attend)
        # transformers 5.22.2 builds masks from the tokens that the model sees, here only this rank's. Without this the
        # masks would have the wrong size; documents of all tokens take their place.
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, _document_mask)
        if not set_function(model, name):
            kind = model.config.model_type
            raise SequenceRefused(f"{kind} does not use transformers' registry of attention functions")
        self._positions = positions_of(model)
        share_tables(model, self._group.ranks * (self._ring.ranks if self._ring else 1), self.own)

    def slice_batch(self, micro: MicroBatch) -> MicroBatch:
        """This rank's tokens of a micro-batch; the documents of all tokens are kept for attention."""
        documents = self.locate(micro)
        assert micro.input_ids is not None
        positions = self._positions(micro.input_ids) if micro.position_ids is None else micro.position_ids
        ids, labels, places = (self.own(tensor) for tensor in (micro.input_ids, micro.labels, positions))
        teacher = {name: self.own(tensor) for name, tensor in micro.tensors().items() if name.startswith("teacher_")}
        own = MicroBatch(ids, labels, None, places, documents=documents, **teacher)
        return own if micro.pairs is None or documents is None else self._with_pairs(own, micro, documents)

    def locate(self, micro: MicroBatch) -> Documents | None:
        """Documents of all tokens of a micro-batch, which are kept for attention; `SequenceRefused` for odd rows."""
        assert micro.input_ids is not None, "images are not split by sequence"
        length = micro.shape[1]
        parts = self._group.ranks * (2 * self._ring.ranks if self._ring else 1)
        if length % parts:
            raise SequenceRefused(f"{length} tokens are not divisible into {parts} parts")
        self._documents = micro.located().documents
        return self._documents

    def _with_pairs(self, own: MicroBatch, micro: MicroBatch, documents: Documents) -> MicroBatch:
        """This rank's tokens with what the loss of pairs needs; one of the ranks that share them counts the pairs."""
        assert micro.pairs is not None
        numbers = self.own(documents.numbers(micro.labels.device)).flatten()
        spans = torch.arange(len(documents.lengths) + 1, device=numbers.device, dtype=numbers.dtype)
        first = self._group.index == 0 and (self._ring is None or self._ring.index == 0)
        counted = (micro.labels != IGNORE).any(1) if first else torch.zeros_like(micro.pairs)
        return replace(
            own,
            pairs=micro.pairs * counted,
            reference=micro.reference,
            scores=micro.scores,
            own_bounds=torch.searchsorted(numbers, spans),
        )

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of rows, in its order."""
        if self._ring is not None:
            chunks = zigzag(rows.shape[1], self._ring.ranks, self._ring.index)
            rows = torch.cat([rows[:, chunk.start : chunk.stop] for chunk in chunks], 1)
        return rows.chunk(self._group.ranks, 1)[self._group.index]

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **settings: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention over all tokens, for this rank's heads. transformers' registry dictates the signature."""
        ask, documents = self._request(module, attention_mask, settings)
        key, value = (self._divisible(tensor, query.shape[1]) for tensor in (key, value))
        query, key, value = (self._to_heads(tensor) for tensor in (query, key, value))
        if self._ring is None:
            output = attend(self._choice, query, key, value, documents, ask).transpose(1, 2)
        else:
            work = self._work(documents, Reach(ask.causal, ask.window))
            output = ring_attention((query, key, value), ask, self._ring, work.__getitem__)
        return self._to_tokens(output).transpose(1, 2).contiguous(), None

    def _work(self, documents: Documents, reach: Reach) -> dict[int, list[Block]]:
        assert self._ring is not None
        ranks, own = self._ring.ranks, self._ring.index
        known = self._blocks.setdefault(documents, {})
        if reach not in known:
            known[reach] = {other: blocks(documents, ranks, own, other, reach) for other in range(ranks)}
        return known[reach]

    def _request(self, module: torch.nn.Module, mask: Any, settings: dict[str, Any]) -> tuple[Request, Documents]:
        """What a layer asks for, over all tokens; `SequenceRefused` if it can't be split by sequence."""
        kind = type(module).__name__
        if mask is None:  # the model makes no mask: its layers say which window they have
            assert self._documents is not None
            if not self._in_turn:
                what = f"{kind} makes no mask, so in a pipeline it can't tell the documents of its micro-batch"
                raise SequenceRefused(f"{what}; use pp 1")
            mask = DocumentMask(self._documents, causal=True, window=settings.get("sliding_window"))
        if not isinstance(mask, DocumentMask):
            raise SequenceRefused(f"{kind} passes a bias of its own to attention, which can't be split by sequence")
        try:
            ask = request(mask.causal, mask.window, settings)
        except UnknownAttention as error:
            raise SequenceRefused(f"{kind}: {error}, which can't be split by sequence") from None
        if self._ring is not None and ask.dropout > 0:
            raise SequenceRefused(f"{kind} has dropout in attention, which ring attention can't do; use sp")
        if ask.sinks is not None:
            ask = replace(ask, sinks=ask.sinks.chunk(self._group.ranks)[self._group.index])
        return ask, mask.documents

    def _divisible(self, tensor: torch.Tensor, heads: int) -> torch.Tensor:
        """Key/value heads, repeated for every query head if their number is not divisible by the ranks."""
        return (
            tensor
            if tensor.shape[1] % self._group.ranks == 0
            else tensor.repeat_interleave(heads // tensor.shape[1], 1)
        )

    def _to_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """(batch, heads, own tokens, width) → (batch, own heads, tokens, width)."""
        if self._group.ranks == 1:
            return tensor
        parts = torch.stack(tensor.chunk(self._group.ranks, 1))
        return torch.cat(list(_exchanged(parts, self._group)), 2)

    def _to_tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        """(batch, own heads, tokens, width) → (batch, heads, own tokens, width)."""
        if self._group.ranks == 1:
            return tensor
        parts = torch.stack(tensor.chunk(self._group.ranks, 2))
        return torch.cat(list(_exchanged(parts, self._group)), 1)


def _document_mask(**given: Any) -> DocumentMask:
    """Mask function in transformers' registry."""
    mask = current_mask(given["mask_function"], padded=False)
    if mask is None:
        raise SequenceRefused("the model has a mask of its own, which can't be split by sequence")
    return SharedMask(mask.documents, mask.causal, mask.window)


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


def positions_of(model: torch.nn.Module) -> Positions:
    """How a model numbers the tokens of rows that come without position ids."""
    for module in model.modules():
        if (rule := getattr(type(module), OWN_RULE, None)) is not None:
            return functools.partial(_by_rule, rule, module)
    return _counted


def _by_rule(rule: Callable[..., torch.Tensor], module: Any, ids: torch.Tensor) -> torch.Tensor:
    return rule(ids, module.padding_idx)


def _counted(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)


def share_tables(model: torch.nn.Module, parts: int, own: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make tables that number tokens by the shape of their input (BART and its kin) return this rank's rows.

    `parts`: ranks that share a row; `own`: this rank's tokens of complete rows.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and "PositionalEmbedding" in type(module).__name__:
            table: Any = module
            table.forward = functools.partial(_own_rows, table.forward, parts, own)
        elif isinstance(module, RegistryBloomAttention):
            module.placed = functools.partial(_own_bias, parts, own)


def _own_bias(parts: int, own: Callable[[torch.Tensor], torch.Tensor], bias: torch.Tensor) -> torch.Tensor:
    """Biases (rows, heads, keys) in proportion to the places of this rank's tokens, from those of places 0, 1, ..."""
    places = torch.arange(bias.shape[-1] * parts, device=bias.device)
    slope = bias[..., 1:2] - bias[..., :1]
    return (slope.float() * own(places[None])[0]).to(bias.dtype)


def _own_rows(
    inner: Callable[..., torch.Tensor],
    parts: int,
    own: Callable[[torch.Tensor], torch.Tensor],
    given: Any,
    *args: Any,
    position_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """What a table gives for complete rows, reduced to this rank's tokens. Their shape alone decides it.

    Position ids by row come with the micro-batch; those for all rows the model has counted itself.
    """
    if position_ids is not None and position_ids.dim() > 1:
        return inner(given, *args, position_ids=position_ids, **kwargs)
    if position_ids is not None:
        counted = torch.arange(len(position_ids) * parts, device=position_ids.device)
        table = inner(given, *args, position_ids=counted, **kwargs)
    else:
        rows, tokens = given.shape[:2] if torch.is_tensor(given) else given[:2]
        complete = (rows, tokens * parts)
        table = inner(given.new_zeros(complete) if torch.is_tensor(given) else complete, *args, **kwargs)
    return own(table) if table.dim() == 3 else own(table[None])[0]
