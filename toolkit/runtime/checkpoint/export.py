"""Export a checkpoint as a Hugging Face directory: the fp32 masters, cast to the recipe's precision."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit.checkpoints.format import file_problems
from toolkit.errors import BadInput
from toolkit.recipe.file import load_recipe
from toolkit.recipe.model_section import Model
from toolkit.recipe.objective_sections import Contrastive
from toolkit.recipe.sections import Recipe
from toolkit.runtime.checkpoint import safetensors_writer
from toolkit.runtime.checkpoint.fragments import AVERAGE, BUFFER, WEIGHT
from toolkit.runtime.checkpoint.reader import Reader
from toolkit.runtime.models.build import (
    BUILDERS,
    DTYPES,
    adapted_weights,
    build_model,
    hollow_model,
    load_config,
    open_weights,
    skeleton,
)
from toolkit.runtime.models.first_weights import MAGNITUDE
from toolkit.runtime.models.parameter_shards import replace_parameter, sites

SHARD_SIZE = "5GB"
TRAINED_WHOLE = ".modules_to_save.default."
"""Part of peft's names of modules that are trained without an adapter (the head of a classifier)."""


def export(checkpoint: Path, out: Path, *, merge: bool = False, trust_remote_code: bool = False) -> Recipe:
    """Verify a checkpoint and write `out`, which `from_pretrained` loads; return the run's recipe."""
    damaged = file_problems(checkpoint)
    if damaged:
        raise BadInput(f"{checkpoint} is damaged", damaged)
    recipe = load_recipe(checkpoint / "recipe.yaml")
    # A checkpoint may come from anyone, so only the caller decides whether a model's own code may run.
    section = replace(recipe.model, trust_remote_code=trust_remote_code)
    reader, dtype = Reader.open(checkpoint), DTYPES[section.precision]
    writing = _begin(out)
    if section.lora is None:
        _full_model(reader, section, recipe.train.seed, dtype).save_pretrained(writing, max_shard_size=SHARD_SIZE)
    elif merge:
        _merged(reader, section, recipe.train.seed, dtype).save_pretrained(writing, max_shard_size=SHARD_SIZE)
    else:
        _write_adapter(reader, section, recipe.train.seed, dtype, writing)
    _write_tokenizer(recipe, writing, trust_remote_code)
    if section.task == "embedding" and (section.lora is None or merge):
        _write_pooling(recipe, load_config(section).get_text_config().hidden_size, writing)
    writing.rename(out)
    return recipe


def trained_model(checkpoint: Path, recipe: Recipe) -> PreTrainedModel:
    """The model of a checkpoint in memory, ready to run, with adapters merged."""
    reader, dtype = Reader.open(checkpoint), DTYPES[recipe.model.precision]
    if recipe.model.lora is not None:
        return _merged(reader, recipe.model, recipe.train.seed, dtype)
    if recipe.model.freeze:
        return _partly_trained(reader, recipe.model, recipe.train.seed, dtype)
    model = skeleton(recipe.model)
    where = sites(model)
    for name, parameter in list(model.named_parameters()):
        replace_parameter(where, parameter, trained(reader, name).to(dtype))
    for name in (name for name, held in reader.index.items() if WEIGHT not in held.kinds()):
        model.get_buffer(name).copy_(reader.full(name, BUFFER))
    return model


def trained(reader: Reader, name: str) -> torch.Tensor:
    """A parameter as it is used after training: the average of its values if the run kept one, else the last one."""
    return reader.full(name, AVERAGE if AVERAGE in reader.index[name].kinds() else WEIGHT)


