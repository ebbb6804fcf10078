"""What a rank's memory is for: weights, optimizer, gradients, buffers, activations, from storages at known moments."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Standing:
    """Bytes that are held between two steps."""

    weights: int
    optimizer: int
    """Masters and moments; what is a weight itself counts there."""
    all: int


def parts(standing: Standing, after_backward: int, peak: int) -> dict[str, int]:
    """Bytes by part; they sum to the peak."""
    gradients = max(0, min(after_backward, peak) - standing.all)
    return {
        "weights": standing.weights,
        "optimizer": standing.optimizer,
        "gradients": gradients,
        "buffers": max(0, standing.all - standing.weights - standing.optimizer),
        "activations": max(0, peak - standing.all - gradients),
    }


def standing(all_bytes: int, kind: str) -> Standing:
    """Now, on devices of a kind, of all that this process holds: models and optimizers are found, whoever made them."""
    weights: dict[int, int] = {}
    optimizer: dict[int, int] = {}
    models, optimizers = _living()
    for model in models:
        for parameter in model._parameters.values():
            # Under ZeRO 3 the shard is the weight; the parameter itself is what is gathered now.
            _add(weights, getattr(parameter, "ds_tensor", parameter), kind)
    for one in optimizers:
        for tensor in _tensors(one):
            _add(optimizer, tensor, kind)
    own = sum(size for place, size in optimizer.items() if place not in weights)
    return Standing(sum(weights.values()), own, all_bytes)


def _living() -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at some objects' class warns of deprecations
        objects = gc.get_objects()
        models = [item for item in objects if isinstance(item, torch.nn.Module)]
        return models, [item for item in objects if isinstance(item, torch.optim.Optimizer)]


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for master, state in optimizer.state.items():  # ZeRO 3 shows its masters here only
        yield from (value for value in (master, *state.values()) if isinstance(value, torch.Tensor))


def _add(storages: dict[int, int], tensor: torch.Tensor | None, kind: str) -> None:
    if tensor is None or tensor.device.type != kind:
        return
    storage = tensor.untyped_storage()
    if storage.nbytes():
        storages[storage.data_ptr()] = storage.nbytes()
