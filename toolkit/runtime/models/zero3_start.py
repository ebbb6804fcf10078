"""Start ZeRO 3 from each rank's own share: parameters become shards one at a time, and no rank holds the full model.

`deepspeed.initialize` (0.19.8) takes a complete model, moves it to the device and then shards it, so a model that is
larger than one device can't start. Parameters that are shards already (they carry a `ds_id`) are left alone.
`deepspeed.zero.Init` around the constructor would make every new tensor 16 bits wide, rotary tables included, and the
losses would differ in the fifth digit. So only its conversion of single parameters is used here. This can go when
`deepspeed.initialize` accepts a model on the meta device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import Init
from transformers import PreTrainedModel

from toolkit.recipe.model_section import Model
from toolkit.runtime.distributed.process_group import gather_objects
from toolkit.runtime.models.build import hollow_model, weights_of
from toolkit.runtime.models.first_weights import Weights
from toolkit.runtime.models.parameter_shards import Sites, sites

SAMPLE_ELEMENTS = 1024
"""First elements of every parameter that all ranks read and compare."""


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
    digest = hashlib.blake2b(digest_size=16)
    if shards.needs_full:
        for name, full in weights.read(parameters):
            digest.update(sample_bytes(full.flatten()[:SAMPLE_ELEMENTS], dtype))
            shards.convert(parameters[name], full)
    else:
        own = {name: shards.convert(parameter) for name, parameter in parameters.items()}
        for sample in _read_own(weights, own):
            digest.update(sample_bytes(sample, dtype))
    weights.fill_buffers(model)
    _check_same(digest.hexdigest())


class _Shard:
    """One parameter's shard on this rank."""

    def __init__(self, parameter: torch.nn.Parameter, rank: int) -> None:
        self._tensor: torch.Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
        self.numel: int = parameter.ds_numel  # type: ignore[attr-defined]
        size = self._tensor.numel()
        self.elements = (min(rank * size, self.numel), min((rank + 1) * size, self.numel))
        """First and last + 1 of this rank's elements in the flattened parameter; the rest of the shard is padding."""

    def fill(self, elements: torch.Tensor) -> None:
        """Write this rank's elements."""
        self._tensor.view(-1)[: elements.numel()].copy_(elements)


def _read_own(weights: Weights, shards: Mapping[str, _Shard]) -> Iterator[torch.Tensor]:
    """Fill every shard with this rank's elements; yields the first elements of each parameter, to be compared."""
    ranges = {name: (shard.elements, (0, min(SAMPLE_ELEMENTS, shard.numel))) for name, shard in shards.items()}
    for name, (elements, sample) in weights.read_ranges(ranges):
        shards[name].fill(elements)
        yield sample


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
        return _Shard(parameter, self._init._partition_rank(parameter))


def sample_bytes(elements: torch.Tensor, dtype: torch.dtype) -> bytes:
    """Elements in the run's precision, to be compared between ranks."""
    return elements.detach().to(dtype).cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _check_same(digest: str) -> None:
    """Stop if ranks read different weights: their shards would be those of different models."""
    for rank, other in enumerate(gather_objects(digest)):
        if other != digest:
            raise RuntimeError(
                f"rank {rank} reads other weights than this rank; "
                "check that every rank has the same recipe, seed, library versions and model files"
            )