def _begin(out: Path) -> Path:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(str(out), "already exists and is not empty; choose another directory")
    if out.exists():
        out.rmdir()
    writing = out.with_name(f".{out.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        writing.mkdir(parents=True)
    except OSError as error:
        raise BadInput(str(out), f"can't be made: {error.strerror}") from None
    return writing


def _partly_trained(reader: Reader, section: Model, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    """The first weights, of which those that were trained come from the checkpoint: it has no others."""
    model = build_model(section, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(trained(reader, name))
        for name in (name for name, held in reader.index.items() if held.kinds() == {BUFFER}):
            model.get_buffer(name).copy_(reader.full(name, BUFFER))
    return model.to(dtype)


def _full_model(reader: Reader, section: Model, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    """The model with every weight from the checkpoint, without initialising any first."""
    if section.freeze:
        return _partly_trained(reader, section, seed, dtype)
    config = load_config(section)
    with torch.device("meta"):
        model = BUILDERS[section.task].from_config(config, dtype=dtype, trust_remote_code=section.trust_remote_code)
    expected = {name for name, _ in model.named_parameters()}
    found = {name for name, parameter in reader.index.items() if WEIGHT in parameter.kinds()}
    if expected != found:
        odd = sorted(expected ^ found)
        raise BadInput(
            str(reader.path), f"does not hold the model of its recipe: {odd[0]} and {len(odd) - 1} more differ"
        )
    for name in sorted(reader.index):
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if name in found:
            value = trained(reader, name).to(dtype)
            module.register_parameter(leaf, torch.nn.Parameter(value, requires_grad=False))
        else:
            module.register_buffer(leaf, reader.full(name, BUFFER))
    model.tie_weights()
    return model


def _merged(reader: Reader, section: Model, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    """Base and adapters merged in fp32, then cast. A 4-bit base is dequantized first, as it was used in training."""
    model: Any = build_model(section, seed, dequantized=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(trained(reader, name))
    return model.merge_and_unload().to(dtype)


def _write_adapter(reader: Reader, section: Model, seed: int, dtype: torch.dtype, out: Path) -> None:
    """Write the adapter as peft's `PeftModel.from_pretrained` loads it."""
    assert section.lora is not None
    model = hollow_model(section, seed)
    config = model.peft_config["default"]  # with the tensors of experts that peft has found
    found = {name: trained(reader, name) for name in sorted(reader.index)}
    if section.lora.start == "pissa":
        first = adapted_weights(open_weights(section, seed), model, section.lora).taken()
        found = {name: _less(name, tensor, first[name]) if name in first else tensor for name, tensor in found.items()}
        config.lora_alpha *= 2**0.5 if section.lora.rslora else 2
        config.r *= 2
    weights = {_adapter_name(name): tensor.to(dtype) for name, tensor in found.items()}
    safetensors_writer.write(out / "adapter_model.safetensors", weights, {"format": "pt"})
    config.base_model_name_or_path, config.inference_mode = section.path, True
    config.save_pretrained(out)


def _less(name: str, trained: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """A matrix of the adapter that is the trained one less the first one, of twice the rank."""
    if ".lora_A." in name:
        return torch.cat([trained, first.to(trained)])
    return torch.cat([trained, -first.to(trained)], 1)


def _adapter_name(name: str) -> str:
    """Name of a parameter in peft's files (peft 0.21.2 leaves out the adapter's name, and `weight` of DoRA's)."""
    name = name.replace(TRAINED_WHOLE, ".").replace(".default.", ".")
    return name.removesuffix(".weight") if name.endswith(f"{MAGNITUDE}.weight") else name


def _write_pooling(recipe: Recipe, size: int, out: Path) -> None:
    """Write what sentence-transformers needs to load the directory: which modules follow the model, and their settings.

    Keys as in its versions 2 to 6, which read the older names of the pooling modes, too.
    """
    settings = recipe.train.contrastive or Contrastive()
    kinds = {"mean": "pooling_mode_mean_tokens", "last": "pooling_mode_lasttoken", "cls": "pooling_mode_cls_token"}
    modes = {name: kind == settings.pooling for kind, name in kinds.items()}
    modules = ["Transformer", "Pooling", *(["Normalize"] if settings.similarity == "cosine" else [])]
    folders = ["", "1_Pooling", "2_Normalize"]
    listed = [
        {"idx": place, "name": str(place), "path": folders[place], "type": f"sentence_transformers.models.{name}"}
        for place, name in enumerate(modules)
    ]
    for folder in folders[1 : len(modules)]:
        (out / folder).mkdir()
    files: dict[str, Any] = {
        "modules.json": listed,
        "1_Pooling/config.json": {"word_embedding_dimension": size, **modes},
        "sentence_bert_config.json": {"max_seq_length": recipe.data.seq_len, "do_lower_case": False},
        "config_sentence_transformers.json": {"similarity_fn_name": settings.similarity, "prompts": {}},
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(recipe: Recipe, out: Path, trust_remote_code: bool) -> None:
    """Write the tokenizer beside the weights, if the run had one that can be saved; `bytes` needs none."""
    source = recipe.data.tokenizer or recipe.model.path
    if source is None or source == "bytes":
        return
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError):
        return
    tokenizer.save_pretrained(out)
