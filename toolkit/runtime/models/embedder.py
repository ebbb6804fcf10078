"""Models whose result is the last hidden states, of which embeddings are made; and noise on the embeddings of tokens.

The noise (NEFTune) of an element depends on the seed, the step, the sample, the token's place and the channel, and on
nothing else. So every split of a batch trains on the same noise. Written by hand: that of TRL and transformers is drawn
from a rank's random generator, and changes with the number of ranks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from toolkit.runtime.models.documents import Documents
from toolkit.runtime.models.micro_batch import MicroBatch


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


_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
_MIX = (0x45D9F3B, 0x119DE1F3)
"""Odd factors of integer hashes (Knuth's, those of murmur3, and those of Chris Wellons)."""


class _Current(threading.local):
    """The micro-batch of the forward pass that runs in this thread, if it gets noise."""

    micro: MicroBatch | None = None


_current = _Current()


def row_salts(seed: int, step: int, sample_ids: np.ndarray) -> torch.Tensor:
    """A number for each row, from which its noise follows."""
    common = (seed * _FACTORS[0] ^ (step + 1) * _FACTORS[1]) & 0xFFFFFFFF
    rows = (sample_ids.astype(np.int64) & 0xFFFFFFFF) * _FACTORS[2] & 0xFFFFFFFF
    return torch.from_numpy((rows ^ common).astype(np.uint32).view(np.int32).copy())


@contextlib.contextmanager
def noisy(micro: MicroBatch) -> Iterator[None]:
    """Embeddings inside this context get the noise of a micro-batch."""
    _current.micro = micro if micro.noise is not None else None
    try:
        yield
    finally:
        _current.micro = None


def add_noise(embedding: torch.nn.Module, alpha: float) -> None:
    """Add noise of size `alpha` to what an embedding returns, where the micro-batch asks for it."""

    def after(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        micro = _current.micro
        if micro is None:
            return None
        assert micro.noise is not None
        assert micro.documents is not None
        if output.shape[:2] != micro.shape:
            raise RuntimeError(
                f"embeddings of {tuple(output.shape)} for ids of {tuple(micro.shape)}: no place for noise"
            )
        return output + noise(micro.noise, micro.documents, output.shape[-1], alpha).to(output.dtype)

    embedding.register_forward_hook(after)


@torch.no_grad()
def noise(salts: torch.Tensor, documents: Documents, width: int, alpha: float) -> torch.Tensor:
    """[rows, tokens, channels]: uniform between ± alpha / √(tokens of the document · channels)."""
    places = torch.arange(documents.row_length * width, dtype=torch.int32, device=salts.device)
    found = torch.stack([_uniform(places ^ salt) for salt in salts])
    lengths = documents.bounds.to(salts.device, non_blocking=True).diff()[documents.numbers(salts.device)]
    sizes = alpha / (lengths.float() * width).sqrt()
    return found.view(len(salts), -1, width) * sizes[..., None]


def _uniform(bits: torch.Tensor) -> torch.Tensor:
    """Numbers between -1 and 1, from integers that need not be random."""
    for factor in _MIX:
        bits = (bits ^ ((bits >> 16) & 0xFFFF)) * factor
    return ((bits ^ (bits >> 15)) & 0xFFFF).float() / 2**15 - (1 - 2**-16)
