"""Sources of the first weights: new by seed, a safetensors checkpoint, a full model on the host, with adapters."""

from __future__ import annotations

import copy
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from toolkit.errors import BadInput
from toolkit.runtime.distributed.weight_digests import compare, digest
from toolkit.runtime.models.parameter_shards import layout_of, own_slice
from toolkit.runtime.models.stored_tensors import Stored, TensorFile, flat_range, full_tensor, own_part

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


Ranges = Sequence[tuple[int, int]]
"""First element and last + 1 of ranges in a flattened parameter."""


class Weights(Protocol):
    """Reads parameters by their first name in the model, in whatever precision the source has."""

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """These full parameters on the host; nothing is kept."""

    def read_ranges(self, ranges: Mapping[str, Ranges]) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """These ranges of elements of each flattened parameter."""

    def read_slices(self, parameters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """What this rank keeps of these parameters: a slice where a parameter has a layout, else all of it."""

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

    def read_slices(self, parameters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from _cut(self, parameters)

    def fill_buffers(self, model: torch.nn.Module) -> None:
        """A skeleton's buffers are new already."""

    def _initialised(self, unit: str) -> torch.nn.Module:
        module = _blank_copy(self._model.get_submodule(unit), self._model.config)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            _seed_host(_seed_of(self._seed, unit))
            _initialise(module, _initialiser(self._model, unit))
        return module


class FileWeights:
    """Weights of a safetensors checkpoint."""

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self._tensors = tensors

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, full_tensor(self._tensors[name])

    def read_ranges(self, ranges: Mapping[str, Ranges]) -> Iterator[tuple[str, list[torch.Tensor]]]:
        for name, wanted in ranges.items():
            yield name, [flat_range(self._tensors[name], low, high) for low, high in wanted]

    def read_slices(self, parameters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in parameters.items():
            stored, layout = self._tensors[name], layout_of(parameter)
            yield name, full_tensor(stored) if layout is None else own_part(stored, layout)

    def fill_buffers(self, model: torch.nn.Module) -> None:
        for name, buffer in model.named_buffers():
            if name in self._tensors and self._tensors[name].shape == tuple(buffer.shape):
                buffer.copy_(full_tensor(self._tensors[name]))


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

    def read_slices(self, parameters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from _cut(self, parameters)

    def fill_buffers(self, model: torch.nn.Module) -> None:
        for name, buffer in model.named_buffers():
            if name in self._buffers and self._buffers[name].shape == buffer.shape:
                buffer.copy_(self._buffers[name])


class AdaptedWeights:
    """Weights of a model with LoRA adapters: the base's from its source, the adapters' as peft has drawn them.

    `principal`: adapters start as the largest singular vectors of their weights, which the frozen weights then lack.
    """

    def __init__(self, base: Weights, model: torch.nn.Module, *, principal: bool = False) -> None:
        self._base = base
        self._own = {name: p.detach() for name, p in model.named_parameters() if _is_adapter(name)}
        self._taken: dict[str, _Product] = {}
        """Base weight → the product of its adapter's matrices, which it lacks."""
        if principal:
            self._take_principal_parts(model)
        self._fill_magnitudes(model)

    def _take_principal_parts(self, model: torch.nn.Module) -> None:
        """PiSSA, as peft 0.21's `pissa_niter_4` computes it, one weight at a time."""
        for name in [name for name in self._own if ".lora_A." in name]:
            place, second = name.split(".lora_A.")[0], name.replace(".lora_A.", ".lora_B.")
            layer: Any = model.get_submodule(place)
            if "parameter_name" in vars(layer):
                what = (
                    "pissa is for linear layers; name these in model.lora.targets, or use zero for experts and routers"
                )
                raise BadInput("model.lora.start", what)
            base = _base_name(f"{place}.weight")
            ((_, weight),) = self._base.read([base])
            matrix = weight.float().T if layer.fan_in_fan_out else weight.float()
            scale, rank = layer.scaling["default"], layer.r["default"]
            with torch.random.fork_rng(devices=[]):
                _seed_host(zlib.crc32(base.encode()))
                left, sizes, right = torch.svd_lowrank(matrix, rank, niter=PRINCIPAL_ITERATIONS)
            root = (sizes / scale).sqrt()
            self._own[name], self._own[second] = (root[:, None] * right.T).contiguous(), (left * root).contiguous()
            self._taken[base] = _Product(self._own[second], self._own[name], scale, layer.fan_in_fan_out)

    def taken(self) -> dict[str, torch.Tensor]:
        """First values of adapters whose base lacks them, by name; empty for adapters that start at zero."""
        return self._own if self._taken else {}

    def _fill_magnitudes(self, model: torch.nn.Module) -> None:
        """DoRA's row lengths, which peft has taken of a base without values."""
        for name in [name for name in self._own if MAGNITUDE in name]:
            layer = name.split(f".{MAGNITUDE}")[0]
            ((_, weight),) = self._base.read([_base_name(f"{layer}.weight")])
            across = 0 if getattr(model.get_submodule(layer), "fan_in_fan_out", False) else 1
            self._own[name] = torch.linalg.norm(weight.float(), dim=across)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._either(names, lambda name, full: full, lambda base, own: self._base.read(base))

    def read_ranges(self, ranges: Mapping[str, Ranges]) -> Iterator[tuple[str, list[torch.Tensor]]]:
        yield from self._either(
            ranges,
            lambda name, full: [full.flatten()[low:high] for low, high in ranges[name]],
            lambda base, own: self._base.read_ranges({name: ranges[own[name]] for name in base}),
        )

    def read_slices(self, parameters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._either(
            parameters,
            lambda name, full: own_slice(parameters[name], full),
            lambda base, own: self._base.read_slices({name: parameters[own[name]] for name in base}),
        )

    def fill_buffers(self, model: torch.nn.Module) -> None:
        self._base.fill_buffers(model.get_submodule(ADAPTED.removesuffix(".")))

    def _either(
        self, names: Iterable[str], cut: Callable[[str, torch.Tensor], Any], read: Callable[[Any, Any], Any]
    ) -> Iterator[Any]:
        """Adapters from memory, everything else from the base; a head that peft has copied is read once per copy.

        `cut` takes from a full tensor what is wanted of it."""
        rounds: list[dict[str, str]] = []
        for name in names:
            if name in self._own:
                yield name, cut(name, self._own[name])
                continue
            base = _base_name(name)
            if base in self._taken:
                ((_, full),) = self._base.read([base])
                yield name, cut(name, self._taken[base].less(full))
                continue
            free = next((one for one in rounds if base not in one), None)
            if free is None:
                rounds.append(free := {})
            free[base] = name
        for one in rounds:
            for base, value in read(list(one), one):
                yield one[base], value


@dataclass(frozen=True)
class _Product:
    """What an adapter has taken over from its base weight."""

    second: torch.Tensor
    first: torch.Tensor
    scale: float
    transposed: bool

    def less(self, full: torch.Tensor) -> torch.Tensor:
        """The weight without it."""
        product = self.scale * (self.second @ self.first)
        return (full.float() - (product.T if self.transposed else product)).contiguous()


def _cut(weights: Weights, parameters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's slices of full parameters."""
    for name, full in weights.read(parameters):
        yield name, own_slice(parameters[name], full)


PRINCIPAL_ITERATIONS = 4
"""Power iterations of the approximate singular values, as in peft's `pissa_niter_4`."""
MAGNITUDE = "lora_magnitude_vector"
"""peft's name of DoRA's row lengths."""
ADAPTED = "base_model.model."
"""What peft 0.21 puts before the names of a model that it has given adapters."""


def _is_adapter(name: str) -> bool:
    return ".lora_" in name


def _base_name(name: str) -> str:
    """Name in the model of a parameter that peft has wrapped: a linear layer, or a head that is trained as a copy."""
    for inner in (".base_layer", ".original_module", ".modules_to_save.default"):
        name = name.replace(inner, "")
    return name.removeprefix(ADAPTED)


def fresh_tensors(model: PreTrainedModel, names: Iterable[str], seed: int) -> dict[str, torch.Tensor]:
    """Parameters of modules that a checkpoint does not have, drawn as transformers draws them while loading."""
    found: dict[str, torch.Tensor] = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        _seed_host(seed)
        for place in dict.fromkeys(name.rpartition(".")[0] for name in names):
            module = _blank_copy(model.get_submodule(place), model.config)
            _initialise(module, model)
            found |= {f"{place}.{key}": parameter.detach() for key, parameter in module.named_parameters()}
    return found


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
    return dict.fromkeys(TensorFile(single).names(), str(single))


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


def _seed_host(number: int) -> None:
    """Seed the host's generator only, from which first weights are drawn.

    torch 2.13's `manual_seed` also keeps a call with its stack for each kind of device that was not used yet: 5 ms.
    """
    torch.default_generator.manual_seed(number)


def _seed_of(seed: int, unit: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{unit}".encode(), digest_size=8).digest(), "big") >> 1


def _blank_copy(module: torch.nn.Module, config: PretrainedConfig) -> torch.nn.Module:
    """A copy of a skeleton's module with parameters on the host. The model's config is shared, not copied."""
    module = copy.deepcopy(module, {id(config): config})
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None and parameter.is_meta:
                part._parameters[key] = _blank(parameter)
    return module


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


def check_same_weights(named: Mapping[str, torch.nn.Parameter]) -> None:
    """Stop if ranks that hold the same parameter, or the same slice of it, start with different values.

    Data, sequence, expert and tensor ranks hold copies. Under ZeRO 3 no other rank holds the same shard: there a second
    rank hashes the shard as its own source has it (`zero3_start.py`).
    """
    compare({(name, _slice(parameter)): digest(parameter) for name, parameter in named.items()})


def _slice(parameter: torch.nn.Parameter) -> str:
    layout = layout_of(parameter)
    return f"slice {layout.index} of {layout.ranks} along {layout.dim}" if layout else ""
