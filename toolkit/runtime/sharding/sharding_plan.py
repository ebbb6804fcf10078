"""Which style each module gets: transformers' own plan, pairs found by name, or a gathered linear, which always works.

It reads shapes and names only, so it works on a skeleton. The float64 proof on a tiny model finds wrong guesses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from toolkit.runtime.models.adapters import LINEAR

Styles = dict[str, str]
"""Module or parameter name → style."""

CORRECTIONS: dict[str, dict[str, str]] = {
    # Gate and up are one matrix. The plan of transformers 5.22.2 slices it as one piece: ranks mix gate with up rows.
    "inkling_text": {"model.layers.*.mlp.experts.gate_up_proj": "packed_colwise"},
    # The activation inside the sharded MLP has learned scalars; transformers 5.22.2 leaves their gradients partial.
    "apertus": {"model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},
}
"""Model types whose plan in transformers is wrong. A row can go when the float64 proof (`toolkit coverage`) passes
without it."""

WHOLE_HEADS: dict[str, str] = {
    "big_bird": "block-sparse attention reshapes by the config's head count",
    "cpmant": "its position bias is made for all heads",
    "doge": "its dynamic mask is made for all heads",
    "mpt": "its ALiBi bias is made for all heads",
    "trocr": "attention reshapes by the config's head count",
}
"""Types whose attention needs all heads on every rank: every linear is gathered on its own."""

GATHERED = {
    "colwise": "colwise_gather_output",
    "packed_colwise": "colwise_gather_output",
    "rowwise": "rowwise_split_input",
    "replicated_with_grad_allreduce": "",
    "mla_kv_a_proj": "",
    "all_reduce": "",
}
"""Replacement of a style if heads or widths are not divisible: activations between modules stay replicated."""

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LARGE_TABLE = 512
"""Other embedding tables with more rows than this are sharded."""


def tensor_styles(model: PreTrainedModel, ranks: int) -> tuple[Styles, list[str]]:
    """(style by name, attention modules whose head counts must be divided)."""
    whole_heads = model.config.model_type in WHOLE_HEADS
    styles: Styles = {} if whole_heads else _own_plan(model)
    heads: list[str] = []
    has_plan = len({_starred(name) for name in styles}) > 1  # a plan for the output head alone is none for the layers
    if not has_plan and not whole_heads:
        pairs, heads = find_pairs(model, ranks)
        styles |= pairs
    styles = _gather_where_needed(model, styles, ranks)
    styles |= _everything_else(model, styles)
    return _with_embeddings(model, styles), heads


def _starred(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _own_plan(model: PreTrainedModel) -> Styles:
    """The plan of transformers, with wildcards resolved and known errors corrected."""
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    plan |= CORRECTIONS.get(model.config.model_type, {})
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return {name: plan[_starred(name)] for name in names if _starred(name) in plan}


def _gather_where_needed(model: torch.nn.Module, styles: Styles, ranks: int) -> Styles:
    """Blocks that are not divisible run with replicated activations, which always works."""
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
    """Styles of modules without one. Linears: sliced columns, gathered output. 3-D weights: stored in slices."""
    return {
        name: style
        for name, module in model.named_modules()
        if name not in styles and f"{name}.weight" not in styles and not _inside(name, styles)
        for style in [_general_style(module)]
        if style
    }


def _inside(name: str, styles: Styles) -> bool:
    """Whether a module around it is sharded as a unit."""
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
    """Token table and output head, sharded by vocabulary. If they share a parameter, both are sharded or neither.

    An encoder-decoder has the table several times, and tables stay tables.
    """
    table: Any = model.get_input_embeddings()
    if not isinstance(table, torch.nn.Embedding) or not any(module is table for module in model.modules()):
        return styles
    result = dict(styles)
    sharing = {name: m for name, m in model.named_modules() if getattr(m, "weight", None) is table.weight}
    tables = [name for name, module in sharing.items() if isinstance(module, torch.nn.Embedding)]
    heads = [name for name in sharing if name not in tables]
    if not list(table.children()) and all(name in result for name in heads):
        return result | dict.fromkeys(tables, "embedding_rowwise") | dict.fromkeys(heads, "colwise_gather_output")
    for name in sharing:
        result.pop(name, None)
    return result


QUERY_KEY_VALUE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("Wq", "Wk", "Wv"),
    ("q_lin", "k_lin", "v_lin"),
    ("project_q", "project_k", "project_v"),
    ("c_attn",),  # three in one matrix
    ("Wqkv",),
)
INTERLEAVED = {"bloom": ("query_key_value",)}
"""Types whose queries, keys and values are one matrix, head by head: it is cut in one piece."""
ATTENTION_OUTPUT = ("o_proj", "out_proj", "dense", "Wo", "out_lin", "attention_out", "c_proj", "../output.dense")
MLP = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("w1", "w3"), "w2"),
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("intermediate.dense",), "output.dense"),
    (("lin1",), "lin2"),
    (("w_in.w_0", "w_in.w_1"), "w_out"),
    (("0",), "2"),
)
HEAD_WIDTHS = ("head_dim", "attention_head_size", "dim_head", "depth")
HEAD_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads")
DIVIDED = (*HEAD_COUNTS, "num_key_value_heads", "num_kv_heads", "all_head_size", "split_size", "embed_dim")
"""Attributes of an attention module that count heads, or their total width."""


def in_features(module: Any) -> int:
    """Width of a linear's input."""
    return int(module.weight.shape[0 if isinstance(module, Conv1D) else 1])


