"""Element-wise update rules with states that are stored in 8 bits or in bf16."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from toolkit.recipe.sections import Train
from toolkit.runtime.checkpoint.fragments import AVERAGE
from toolkit.runtime.optimizers.packed_states import Packing, stored_kinds
from toolkit.runtime.optimizers.update_rules import Layers, Rule, State


class PackedOptimizer(torch.optim.Optimizer):
    """An element-wise rule whose states are stored in fewer bits; `step` does nothing before `begin`.

    While a checkpoint is loaded, fp32 states are in `state` under their own names, in host memory; `pack` stores them.
    """

    def __init__(self, parameters: Iterable[Any], rule: Rule, train: Train, lr: float) -> None:
        self._rule, self._train = rule, train
        self.states = train.states
        self._packings: Mapping[torch.Tensor, Packing] = {}
        super().__init__(parameters, {"lr": lr, "weight_decay": train.weight_decay})

    def begin(self, packings: Mapping[torch.Tensor, Packing]) -> None:
        """Take steps from now on."""
        self._packings = packings

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every tensor that has a gradient. Collective where ranks share blocks."""
        for group in self.param_groups if self._packings else ():
            train, lr = replace(self._train, weight_decay=float(group["weight_decay"])), float(group["lr"])
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, train, lr)

    def _update(self, weight: torch.Tensor, train: Train, lr: float) -> None:
        assert weight.grad is not None
        packing, state = self._packings[weight], self.state[weight]
        step, values, gradients = int(state.get("step", 0)), weight.view(-1), weight.grad.view(-1)
        for place, where in enumerate(packing.places()):
            kinds = stored_kinds(state) if step else ()
            own: dict[str, Any] = {"step": step} | {kind: packing.load(state, kind, place) for kind in kinds}
            part = values[where]
            values[where] = part - lr * self._rule(part, gradients[where], own, train, Layers())
            packing.save(state, {kind: own[kind] for kind in own if kind != "step"}, place, step + 1)
        state["step"] = step + 1

    def expanded(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The states of a tensor in fp32 and in its shape, in host memory; changes are kept until `pack`."""
        state = self.state.get(weight, {})
        found = {kind: value for kind, value in state.items() if isinstance(value, torch.Tensor)}
        if _pending(state) or weight not in self._packings:
            return found
        packing = self._packings[weight]
        for kind in stored_kinds(state):
            flat = torch.zeros(weight.numel())
            for place, where in enumerate(packing.places()):
                flat[where if isinstance(where, slice) else where.cpu()] = packing.load(state, kind, place).cpu()
            found[kind] = flat.view(weight.shape)
        return found

    @torch.no_grad()
    def pack(self) -> None:
        """Store states that were loaded from a checkpoint. Collective where ranks share blocks."""
        for weight, packing in self._packings.items():
            state = self.state[weight]
            pending = {kind: state.pop(kind) for kind in _pending(state)}
            for place, where in enumerate(packing.places()) if pending else ():
                index = where if isinstance(where, slice) else where.cpu()
                own = {kind: value.view(-1)[index].to(weight.device) for kind, value in pending.items()}
                packing.save(state, own, place, int(state["step"]))


def _pending(state: State) -> list[str]:
    """The fp32 states that are not stored yet."""
    return [kind for kind, value in state.items() if isinstance(value, torch.Tensor) and kind != AVERAGE]
