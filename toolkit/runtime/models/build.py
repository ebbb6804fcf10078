"""Build or load the Hugging Face model, equal on every rank."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from deepspeed.accelerator import get_accelerator
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from toolkit.errors import BadInput, NoPlanFits, first_line
from toolkit.recipe.model_section import Lora, Model
from toolkit.runtime.distributed import rng
from toolkit.runtime.models import attention
from toolkit.runtime.models.adapters import with_adapters
from toolkit.runtime.models.embedder import Embedder, prepared
from toolkit.runtime.models.first_weights import (
    AdaptedWeights,
    FileWeights,
    HostWeights,
    ScratchWeights,
    Weights,
    checkpoint_files,
    fresh_tensors,
)
from toolkit.runtime.models.parameter_shards import freeze, replace_parameter, sites
from toolkit.runtime.models.stored_tensors import TensorInMemory, stored_tensors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Data types of a recipe's precisions."""
BUILDERS: dict[str | None, Any] = {
    None: AutoModelForCausalLM,
    "causal-lm": AutoModelForCausalLM,
    "classification": AutoModelForSequenceClassification,
    "image-classification": AutoModelForImageClassification,
    "seq2seq": AutoModelForSeq2SeqLM,
    "embedding": Embedder,
}
"""Model class of each task."""
TRANSFORMERS_NAMES = {"eager": "eager", "sdpa": "sdpa", "flex": "flex_attention"}
"""`model.attention` → what a model is built with; the rest is set by `attention.install`."""


def load_config(section: Model) -> PretrainedConfig:
    """The Hugging Face config of the recipe's model."""
    labels = {} if section.num_labels is None else {"num_labels": section.num_labels}
    labels |= _without_router_logits(section)
    try:
        if section.config is not None:
            values = {**section.config, **labels}
            config = AutoConfig.for_model(values.pop("model_type"), **values)
        else:
            config = AutoConfig.from_pretrained(section.path, trust_remote_code=section.trust_remote_code, **labels)
        return prepared(config, section.task, section.num_labels)
    except (KeyError, ValueError, TypeError, OSError) as error:
        raise BadInput("model", f"transformers can't read the config: {first_line(error)}") from None


def _without_router_logits(section: Model) -> dict[str, Any]:
    """Routers are balanced by hooks (runtime/mixtures), so the model need not hand its logits out, nor keep them."""
    asks = section.config is not None and section.config.get("output_router_logits")
    return {"output_router_logits": False} if asks else {}


def can_start_in_place(section: Model) -> bool:
    """Whether the parameters of a recipe's model can be made one at a time.

    A 4-bit base and models with their own code are built by libraries that need the complete model.
    """
    return not _quantized(section) and not section.trust_remote_code


def build_in_place(
    section: Model, seed: int, dtype: torch.dtype, device: str, *, trained_are_copied: bool = False
) -> PreTrainedModel:
    """The full model in the run's precision on its device, one tensor at a time.

    The host never holds more than one fp32 unit of it. Values are those of `build_model`, rounded as DeepSpeed rounds
    a complete fp32 model. `trained_are_copied`: the engine copies all trained parameters at once, as ZeRO 1 and 2 do;
    so they may be pages of the checkpoint's files until then, which saves another copy. Others must not be: somebody
    may write to the files during the run.
    """
    model = hollow_model(section, seed)
    with torch.random.fork_rng(devices=[]):  # dropout continues after what the adapters have drawn
        weights = weights_of(model, section, seed, mapped=trained_are_copied)
        fill(model, weights, place=lambda tensor: tensor.to(device=device, dtype=dtype))
        weights.fill_buffers(model)
    for parameter in model.parameters():
        if trained_are_copied and not parameter.requires_grad:
            parameter.data = parameter.data.clone()
    return model


def hollow_model(section: Model, seed: int) -> PreTrainedModel:
    """The model without weights, and with its adapters if the recipe has any. Seeds the random number generators."""
    model = skeleton(section)
    if section.lora is not None:
        where = sites(model)
        for parameter in list(model.parameters()):
            # Not on the meta device, to which peft 0.21 would move the adapters: a view of one number has no bytes.
            replace_parameter(where, parameter, torch.zeros(1, dtype=parameter.dtype).expand(parameter.shape))
    rng.seed(seed)
    return model if section.lora is None else with_adapters(model, section.lora, section.task)


