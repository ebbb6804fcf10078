"""Which style each module gets: transformers' own plan, pairs found by their names, or a gathered linear that fits all.

It looks at shapes and names only, so it works on a skeleton. A wrong guess is found by the float64 twin, not by users.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from toolkit.runtime.sharding.linear_pairs import LINEAR, find_pairs, in_features, out_features

Styles = dict[str, str]
"""Module or parameter name → style."""

CORRECTIONS: dict[str, dict[str, str]] = {
    # Gate and up are one matrix, which transformers (5.22) cuts as if it were one piece.
    "inkling_text": {"model.layers.*.mlp.experts.gate_up_proj": "packed_colwise"},
    # Learned scalars of the activation sit inside the sharded MLP; transformers (5.22) leaves their gradients partial.
    "apertus": {"model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},
}
"""Where transformers' plan is wrong: the float64 twin finds these."""

WHOLE_HEADS: dict[str, str] = {
    "big_bird": "block-sparse attention reshapes by the config's head count",
    "cpmant": "its position bias is made for all heads",
    "doge": "its dynamic mask is made for all heads",
    "mpt": "its ALiBi bias is made for all heads",
    "trocr": "attention reshapes by the config's head count",
}
"""Types whose attention needs all heads on every rank: every linear is gathered by itself."""

GATHERED = {
    "colwise": "colwise_gather_output",
    "packed_colwise": "colwise_gather_output",
    "rowwise": "rowwise_split_input",
    "replicated_with_grad_allreduce": "",
    "mla_kv_a_proj": "",
    "all_reduce": "",
}
"""What a style becomes where heads or widths do not divide: activations stay whole between modules."""

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LARGE_TABLE = 512
"""Rows from which a further embedding table is cut."""


def tensor_styles(model: PreTrainedModel, ranks: int) -> tuple[Styles, list[str]]:
    """Style by name, and the attention modules whose head counts must be divided."""
    whole_heads = model.config.model_type in WHOLE_HEADS
    styles: Styles = {} if whole_heads else _own_plan(model)
    heads: list[str] = []
    if len({_starred(name) for name in styles}) <= 1 and not whole_heads:  # at most the head: no plan for the layers
        pairs, heads = find_pairs(model, ranks)
        styles |= pairs
    styles = _gather_where_needed(model, styles, ranks)
    styles |= _everything_else(model, styles)
    return _with_embeddings(model, styles), heads


def _starred(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _own_plan(model: PreTrainedModel) -> Styles:
    """transformers' plan, with wildcards resolved and known errors corrected."""
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    plan |= CORRECTIONS.get(model.config.model_type, {})
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return {name: plan[_starred(name)] for name in names if _starred(name) in plan}


def _gather_where_needed(model: torch.nn.Module, styles: Styles, ranks: int) -> Styles:
    """Blocks that do not divide run with whole activations, which always fits."""
    modules = dict(model.named_modules())
    uneven = {name.rpartition(".")[0] for name, style in styles.items() if _uneven(modules, name, style, ranks)}
    changed = {
        n: GATHERED.get(style, style) if n.rpartition(".")[0] in uneven else style for n, style in styles.items()
    }
    return {name: style for name, style in changed.items() if style}


def _uneven(modules: dict[str, torch.nn.Module], name: str, style: str, ranks: int) -> bool:
    module = modules.get(name)
    if not isinstance(module, LINEAR):
        return False
    parent, _, leaf = name.rpartition(".")
    head = getattr(modules[parent], "head_dim", None) or 1
    unit = head if leaf in ATTENTION and isinstance(head, int) else 1
    return (style == "colwise" and out_features(module) % (unit * ranks) != 0) or (
        style == "rowwise" and in_features(module) % ranks != 0
    )


def _everything_else(model: torch.nn.Module, styles: Styles) -> Styles:
    """Linears that nothing speaks of: own columns, output gathered. 3-D weights: stored in slices."""
    return {
        name: style
        for name, module in model.named_modules()
        if name not in styles and f"{name}.weight" not in styles and not _inside(name, styles)
        for style in [_general_style(module)]
        if style
    }


def _inside(name: str, styles: Styles) -> bool:
    """Whether a module around it computes in shards as a whole."""
    return any(styles.get(parent) in ("moe_tp_experts", "all_reduce") for parent in _parents(name))


def _parents(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _general_style(module: torch.nn.Module) -> str:
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    if any(parameter.ndim == 3 for parameter in own) and not isinstance(module, torch.nn.Conv1d):
        return "stored"
    if type(module) is torch.nn.Embedding and module.weight.shape[0] > LARGE_TABLE:
        return "embedding_rowwise"
    if type(module) in (torch.nn.Linear, Conv1D) and min(own[0].shape) > 1:
        return "colwise_gather_output"
    return ""


def _with_embeddings(model: PreTrainedModel, styles: Styles) -> Styles:
    """Token table and head, by vocabulary; where they are one parameter, both or neither are cut."""
    table: Any = model.get_input_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    if not isinstance(table, torch.nn.Embedding) or id(table) not in names:
        return styles
    own, result = names[id(table)], dict(styles)
    sharers = [n for n, m in model.named_modules() if m is not table and getattr(m, "weight", None) is table.weight]
    if not list(table.children()) and all(name in result for name in sharers):
        return result | {own: "embedding_rowwise"} | dict.fromkeys(sharers, "colwise_gather_output")
    for name in [own, *sharers]:
        result.pop(name, None)
    return result
