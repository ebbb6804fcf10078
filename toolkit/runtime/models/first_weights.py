"""Sources of the first weights: new ones by seed, a safetensors checkpoint, or a full model on the host."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from transformers import (
    PreTrainedModel,
)
from transformers.utils import cached_file

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


Ranges = Sequence[tuple[int, int]]
"""First element and last + 1 of ranges in a flattened parameter."""


class Weights(Protocol):
    """Reads parameters by their first name in the model."""

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """These full parameters on the host; nothing is kept."""

    def read_ranges(self, ranges: Mapping[str, Ranges]) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """These ranges of elements of each flattened parameter."""

    def fill_buffers(self, model: torch.nn.Module) -> None:
        """Give the skeleton's buffers the values that come with the weights, if any do."""


class ScratchWeights:
    """New weights. A layer, or a module outside the layers, is initialised as a unit from a seed of its own.

    Hugging Face's `_init_weights` does it on a temporary copy of the unit. In transformers 5.22.2 a few types set some
    parameters in their constructors instead (apertus, ernie4_5_moe, openai-gpt). Those stay NaN here, and are read from
    a full model that is built on demand.
    """

    def __init__(self, skeleton: PreTrainedModel, seed: int, whole: Callable[[], torch.nn.Module]) -> None:
        self._model = skeleton
        self._seed = seed
        self._whole = whole

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        units: dict[str, list[str]] = {}
        for name in names:
            units.setdefault(unit_of(self._model, name), []).append(name)
        missed = []
        for unit, wanted in units.items():
            module = self._initialised(unit)
            for name in wanted:
                tensor = module.get_parameter(name.removeprefix(f"{unit}.")).detach()
                if tensor.is_floating_point() and bool(tensor.isnan().any()):
                    missed.append(name)
                else:
                    yield name, tensor
        if missed:
            yield from HostWeights(self._whole()).read(missed)

    def read_ranges(self, ranges: Mapping[str, Ranges]) -> Iterator[tuple[str, list[torch.Tensor]]]:
        for name, full in self.read(ranges):
            yield name, [full.flatten()[low:high] for low, high in ranges[name]]

    def fill_buffers(self, model: torch.nn.Module) -> None:
        """A skeleton's buffers are new already."""

    def _initialised(self, unit: str) -> torch.nn.Module:
        module: torch.nn.Module = copy.deepcopy(self._model.get_submodule(unit))
        for part in module.modules():
            for key, parameter in part._parameters.items():
                if parameter is not None and parameter.is_meta:
                    part._parameters[key] = _blank(parameter)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(_seed_of(self._seed, unit))
            _initialise(module, _initialiser(self._model, unit))
        return module


class FileWeights:
    """Weights of a safetensors checkpoint with the model's names."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self._files[name], []).append(name)
        for path, wanted in by_file.items():
            with safe_open(path, framework="pt") as file:
                for name in wanted:
                    yield name, file.get_tensor(name).float()

    def read_ranges(self, ranges: Mapping[str, Ranges]) -> Iterator[tuple[str, list[torch.Tensor]]]:
        by_file: dict[str, list[str]] = {}
        for name in ranges:
            by_file.setdefault(self._files[name], []).append(name)
        for path, wanted in by_file.items():
            with safe_open(path, framework="pt") as file:
                for name in wanted:
                    yield name, [_flat_range(file, name, low, high) for low, high in ranges[name]]

    def fill_buffers(self, model: torch.nn.Module) -> None:
        for name, buffer in model.named_buffers():
            if name in self._files:
                with safe_open(self._files[name], framework="pt") as file:
                    buffer.copy_(file.get_tensor(name))


class HostWeights:
    """Weights of a full model on the host, for checkpoints that transformers converts while loading."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors = dict(model.named_parameters())
        self._buffers = dict(model.named_buffers())

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, self._tensors[name].detach()

    def read_ranges(self, ranges: Mapping[str, Ranges]) -> Iterator[tuple[str, list[torch.Tensor]]]:
        for name, wanted in ranges.items():
            yield name, [self._tensors[name].detach().flatten()[low:high] for low, high in wanted]

    def fill_buffers(self, model: torch.nn.Module) -> None:
        for name, buffer in model.named_buffers():
            buffer.copy_(self._buffers[name])


def _flat_range(file: Any, name: str, low: int, high: int) -> torch.Tensor:
    """Elements of a flattened tensor in a safetensors file; only the rows around them are read."""
    rows = file.get_slice(name)
    shape = rows.get_shape()
    if not shape or low >= high:
        return file.get_tensor(name).flatten()[low:high]  # type: ignore[no-any-return]
    row_elements = math.prod(shape[1:])
    first, last = low // row_elements, -(-high // row_elements)
    return rows[first:last].flatten()[low - first * row_elements : high - first * row_elements]  # type: ignore[no-any-return]


def checkpoint_files(path: str) -> dict[str, str]:
    """Tensor name → file of a safetensors checkpoint, local or on the hub; empty if there is none."""
    index = cached_file(path, INDEX, _raise_exceptions_for_missing_entries=False)
    if index is not None:
        places = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        local = {file: cached_file(path, file) for file in set(places.values())}
        return {name: str(local[file]) for name, file in places.items()}
    single = cached_file(path, SINGLE, _raise_exceptions_for_missing_entries=False)
    if single is None:
        return {}
    with safe_open(single, framework="pt") as file:
        return {name: str(single) for name in file.keys()}  # noqa: SIM118 - not a mapping


def unit_of(model: torch.nn.Module, name: str) -> str:
    """Name of the unit of a parameter: its layer, or the largest module around it that has no layers."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        module = model.get_submodule(".".join(parts[:depth]))
        if isinstance(module, torch.nn.ModuleList):
            return ".".join(parts[: depth + 1])
        if not any(isinstance(inner, torch.nn.ModuleList) for inner in module.modules()):
            return ".".join(parts[:depth])
    return ".".join(parts[:-1])


def _seed_of(seed: int, unit: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{unit}".encode(), digest_size=8).digest(), "big") >> 1


def _blank(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """A parameter filled with NaN; values that are still NaN afterwards were not initialised."""
    blank = torch.zeros_like(parameter, device="cpu")
    if blank.is_floating_point():
        blank.fill_(float("nan"))
    return torch.nn.Parameter(blank, requires_grad=parameter.requires_grad)


def _initialiser(model: PreTrainedModel, unit: str) -> PreTrainedModel:
    """The innermost model around a unit; parts of a composite model have their own `_init_weights`."""
    around = model
    parts = unit.split(".")
    for depth in range(1, len(parts)):
        module = model.get_submodule(".".join(parts[:depth]))
        if isinstance(module, PreTrainedModel):
            around = module
    return around


def _initialise(module: torch.nn.Module, model: PreTrainedModel) -> None:
    """Initialise children first, as transformers does."""
    for child in module.children():
        _initialise(child, child if isinstance(child, PreTrainedModel) else model)
    model._init_weights(module)