def weights_of(model: PreTrainedModel, section: Model, seed: int, *, mapped: bool = False) -> Weights:
    """The source of the first weights of a hollow model. Adapters are those of the model, complete, as they are now."""
    if section.lora is None:
        return open_weights(section, seed, model if section.init == "pretrained" else None, mapped=mapped)
    return adapted_weights(open_weights(section, seed), model, section.lora)


def adapted_weights(base: Weights, model: torch.nn.Module, lora: Lora) -> AdaptedWeights:
    """The source of the first weights of a hollow model with adapters."""
    return AdaptedWeights(base, model, principal=lora.start == "pissa")


def open_skeleton(section: Model, seed: int) -> tuple[PreTrainedModel, Weights]:
    """A model to be cut into shards or stages, adapters included, without weights; and their source."""
    model = hollow_model(section, seed)
    weights = weights_of(model, section, seed)
    return emptied(model), weights


def emptied(model: PreTrainedModel) -> PreTrainedModel:
    """The model with all parameters on the meta device: a slice of a hollow one would take bytes."""
    where = sites(model)
    for parameter in list(model.parameters()):
        if not parameter.is_meta:
            replace_parameter(where, parameter, torch.empty_like(parameter, device="meta"))
    return model


def unadapted(model: Any, section: Model) -> PreTrainedModel:
    """The Hugging Face model inside a model with adapters; the model itself without adapters."""
    base: PreTrainedModel = model if section.lora is None else model.get_base_model()
    return base


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
    rng.seed(seed)
    if section.lora is None:
        return model
    model = with_adapters(model, section.lora, section.task)
    if section.lora.start == "pissa":
        fill(model, weights_of(model, section, seed))
    return model


def skeleton(section: Model) -> PreTrainedModel:
    """The model's structure with real buffers but without weights: parameters are on the meta device."""

    def make(config: PretrainedConfig, options: dict[str, Any]) -> PreTrainedModel:
        # Not `torch.device("meta")`: rotary tables, which are buffers, would be on the meta device too.
        with init_empty_weights(include_buffers=False), no_init_weights(), _large_on_meta():
            model = BUILDERS[section.task].from_config(config, **options)
        # accelerate 1.15's `init_empty_weights` makes a new parameter at every assignment: tied weights come apart, and
        # the head would be trained separately. This can go when `model.lm_head.weight is model…embed_tokens.weight`.
        model.tie_weights()
        return model

    return _made(section, make)


LARGE_ELEMENTS = 2**28
"""Tensors from this size on are weights, never buffers."""


@contextlib.contextmanager
def _large_on_meta() -> Iterator[None]:
    """Make large empty tensors on the meta device at once.

    accelerate 1.15's `init_empty_weights` lets a module make its tensor on the host and moves it when it is registered.
    All experts of a layer are one tensor: DeepSeek-V3's has 30 GB, which a host of 24 GB refuses to reserve. It can go
    when a skeleton of DeepSeek-V3 can be built there without it.
    """
    module: Any = torch
    make = torch.empty

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        is_large = all(isinstance(each, int) for each in shape) and math.prod(shape) >= LARGE_ELEMENTS
        return make(*size, **(options | {"device": "meta"} if is_large and "device" not in options else options))

    module.empty = empty
    try:
        yield
    finally:
        module.empty = make


def open_weights(section: Model, seed: int, empty: PreTrainedModel | None = None, *, mapped: bool = False) -> Weights:
    """The source of the recipe's first weights. `empty`: its skeleton, if there is one; `mapped`: see `TensorFile`."""
    empty = empty or skeleton(section)
    if section.init == "scratch":
        return ScratchWeights(empty, seed, whole=lambda: _load_full(section, seed))
    assert section.path is not None
    if getattr(empty.config, "quantization_config", None) is not None:
        return HostWeights(_load_full(section, seed))
    tensors = stored_tensors(empty, checkpoint_files(section.path), mapped=mapped)
    missing = [name for name, _ in empty.named_parameters() if name not in tensors]
    head = [name for name in missing if not name.startswith(f"{empty.base_model_prefix}.")]
    if "classification" in (section.task or "") and head == missing:
        fresh = fresh_tensors(empty, missing, seed)
        return FileWeights({**tensors, **{name: TensorInMemory(fresh[name]) for name in missing}})
    return HostWeights(_load_full(section, seed)) if missing else FileWeights(tensors)


