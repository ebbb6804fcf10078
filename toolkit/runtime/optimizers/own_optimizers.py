"""The toolkit's own optimizers, and which one a recipe asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from toolkit.recipe.optimizer_sections import Muon as MuonSection
from toolkit.recipe.sections import Train
from toolkit.runtime.optimizers.muon import Muon
from toolkit.runtime.optimizers.onebit_adam import OneBitAdam
from toolkit.runtime.optimizers.packed_optimizer import PackedOptimizer
from toolkit.runtime.optimizers.schedule_free import ScheduleFree
from toolkit.runtime.optimizers.update_rules import RULES, Layers, Rule, adamw


class LayerwiseOptimizer(torch.optim.Optimizer):
    """An optimizer from an update rule that may need norms of layers.

    `step` does nothing before `begin`: DeepSpeed 0.19.8 takes a step with zero gradients when it creates some of its
    optimizers (see `deepspeed_fixups.undo_first_step`).
    """

    def __init__(self, parameters: Iterable[torch.Tensor], rule: Rule, train: Train, lr: float) -> None:
        self._rule, self._train = rule, train
        self._layers: Layers | None = None
        super().__init__(parameters, {"lr": lr, "weight_decay": train.weight_decay})

    def begin(self, layers: Layers) -> None:
        """Take steps from now on."""
        self._layers = layers

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every tensor that has a gradient."""
        if self._layers is None:
            return
        for group in self.param_groups:
            train = replace(self._train, weight_decay=float(group["weight_decay"]))
            for weight in group["params"]:
                if weight.grad is not None:
                    change = self._rule(weight, weight.grad, self.state[weight], train, self._layers)
                    weight.sub_(change, alpha=float(group["lr"]))


Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


def own_optimizer(train: Train, config: dict[str, Any]) -> tuple[Make | None, dict[str, Any]]:
    """(factory of the optimizer if it is one of ours, DeepSpeed config to use with it)."""
    lr = float(config["optimizer"]["params"]["lr"])
    rest = {key: value for key, value in config.items() if key != "optimizer"}
    if train.optimizer == "onebit_adam":
        return (lambda parameters: OneBitAdam(parameters, train, lr)), rest
    if train.optimizer == "schedule_free":
        return (lambda parameters: ScheduleFree(parameters, train, lr)), rest
    if train.optimizer == "muon":
        return (lambda parameters: Muon(parameters, train, train.muon or MuonSection(), lr)), rest
    rule = RULES.get(train.optimizer)
    if train.states != "fp32":
        packed = rule or adamw
        return (lambda parameters: PackedOptimizer(parameters, packed, train, lr)), rest
    if rule is None:
        return None, config
    return (lambda parameters: LayerwiseOptimizer(parameters, rule, train, lr)), rest
