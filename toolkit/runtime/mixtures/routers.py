"""Finds the routers of a mixture from what transformers says about its modules, and reads what they return."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils.output_capturing import OutputRecorder

BIASES = ("e_score_correction_bias", "expert_bias")
"""Names of biases that choose experts without weighing them."""

NUMBERS = ("num_experts", "n_routed_experts", "num_local_experts", "num_router_classes")
"""Names that routers give to the number of experts; the largest counts."""


@dataclass(frozen=True)
class Router:
    """One router: the module that gives each token its experts."""

    name: str
    module: torch.nn.Module
    output: int
    """Place of the logits in what the module returns."""
    sigmoid: bool
    """Whether scores are sigmoids of the logits; otherwise their softmax."""

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores over all experts, which sum to 1 for each token."""
        if not self.sigmoid:
            return logits.softmax(-1)
        own = logits.sigmoid()
        return own / own.sum(-1, keepdim=True).clamp_min(1e-20)


@dataclass(frozen=True)
class Routed:
    """What a router returned for some tokens."""

    logits: torch.Tensor
    """One row per token, one column per expert."""
    experts: torch.Tensor
    """Numbers of the chosen experts, a row per token."""
    carrier: int
    """Place of the weights of the chosen experts, which every mixture uses: gradients are attached to them."""


@dataclass(frozen=True)
class RouterTable:
    """The routers of a full model: read it before a model is reduced to a stage."""

    names: tuple[str, ...]
    num_experts: int
    """Of the largest router."""

    @classmethod
    def of(cls, model: torch.nn.Module) -> RouterTable:
        """The routers of a model or skeleton."""
        routers = find_routers(model)
        return cls(tuple(router.name for router in routers), max(map(_num_experts, routers), default=0))


def _num_experts(router: Router) -> int:
    """Number of experts that a router chooses from: its module says so, or its weight has a row for each.

    LongCat and ZAYA (transformers 5.22.2) also choose from experts that compute nothing, a number of its own."""
    given = [getattr(router.module, key, None) for key in NUMBERS]
    rows = [parameter.shape[0] for parameter in router.module.parameters() if parameter.dim() == 2]
    return max((number for number in given if isinstance(number, int)), default=max(rows, default=0))


def find_routers(model: torch.nn.Module) -> list[Router]:
    """The routers of a model, in the order of its layers; empty for dense models and for routers of another form.

    transformers (5.22.2) lists for every mixture which module's output holds the router's logits.
    """
    recorders = [recorder for owner in model.modules() for recorder in _recorders(owner)]
    found = {}
    for name, module in model.named_modules():
        for recorder in recorders:
            if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name:
                found[name] = Router(name, module, recorder.index, _is_sigmoid(type(module).forward))
    return list(found.values())


def _recorders(owner: torch.nn.Module) -> Iterator[OutputRecorder]:
    listed = getattr(owner, "_can_record_outputs", None) or {}
    given = listed.get("router_logits", [])
    yield from (one for one in (given if isinstance(given, list) else [given]) if isinstance(one, OutputRecorder))


@functools.cache
def _is_sigmoid(forward: Callable[..., Any]) -> bool:
    """Whether a router's own code takes sigmoids; configs have no common key for it."""
    return "sigmoid" in inspect.getsource(forward)


def read_output(router: Router, output: Any) -> Routed | None:
    """A router's result; None if it does not have the form (logits, weights, experts), as JetMoE's."""
    if not isinstance(output, tuple) or router.output >= len(output):
        return None
    logits = output[router.output]
    if not _is_table(logits) or not logits.is_floating_point():
        return None
    tokens = logits.shape[0]
    experts = next((one for one in output if _is_table(one) and not one.is_floating_point()), None)
    if experts is None or experts.shape[0] != tokens:
        return None
    for place, one in enumerate(output):
        if place != router.output and _is_table(one) and one.is_floating_point() and one.shape == experts.shape:
            return Routed(logits, experts, place)
    return None


def _is_table(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 2


def bias_of(model: torch.nn.Module, router: Router) -> tuple[torch.nn.Module, str] | None:
    """The module and name of the bias by which a router chooses experts: its own, or that of the block around it."""
    parent = model.get_submodule(router.name.rpartition(".")[0])
    for holder in (*router.module.modules(), parent):
        for name in BIASES:
            if name in holder._buffers or name in holder._parameters:
                return holder, name
    return None
