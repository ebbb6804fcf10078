"""Sequence parallel for models with one result per text: classes, scores, embeddings.

The base model computes this rank's tokens only. Its last hidden states are gathered, so that heads and pooling see
complete texts on every sequence rank. The first of these ranks counts the texts; the others have a loss of 0, and their
tokens get their gradients from the first one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit.recipe.model_section import ONE_RESULT, Model
from toolkit.runtime.models.build import unadapted
from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch
from toolkit.runtime.sharding.token_collectives import gather_tokens
from toolkit.runtime.sharding.ulysses import SequenceGroup, SequenceShare

Slice = Callable[[MicroBatch], MicroBatch]
"""How a micro-batch becomes that of one sequence rank."""


def install(share: SequenceShare, group: SequenceGroup, section: Model, models: Sequence[Any]) -> Slice:
    """Make a model, or its stages, attend over the tokens of all sequence ranks; return how to cut a micro-batch."""
    for model in models:
        share.install(model)
    if section.task not in ONE_RESULT:
        return share.slice_batch
    texts = CompleteTexts(share, group)
    for model in models:
        texts.install(unadapted(model, section).base_model)
    return texts.slice_batch


class CompleteTexts:
    """Micro-batches of complete texts, whose tokens are shared inside the base model."""

    def __init__(self, share: SequenceShare, group: SequenceGroup) -> None:
        self._share, self._group = share, group
        self._shape = torch.Size()
        """Rows and tokens of the current micro-batch."""

    def install(self, base: PreTrainedModel) -> None:
        """Let a base model, which is the model without its head, compute this rank's tokens of complete rows.

        Not by hooks: peft 0.21 calls `forward` of the model inside directly.
        """
        names = list(inspect.signature(type(base).forward).parameters)[1:]
        base.forward = functools.partial(self._forward, names, base.forward)

    def slice_batch(self, micro: MicroBatch) -> MicroBatch:
        """The complete micro-batch; all but the first rank have no labels that count."""
        located = micro.located()
        self._share.locate(located)
        self._shape = located.shape
        if self._group.index == 0:
            return located
        return replace(located, labels=torch.full_like(located.labels, IGNORE))

    def _forward(self, names: list[str], inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The base model's forward pass on this rank's tokens; its output has the states of all tokens."""
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        own = {name: self._own(value) for name, value in given.items() if name != "attention_mask"}
        if "position_ids" in names and given.get("position_ids") is None:
            places = torch.arange(self._shape[1], device=given["input_ids"].device).expand(self._shape)
            own["position_ids"] = self._share.own(places)
        output = inner(**own)
        states = output.last_hidden_state
        whole = gather_tokens(states, self._group)
        for name in ("last_hidden_state", "logits"):  # embedding models have both
            if getattr(output, name, None) is states:
                setattr(output, name, whole)
        return output

    def _own(self, value: Any) -> Any:
        """This rank's part of what has a value per token; anything else as it is."""
        return self._share.own(value) if torch.is_tensor(value) and value.shape[:2] == self._shape else value
