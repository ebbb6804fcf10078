"""The Hugging Face model: built or loaded, the same on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
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

from toolkit.errors import BadInput, first_line
from toolkit.recipe.sections import Lora, Model
from toolkit.runtime.distributed.process_group import gather_objects
from toolkit.runtime.models.first_weights import FileWeights, HostWeights, ScratchWeights, Weights, checkpoint_files
from toolkit.runtime.models.parameter_shards import own_slice, replace_parameter, sites

BUILDERS: dict[str | None, Any] = {
    None: AutoModelForCausalLM,
    "causal-lm": AutoModelForCausalLM,
    "classification": AutoModelForSequenceClassification,
    "image-classification": AutoModelForImageClassification,
    "seq2seq": AutoModelForSeq2SeqLM,
}
"""Which head a task gets."""
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
    """The whole model in fp32 on the host, with weights that depend on the seed and the recipe only.

    `dequantized`: a base of 4 bits as the plain weights that these stand for.
    """
    if section.init == "scratch" and not section.trust_remote_code:
        model = skeleton(section)
        fill(model, open_weights(section, seed))
    else:
        model = _whole(section, seed)
        if dequantized and _quantized(section):
            model = model.dequantize(dtype=torch.float32)
    set_seed(seed)
    return model if section.lora is None else _with_adapters(model, section.lora, section.task)


def skeleton(section: Model) -> PreTrainedModel:
    """The model's structure, with buffers but without a byte of weights: parameters are on the meta device."""

    def make(config: PretrainedConfig, options: dict[str, Any]) -> PreTrainedModel:
        # Under `torch.device("meta")` rotary tables would stay there too.
        with init_empty_weights(include_buffers=False), no_init_weights():
            model = BUILDERS[section.task].from_config(config, **options)
        model.tie_weights()  # accelerate (1.15) makes a new parameter at every assignment, which breaks ties
        return model

    return _made(section, make)


def open_weights(section: Model, seed: int) -> Weights:
    """Where the recipe's first weights are read from."""
    empty = skeleton(section)
    if section.init == "scratch":
        return ScratchWeights(empty, seed, whole=lambda: _whole(section, seed))
    assert section.path is not None
    files = checkpoint_files(section.path)
    if all(name in files for name, _ in empty.named_parameters()):
        return FileWeights(files)
    return HostWeights(_whole(section, seed))


def fill(
    model: torch.nn.Module, weights: Weights, named: Mapping[str, torch.nn.Parameter] | None = None
) -> dict[str, torch.nn.Parameter]:
    """Give parameters of a skeleton their weights; a shard keeps its slice only. The new parameters, by name."""
    empty = dict(model.named_parameters()) if named is None else named
    where = sites(model)
    filled = dict(empty)
    for name, whole in weights.read(empty):
        filled[name] = replace_parameter(where, empty[name], own_slice(empty[name], whole))
    return filled


def _whole(section: Model, seed: int) -> PreTrainedModel:
    """As transformers makes it by itself."""

    def make(config: PretrainedConfig, options: dict[str, Any]) -> PreTrainedModel:
        if section.init == "scratch":
            return BUILDERS[section.task].from_config(config, **options)
        # A head for other classes than the file's is a new one.
        fresh: dict[str, Any] = {"ignore_mismatched_sizes": True} if "classification" in (section.task or "") else {}
        fresh |= _quantized(section)
        return BUILDERS[section.task].from_pretrained(
            section.path, config=config, use_safetensors=True, **fresh, **options
        )

    set_seed(seed)
    return _made(section, make)


def _quantized(section: Model) -> dict[str, Any]:
    """QLoRA: the frozen base in the 4 bits of bitsandbytes."""
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
    """The model frozen, with trainable low-rank adapters."""
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
    """Keep only layer inputs for the backward pass."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def check_same_weights(model: torch.nn.Module) -> None:
    """Stop if ranks start from different weights: they would train apart without a word."""
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
