"""Models without a head, whose result is the last hidden states: embeddings are made of them."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from transformers import AutoModel, PretrainedConfig, PreTrainedModel


class Embedder:
    """In place of transformers' `AutoModelFor…`: models whose output has the last hidden states as `logits`.

    Engines, splits and trials read one tensor of a model's output, under that name.
    """

    @staticmethod
    def from_config(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
        """A model with fresh weights."""
        return _named(AutoModel.from_config(config, **_without_pooler(config), **options))

    @staticmethod
    def from_pretrained(path: str, *, config: PretrainedConfig, **options: Any) -> PreTrainedModel:
        """A model with the weights of a directory or hub id."""
        return _named(AutoModel.from_pretrained(path, config=config, **_without_pooler(config), **options))


def _without_pooler(config: PretrainedConfig) -> dict[str, bool]:
    """BERT and its kin have a layer after the first token's state, which would get no gradient."""
    kind = AutoModel._model_mapping.get(type(config), None)
    kind = kind[0] if isinstance(kind, tuple) else kind
    has = kind is not None and "add_pooling_layer" in inspect.signature(kind.__init__).parameters
    return {"add_pooling_layer": False} if has else {}


def _named(model: Any) -> PreTrainedModel:
    """Let a model's output have `logits`. Not by a hook: peft 0.21 calls `forward` of the model inside directly."""
    model.forward = functools.partial(_forward, model, type(model).forward)
    return model


def _forward(model: torch.nn.Module, inner: Any, *args: Any, **kwargs: Any) -> Any:
    output = inner(model, *args, **kwargs)
    output.logits = output.last_hidden_state
    return output


def prepared(config: PretrainedConfig, task: str | None, num_labels: int | None) -> PretrainedConfig:
    """A config with what embeddings and scores need.

    Embeddings are computed twice, and both times must give the same: no dropout. Decoders find the last token of a text
    by the padding id, which many configs leave out: rows are then padded with the id that ends a text.
    """
    if task == "embedding":
        for name, value in list(config.to_dict().items()):
            if isinstance(value, float) and ("dropout" in name or name.endswith(("_pdrop", "drop_rate"))):
                setattr(config, name, 0.0)
    if task == "classification" and num_labels == 1 and getattr(config, "pad_token_id", None) is None:
        end = getattr(config, "eos_token_id", None)
        config.pad_token_id = (end[0] if isinstance(end, list) else end) or 0
    return config
