"""Which parameters the optimizer updates with which learning rate and weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from toolkit.recipe.model_section import Lora
from toolkit.recipe.optimizer_sections import Muon
from toolkit.recipe.sections import Train
from toolkit.runtime.models.parameter_shards import holds_experts, model_shape
from toolkit.runtime.optimizers.muon import RULE, is_matrix

SECOND_FACTORS = "*.lora_B.*"
"""Names of the matrices of adapters that start at zero."""


def with_adapter_rate(train: Train, lora: Lora | None) -> Train:
    """The settings with LoRA+'s rate of the second matrices, unless the recipe has a multiplier for them itself."""
    if lora is None or lora.lr_ratio == 1.0:
        return train
    return replace(train, lr_multipliers={**(train.lr_multipliers or {}), SECOND_FACTORS: lora.lr_ratio})


def parameter_groups(named: Iterable[tuple[str, torch.Tensor]], train: Train, lr: float) -> list[Any]:
    """The trained parameters for an optimizer: a plain list, or groups with their own learning rate or weight decay.

    The first group has the recipe's own learning rate, if any parameter does: it is the one that is reported. Experts
    that are distributed have groups of their own, marked for DeepSpeed: it shards a group over one set of ranks. Those
    that DeepSpeed 0.19.8 would make are one per layer, and under ZeRO 1 and 2 a rank then holds gradients of nearly
    all experts instead of its share (`grads_in_partition`).
    """
    found: dict[tuple[float, float, str, str], list[torch.Tensor]] = {(1.0, train.weight_decay, "", ""): []}
    for name, parameter in named:
        if parameter.requires_grad:
            group: str = getattr(parameter, "group_name", "") if holds_experts(parameter) else ""
            factor, rule = multiplier(name, train.lr_multipliers or {}), _rule(name, parameter, train)
            found.setdefault((factor, _decay(parameter, train), group, rule), []).append(parameter)
    kept = {key: parameters for key, parameters in found.items() if parameters}
    if list(kept) in ([(1.0, train.weight_decay, "", "")], []):
        return [parameter for parameters in kept.values() for parameter in parameters]
    return [
        {
            "params": parameters,
            "lr": lr * factor,
            "weight_decay": decay,
            **({"moe": True, "name": group} if group else {}),
            **({RULE: rule} if rule else {}),
        }
        for (factor, decay, group, rule), parameters in sorted(kept.items(), key=lambda item: item[0][0] != 1.0)
    ]


def multiplier(name: str, multipliers: Mapping[str, float]) -> float:
    """Factor of a parameter's learning rate: that of the first pattern that matches its name, else 1."""
    return next((factor for pattern, factor in multipliers.items() if fnmatchcase(name, pattern)), 1.0)


def _decay(parameter: torch.Tensor, train: Train) -> float:
    return train.weight_decay if train.decay == "all" or len(model_shape(parameter)) > 1 else 0.0


def _rule(name: str, parameter: torch.Tensor, train: Train) -> str:
    """Which of several rules of the optimizer a parameter gets; empty if it has one."""
    if train.optimizer != "muon":
        return ""
    return "muon" if is_matrix(name, model_shape(parameter), train.muon or Muon()) else "adamw"
