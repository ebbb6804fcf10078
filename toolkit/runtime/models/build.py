"""Build or load the Hugging Face model, equal on every rank."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    set_seed,
)
from transformers.initialization import no_init_weights
from transformers.utils import cached_file

from toolkit.errors import BadInput, first_line
from toolkit.recipe.sections import Lora, Model
from toolkit.runtime.distributed.process_group import gather_objects
from toolkit.runtime.models.parameter_shards import own_slice, replace_parameter, sites

BUILDERS: dict[str | None, Any] = {
    None: AutoModelForCausalLM,
    "causal-lm": AutoModelForCausalLM,
    "classification": AutoModelForSequenceClassification,
    "image-classification": AutoModelForImageClassification,
    "seq2seq": AutoModelForSeq2SeqLM,
}
"""Model class of each task."""
ADAPTER_TASKS = {"classification": "SEQ_CLS", "seq2seq": "SEQ_2_SEQ_LM", "image-classification": None}


def load_config(section: Model) -> PretrainedConfig:
    """The Hugging Face config of the recipe's model."""
    labels = {} if section.num_labels is None else {"num_labels": section.num_labels}
    try:
        if section.config is not None:
            values = {**section.config, **labels}
            return AutoConfig.for_model(values.pop("model_type"), **values)
        return AutoConfig.from_pretrained(section.path, trust_remote_code=section.trust_remote_code, **labels)
    except (KeyError, ValueError, TypeError, OSError) as error:
        raise BadInput("model", f"transformers can't read the config: {first_line(error)}") from None


def build_model(section: Model, seed: int, *, dequantized: bool = False) -> PreTrainedModel:
    """The full model in fp32 on the host, with weights that depend only on the seed and the recipe.

    `dequantized`: convert a 4-bit base to the fp32 weights that it represents.
    """
    if section.init == "scratch" and not section.trust_remote_code:
        model = skeleton(section)
        fill(model, open_weights(section, seed))
    else:
        model = _load_full(section, seed)
        if dequantized and _quantized(section):
            model = model.dequantize(dtype=torch.float32)
    set_seed(seed)
    return model if section.lora is None else _with_adapters(model, section.lora, section.task)


def skeleton(section: Model) -> PreTrainedModel:
    """The model's structure with real buffers but without weights: parameters are on the meta device."""

    def make(config: PretrainedConfig, options: dict[str, Any]) -> PreTrainedModel:
        # Not `torch.device("meta")`: rotary tables, which are buffers, would be on the meta device too.
        with init_empty_weights(include_buffers=False), no_init_weights():
            model = BUILDERS[section.task].from_config(config, **options)
        # accelerate 1.15's `init_empty_weights` makes a new parameter at every assignment: tied weights come apart, and
        # the head would be trained separately. This can go when `model.lm_head.weight is model…embed_tokens.weight`.
        model.tie_weights()
        return model

    return _made(section, make)


def open_weights(section: Model, seed: int) -> Weights:
    """The source of the recipe's first weights."""
    empty = skeleton(section)
    if section.init == "scratch":
        return ScratchWeights(empty, seed, whole=lambda: _load_full(section, seed))
    assert section.path is not None
    files = checkpoint_files(section.path)
    if all(name in files for name, _ in empty.named_parameters()):
        return FileWeights(files)
    return HostWeights(_load_full(section, seed))


def fill(
    model: torch.nn.Module, weights: Weights, named: Mapping[str, torch.nn.Parameter] | None = None
) -> dict[str, torch.nn.Parameter]:
    """Give parameters of a skeleton their weights (a shard only its slice); return the new parameters by name."""
    empty = dict(model.named_parameters()) if named is None else named
    where = sites(model)
    filled = dict(empty)
    for name, whole in weights.read(empty):
        filled[name] = replace_parameter(where, empty[name], own_slice(empty[name], whole))
    return filled


def _load_full(section: Model, seed: int) -> PreTrainedModel:
    """The full model as transformers builds or loads it."""

    def make(config: PretrainedConfig, options: dict[str, Any]) -> PreTrainedModel:
        if section.init == "scratch":
            return BUILDERS[section.task].from_config(config, **options)
        # If the number of classes differs from the file's, the head is initialised.
        fresh: dict[str, Any] = {"ignore_mismatched_sizes": True} if "classification" in (section.task or "") else {}
        fresh |= _quantized(section)
        return BUILDERS[section.task].from_pretrained(
            section.path, config=config, use_safetensors=True, **fresh, **options
        )

    set_seed(seed)
    return _made(section, make)


def _quantized(section: Model) -> dict[str, Any]:
    """QLoRA: options that load the frozen base in 4 bits with bitsandbytes."""
    if section.lora is None or section.lora.quantize == "none":
        return {}
    from transformers import BitsAndBytesConfig

    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[section.precision]
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=kind
    )
    return {"quantization_config": config}


def _made(section: Model, make: Callable[[PretrainedConfig, dict[str, Any]], PreTrainedModel]) -> PreTrainedModel:
    config = load_config(section)
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": section.trust_remote_code}
    if section.attention != "auto":
        options["attn_implementation"] = section.attention
    try:
        model = make(config, options)
    except (ValueError, OSError, ImportError) as error:
        raise BadInput("model", f"transformers can't build it: {first_line(error)}") from None
    model.config.use_cache = False
    return model


def _with_adapters(model: PreTrainedModel, lora: Lora, task: str | None) -> PreTrainedModel:
    """The frozen model with trainable low-rank adapters."""
    from peft import LoraConfig, get_peft_model

    targets = "all-linear" if lora.targets == "auto" else lora.targets
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type=ADAPTER_TASKS.get(task or "", "CAUSAL_LM"),
    )
    return get_peft_model(model, config)


def recompute_layers(model: PreTrainedModel) -> None:
    """Recompute layers in the backward pass: only their inputs are kept."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def check_same_weights(model: torch.nn.Module) -> None:
    """Stop if ranks start from different weights: without this they would silently train different models."""
    digests = {name: _digest(tensor) for name, tensor in model.named_parameters()}
    by_rank = gather_objects(digests)
    for rank, other in enumerate(by_rank):
        differing = [name for name in by_rank[0] if other.get(name) != by_rank[0][name]]
        if differing:
            raise RuntimeError(
                f"rank {rank} starts with other weights than rank 0 in {len(differing)} parameters, "
                f"first {differing[0]}; "
                "check that every rank has the same recipe, seed, library versions and model files"
            )


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data
    return hashlib.blake2b(data, digest_size=16).hexdigest()


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Weights(Protocol):
    """Reads parameters by their first name in the model."""

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """These full parameters on the host; nothing is kept."""

    def read_ranges(self, ranges: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Elements `low` to `high` of each flattened parameter."""


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

    def read_ranges(self, ranges: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, full in self.read(ranges):
            low, high = ranges[name]
            yield name, full.flatten()[low:high]

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

    def read_ranges(self, ranges: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, torch.Tensor]]:
        by_file: dict[str, list[str]] = {}
        for name in ranges:
            by_file.setdefault(self._files[name], []).append(name)
        for path, wanted in by_file.items():
            with safe_open(path, framework="pt") as file:
                for name in wanted:
                    yield name, _flat_range(file, name, *ranges[name])


class HostWeights:
    """Weights of a full model on the host, for checkpoints that transformers converts while loading."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors = dict(model.named_parameters())

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, self._tensors[name].detach()

    def read_ranges(self, ranges: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, (low, high) in ranges.items():
            yield name, self._tensors[name].detach().flatten()[low:high]


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
