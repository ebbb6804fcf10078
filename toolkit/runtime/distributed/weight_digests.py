"""Compares the first weights of ranks: each hashes what it holds, and digests of the same elements must be equal.

Without this, ranks with other files or libraries would silently train different models.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence

import torch

from toolkit.runtime.distributed.process_group import gather_objects

CHUNK_WORDS = 2**16
"""Words of 8 bytes that are summed into one number."""
WORD_BYTES = 8
LAYER = re.compile(r"(.*?\.\d+)\.")
"""The name of a layer at the beginning of a parameter's."""
Digests = Mapping[tuple[str, str], str]
"""(Parameter, part of it that a rank holds or '' for all) → digest."""


def compare(held: Digests) -> None:
    """Stop if two ranks have different digests of the same part of a parameter; all ranks call it.

    Layers are compared first: with 16,384 ranks a list of every parameter of each would take gigabytes.
    """
    layers = _by_layer(held)
    differing = {layer for _, _, layer in _differences(gather_objects(layers))}
    if not differing:
        return
    own = {", ".join(filter(None, key)): value for key, value in held.items() if _layer(*key) in differing}
    found = list(_differences(gather_objects(own)))
    if not found:  # expert and tensor slices of the same number: these ranks hold different parameters of the layer
        return
    rank, first, what = found[0]
    raise RuntimeError(
        f"rank {rank} starts with other weights than rank {first} in "
        f"{len({name for _, _, name in found})} parameters, first {what}; "
        "check that every rank has the same recipe, seed, library versions and model files"
    )


def _by_layer(held: Digests) -> dict[str, str]:
    """One digest per layer, or module outside the layers, and part that a rank holds."""
    hashes: dict[str, hashlib.blake2b] = {}
    for key in sorted(held):
        made = hashes.setdefault(_layer(*key), hashlib.blake2b(digest_size=8))
        made.update(f"{key[0]} {held[key]} ".encode())
    return {layer: made.hexdigest() for layer, made in hashes.items()}


def _layer(name: str, part: str) -> str:
    found = LAYER.match(name)
    return f"{found[1] if found else name.rpartition('.')[0]}, {part}"


def _differences(ranks: Sequence[Mapping[str, str]]) -> Iterable[tuple[int, int, str]]:
    """(Rank, first rank with the same key, key) of every digest that is not the first rank's."""
    first: dict[str, tuple[int, str]] = {}
    for rank, digests in enumerate(ranks):
        for key, value in digests.items():
            before, expected = first.setdefault(key, (rank, value))
            if expected != value:
                yield rank, before, key


def digest(tensor: torch.Tensor) -> str:
    """A hash of a tensor's bytes. They are summed on its device with odd weights; only the sums are hashed here."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % WORD_BYTES:
        data = data.clone()
    words = data[: data.numel() // WORD_BYTES * WORD_BYTES].view(torch.int64)
    weights = torch.arange(1, 2 * CHUNK_WORDS, 2, device=data.device)
    sums = [(chunk * weights[: chunk.numel()]).sum() for chunk in torch.split(words, CHUNK_WORDS)]
    made = hashlib.blake2b(data[words.numel() * WORD_BYTES :].cpu().numpy().tobytes(), digest_size=16)
    if sums:
        made.update(torch.stack(sums).cpu().numpy().tobytes())
    return made.hexdigest()
