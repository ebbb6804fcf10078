"""Start ZeRO 3 from each rank's own share: parameters become shards one at a time, and no rank holds the full model.

`deepspeed.initialize` (0.19.8) takes a complete model, moves it to the device and then shards it, so a model that is
larger than one device can't start. Parameters that are shards already (they carry a `ds_id`) are left alone.
`deepspeed.zero.Init` around the constructor would make every new tensor 16 bits wide, rotary tables included, and the
losses would differ in the fifth digit. So only its conversion of single parameters is used here. This can go when
`deepspeed.initialize` accepts a model on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import Init
from transformers import PreTrainedModel

from toolkit.recipe.model_section import Model
from toolkit.runtime.distributed.weight_digests import compare, digest
from toolkit.runtime.models.build import hollow_model, weights_of
from toolkit.runtime.models.first_weights import Weights
from toolkit.runtime.models.parameter_shards import Sites, sites

Hashed = tuple[tuple[str, str], str]
"""(Parameter, part of it), digest."""


def sharded_model(section: Model, seed: int, config: Mapping[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """The recipe's model with every parameter as this rank's ZeRO 3 shard, equal to sharding the full model."""
    model = hollow_model(section, seed)
    with torch.random.fork_rng(devices=[]):  # dropout continues after what the adapters have drawn
        _fill(model, weights_of(model, section, seed), config, dtype)
    return model


def _fill(model: torch.nn.Module, weights: Weights, config: Mapping[str, Any], dtype: torch.dtype) -> None:
    # Not entered as a context: only its conversion of single parameters is used.
    init = Init(config_dict_or_path=dict(config), dtype=dtype)
    shards = _Shards(init, sites(model), dtype)
    if init.mem_efficient_linear:
        # As `Init(module=...)` does. torch's own linear keeps a view of every gathered weight for the backward pass, so
        # released weights would stay in memory: rehearsed for Llama 8B, 14.1 GiB of them instead of 1.9.
        init._enable_mem_efficient_linear()
    parameters = dict(model.named_parameters())  # shared ones appear once, under their first name
    if shards.needs_full:
        hashed = _convert_full(weights, parameters, shards, dtype)
    else:
        own = {name: shards.convert(parameter) for name, parameter in parameters.items()}
        hashed = _read_own(weights, own, dtype)
    compare(dict(hashed))
    weights.fill_buffers(model)


def _convert_full(
    weights: Weights, parameters: Mapping[str, torch.nn.Parameter], shards: _Shards, dtype: torch.dtype
) -> Iterator[Hashed]:
    """Cut every parameter into shards; all ranks read, and hash, all of it."""
    for name, full in weights.read(parameters):
        yield (name, ""), digest(full.to(dtype))
        shards.convert(parameters[name], full)


class _Shard:
    """One parameter's shard on this rank."""

    def __init__(self, parameter: torch.nn.Parameter, rank: int, ranks: int) -> None:
        self._tensor: torch.Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
        self._numel: int = parameter.ds_numel  # type: ignore[attr-defined]
        self._ranks, self.number, self.other = ranks, rank, (rank + ranks // 2) % ranks
        """`other`: whose shard this rank hashes, too. With several hosts, it is on another one, with its own files."""

    def elements(self, number: int) -> tuple[int, int]:
        """First and last + 1 of a rank's elements in the flattened parameter; the rest of the shard is padding."""
        size = self._tensor.numel()
        return min(number * size, self._numel), min((number + 1) * size, self._numel)

    def fill(self, elements: torch.Tensor) -> str:
        """Write this rank's elements; returns the digest of what it then holds."""
        held = self._tensor.view(-1)[: elements.numel()]
        held.copy_(elements)
        return digest(held)

    def part(self, number: int) -> str:
        """Name of a rank's shard."""
        return f"shard {number} of {self._ranks}"


def _read_own(weights: Weights, shards: Mapping[str, _Shard], dtype: torch.dtype) -> Iterator[Hashed]:
    """Fill every shard with this rank's elements.

    Yields its digest, and that of another rank's shard as this rank's source has it. So every shard has two digests,
    from two ranks, at the price of reading twice as many elements; reading all would take as many times more as there
    are ranks.
    """
    ranges = {name: [shard.elements(shard.number), shard.elements(shard.other)] for name, shard in shards.items()}
    for name, (own, other) in weights.read_ranges(ranges):
        shard = shards[name]
        yield (name, shard.part(shard.number)), shard.fill(own)
        if shard.other != shard.number:
            yield (name, shard.part(shard.other)), digest(other.to(dtype))


class _Shards:
    """Turns parameters of a skeleton into ZeRO 3 shards."""

    def __init__(self, init: Init, where: Sites, dtype: torch.dtype) -> None:
        self._init, self._where, self._dtype = init, where, dtype

    @property
    def needs_full(self) -> bool:
        """Whether converting needs the values: DeepSpeed makes hpZ's second shard, quantises, swaps to NVMe itself."""
        init = self._init
        return init.zero_param_process_group is not None or init.quantized_weights or init.param_swapper is not None

    def convert(self, empty: torch.nn.Parameter, full: torch.Tensor | None = None) -> _Shard:
        """Replace a parameter by its shard, wherever it is used; without `full`, the shard holds zeros."""
        device = self._init.local_device
        # A view of one zero has the right shape and no bytes of its own.
        data = torch.zeros(1, dtype=self._dtype, device=device).expand(empty.shape)
        if full is not None:
            data = full.to(device=device, dtype=self._dtype)
        parameter = torch.nn.Parameter(data, requires_grad=empty.requires_grad)
        for module, key in self._where[id(empty)]:
            module._parameters[key] = parameter
        # Private in DeepSpeed 0.19.8; what `Init` does for each parameter of a new module, without its broadcast.
        self._init._convert_to_deepspeed_param(parameter)
        parameter.partition()  # type: ignore[attr-defined]
        init = self._init
        return _Shard(parameter, init._partition_rank(parameter), init._partition_world_size(parameter))