def out_features(module: Any) -> int:
    """Width of a linear's output."""
    return int(module.weight.shape[1 if isinstance(module, Conv1D) else 0])


def find_pairs(model: PreTrainedModel, ranks: int) -> tuple[dict[str, str], list[str]]:
    """(styles of attention and MLP blocks that are divisible, the attention modules among them)."""
    blocks = _Blocks(model, ranks)
    for name, module in model.named_modules():
        if any(isinstance(child, torch.nn.Conv1d) for child in module.children()):
            continue  # a convolution mixes channels before the heads
        blocks.attention(name, module)
        blocks.mlp(name, module)
    return blocks.styles, blocks.heads


Found = tuple[str, torch.nn.Module]


class _Blocks:
    """Column and row pairs found so far."""

    def __init__(self, model: PreTrainedModel, ranks: int) -> None:
        self._modules = dict(model.named_modules())
        self._interleaved = INTERLEAVED.get(model.config.model_type, ())
        self._ranks = ranks
        self.styles: dict[str, str] = {}
        self.heads: list[str] = []

    def attention(self, base: str, block: torch.nn.Module) -> None:
        """Queries, keys and values by columns of complete heads, the output by rows."""
        for names in (*QUERY_KEY_VALUE, self._interleaved):
            if not (inputs := self._all(base, names)):
                continue
            output = next((found for name in ATTENTION_OUTPUT if (found := self._linear(base, name))), None)
            if output and self._heads_divide(block, inputs, output):
                norms = self._other_parameters(block, [*inputs, output], _head_width(block, in_features(output[1])))
                if norms is None:
                    continue
                in_one_piece = len(inputs) == 3 or names == self._interleaved
                style = "colwise" if in_one_piece else "packed3_colwise"
                self.styles |= {name: style for name, _ in inputs} | {output[0]: "rowwise"}
                self.styles |= {f"{base}.{name}": "replicated_with_grad_allreduce" for name in norms}
                self.heads.append(base)
                return

    def mlp(self, base: str, block: torch.nn.Module) -> None:
        """The up-projections by columns, the down-projection by rows."""
        for names, last in MLP:
            inputs, output = self._all(base, names), self._linear(base, last)
            if not inputs or not output or any(name in self.styles for name, _ in [*inputs, output]):
                continue
            width = in_features(output[1])
            if width % self._ranks or any(out_features(module) != width for _, module in inputs):
                continue
            own = {id(p) for _, module in [*inputs, output] for p in module.parameters()}
            others = [p for p in block.parameters() if id(p) not in own and p.ndim == 1 and p.shape[-1] == width]
            if others and last != "output.dense":  # another parameter acts on the inner width
                continue
            self.styles |= {name: "colwise" for name, _ in inputs} | {output[0]: "rowwise"}
            return

    def _linear(self, base: str, relative: str) -> Found | None:
        while relative.startswith("../"):
            base, relative = base.rpartition(".")[0], relative[3:]
        name = f"{base}.{relative}" if base else relative
        module = self._modules.get(name)
        inner = self._modules.get(f"{name}.linear")
        if not isinstance(module, LINEAR) and isinstance(inner, torch.nn.Linear):
            name, module = f"{name}.linear", inner
        return (name, module) if isinstance(module, LINEAR) else None

    def _all(self, base: str, names: Sequence[str]) -> list[Found]:
        found = [self._linear(base, name) for name in names]
        return [item for item in found if item] if all(found) else []

    def _heads_divide(self, block: torch.nn.Module, inputs: list[Found], output: Found) -> bool:
        width = in_features(output[1])
        head = _head_width(block, width)
        if not head or width % (head * self._ranks):
            return False
        if len(inputs) == 1:
            return out_features(inputs[0][1]) == 3 * width
        return all(out_features(module) % (head * self._ranks) == 0 for _, module in inputs)

    def _other_parameters(self, block: torch.nn.Module, linears: list[Found], head: int) -> list[str] | None:
        """Names of norms over one head, which may stay replicated; None if the block has any other parameter."""
        own = {id(p) for _, module in linears for p in module.parameters()}
        norms = []
        for name, module in block.named_modules():
            others = [p for p in module.parameters(recurse=False) if id(p) not in own]
            if others and (not name or any(tuple(p.shape) != (head,) for p in others)):
                return None
            if others:
                norms.append(name)
        return norms


def _head_width(block: torch.nn.Module, width: int) -> int:
    for key in HEAD_WIDTHS:
        if isinstance(value := getattr(block, key, None), int) and value:
            return value
    heads = next((value for key in HEAD_COUNTS if isinstance(value := getattr(block, key, None), int)), 0)
    return width // heads if heads else 0
