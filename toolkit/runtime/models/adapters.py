"""LoRA adapters of a model, made by peft."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from toolkit.errors import BadInput, first_line
from toolkit.recipe.model_section import Lora

LINEAR = (torch.nn.Linear, Conv1D)
"""Kinds of linear layers in transformers' models."""
MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Types on whose `out_proj` peft 0.21.2 refuses adapters."""
ADAPTER_TASKS = {"classification": "SEQ_CLS", "seq2seq": "SEQ_2_SEQ_LM", "image-classification": None,
                 "embedding": "FEATURE_EXTRACTION"}  # fmt: skip


def with_adapters(model: PreTrainedModel, lora: Lora, task: str | None) -> PreTrainedModel:
    """The frozen model with trainable low-rank adapters."""
    from peft import LoraConfig, get_peft_model

    linears = sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, LINEAR)})
    modules, parameters = _targets(model, lora)
    without = _unadaptable(model) if modules == "all-linear" else {}
    for name in sorted({name.rpartition(".")[2] for name in without}):
        print(f"no adapters on {name}: {next(why for at, why in without.items() if at.endswith(name))}")
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        modules_to_save=list(lora.modules_to_save) or None,
        target_modules=modules,
        exclude_modules=list(without) or None,
        target_parameters=parameters or None,
        task_type=ADAPTER_TASKS.get(task or "", "CAUSAL_LM"),
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        known = f"{first_line(error)}; linear layers of this model: {', '.join([*linears, *_expert_tensors(model)])}"
        raise BadInput("model.lora.targets", known) from None


def _targets(model: PreTrainedModel, lora: Lora) -> tuple[str | list[str], list[str]]:
    """Modules with adapters, and tensors of experts with adapters, which no module of their name holds."""
    if isinstance(lora.targets, str):
        return ("all-linear" if lora.targets == "auto" else lora.targets), []
    modules = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    tensors = [name for name in lora.targets if name not in modules and name in _expert_tensors(model)]
    return [name for name in lora.targets if name not in tensors], tensors


def _unadaptable(model: PreTrainedModel) -> dict[str, str]:
    """Linear layers that can't have adapters, and why."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, LINEAR) and model.config.model_type in MAMBA and name.endswith(".out_proj"):
            found[name] = "a kernel of Mamba layers reads its weight, so an adapter would have no effect"
        elif isinstance(module, torch.nn.Linear) and not _is_plain(module):
            found[name] = f"{type(module).__name__} does not return the product with its weight"
    return found


def _is_plain(module: torch.nn.Linear) -> bool:
    """Whether a linear layer maps rows to rows; routers, for example, may return several tensors."""
    kind = type(module)
    if kind.forward is torch.nn.Linear.forward or not kind.__module__.startswith("transformers.models."):
        return True
    own = {name: torch.empty_like(one, device="meta") for name, one in module.named_parameters()}
    try:
        output = torch.func.functional_call(module, own, (torch.empty(2, module.in_features, device="meta"),))
    except (RuntimeError, TypeError, ValueError):  # it takes other inputs
        return False
    return isinstance(output, torch.Tensor) and output.shape == (2, module.out_features)


def _expert_tensors(model: PreTrainedModel) -> list[str]:
    """Names of tensors that hold a matrix for every expert."""
    return sorted(
        {name.rpartition(".")[2] for name, p in model.named_parameters() if p.ndim == 3 and ".experts." in name}
    )