def fill(
    model: torch.nn.Module,
    weights: Weights,
    named: Mapping[str, torch.nn.Parameter] | None = None,
    place: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> dict[str, torch.nn.Parameter]:
    """Give parameters of a skeleton their weights (a shard only its slice); return the new parameters by name.

    `place` moves each to its device and precision; without it they stay on the host in the skeleton's.
    """
    empty = dict(model.named_parameters()) if named is None else named
    where = sites(model)
    filled = dict(empty)
    for name, own in weights.read_slices(empty):
        placed = place(own) if place else own.to(empty[name].dtype, copy=True)
        filled[name] = replace_parameter(where, empty[name], placed)
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

    rng.seed(seed)
    return _made(section, make)


def _quantized(section: Model) -> dict[str, Any]:
    """QLoRA: options that load the frozen base in 4 bits with bitsandbytes."""
    if section.lora is None or section.lora.quantize == "none":
        return {}
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[section.precision],
    )
    return {"quantization_config": config}


def _made(section: Model, make: Callable[[PretrainedConfig, dict[str, Any]], PreTrainedModel]) -> PreTrainedModel:
    config = load_config(section)
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": section.trust_remote_code}
    if section.attention in TRANSFORMERS_NAMES:
        options["attn_implementation"] = TRANSFORMERS_NAMES[section.attention]
    try:
        model = make(config, options)
    except (ValueError, OSError, ImportError) as error:
        raise BadInput("model", f"transformers can't build it: {first_line(error)}") from None
    model.config.use_cache = False
    attention.install(model, section)
    freeze(model, section.freeze)
    return model


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""


_LAYER_COUNTS = ("num_hidden_layers", "decoder_layers", "num_layers", "n_layer")


class SplitRefused(NoPlanFits):
    """The model can't be split in this way; the message gives the reason."""


def find_layers(model: PreTrainedModel) -> tuple[str, torch.nn.ModuleList]:
    """The list of decoder layers: the one as long as the config says, else the one with the most parameters."""
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m) >= 2]
    outer = [(n, m) for n, m in lists if not any(n.startswith(f"{other}.") for other, _ in lists)]
    if not outer:
        raise SplitRefused("no list of layers was found in the model")
    count = num_layers(model)
    return max(outer, key=lambda item: (len(item[1]) == count, sum(p.numel() for p in item[1].parameters())))


def num_layers(model: PreTrainedModel) -> int | None:
    """Number of layers by the config, whichever key it uses."""
    for config in (model.config, model.config.get_text_config(decoder=True)):
        for key in _LAYER_COUNTS:
            if isinstance(value := getattr(config, key, None), int):
                return value
    return None


@contextlib.contextmanager
def freed_at_once() -> Iterator[None]:
    """Return freed tensors to the operating system at once, while a model is built.

    glibc keeps freed blocks of up to 32 MiB once it has seen larger ones come and go, and a start makes and frees every
    tensor of a model: a rank of ZeRO 3 held 1.35 GiB where 0.9 were in use. Afterwards the limits are those that glibc
    reaches by itself, but where the host is the device freed memory is kept: every step would have to get the pages of
    its activations anew, 2% of its time. Other C libraries are left alone.
    """
    limit = getattr(ctypes.CDLL(None), "mallopt", None)
    if limit is None:
        yield
        return
    limit(M_MMAP_THRESHOLD, 2**20)
    try:
        yield
    finally:
        limit(M_MMAP_THRESHOLD, 32 * 2**20)
        limit(M_TRIM_THRESHOLD, 2**30 if get_accelerator().is_synchronized_device() else 64 * 2**20)
