"""NEFTune: uniform noise on the embeddings of training samples.

The noise of an element depends on the seed, the step, the sample, the token's place and the channel, and on nothing
else. So every split of a batch trains on the same noise. Written by hand: that of TRL and transformers is drawn from a
rank's random generator, and changes with the number of ranks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from toolkit.runtime.models.documents import Documents
from toolkit.runtime.models.micro_batch import MicroBatch

_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
_MIX = (0x45D9F3B, 0x119DE1F3)
"""Odd factors of integer hashes (Knuth's, and those of murmur3 and of Chris Wellons)."""


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
def of(micro: MicroBatch) -> Iterator[None]:
    """Embeddings inside this context get the noise of a micro-batch."""
    _current.micro = micro if micro.noise is not None else None
    try:
        yield
    finally:
        _current.micro = None


def install(embedding: torch.nn.Module, alpha: float) -> None:
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
