"""Column and row pairs of models without a plan, found by the names and shapes of linears in a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

LINEAR = (torch.nn.Linear, Conv1D)

QUERY_KEY_VALUE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("Wq", "Wk", "Wv"),
    ("q_lin", "k_lin", "v_lin"),
    ("project_q", "project_k", "project_v"),
    ("c_attn",),  # three in one matrix
    ("Wqkv",),
)
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
"""Attributes of an attention module that count heads or their width together."""


def in_features(module: Any) -> int:
    """Width of a linear's input."""
    return int(module.weight.shape[0 if isinstance(module, Conv1D) else 1])


def out_features(module: Any) -> int:
    """Width of a linear's output."""
    return int(module.weight.shape[1 if isinstance(module, Conv1D) else 0])


def find_pairs(model: torch.nn.Module, ranks: int) -> tuple[dict[str, str], list[str]]:
    """Style by module name for attention and MLP blocks that divide, and the attention modules among them."""
    blocks = _Blocks(model, ranks)
    for name, module in model.named_modules():
        if any(isinstance(child, torch.nn.Conv1d) for child in module.children()):
            continue  # a convolution mixes channels before the heads
        blocks.attention(name, module)
        blocks.mlp(name, module)
    return blocks.styles, blocks.heads


Found = tuple[str, torch.nn.Module]


class _Blocks:
    """Pairs found so far."""

    def __init__(self, model: torch.nn.Module, ranks: int) -> None:
        self._modules = dict(model.named_modules())
        self._ranks = ranks
        self.styles: dict[str, str] = {}
        self.heads: list[str] = []

    def attention(self, base: str, block: torch.nn.Module) -> None:
        """Queries, keys and values by columns of whole heads, the output by rows."""
        for names in QUERY_KEY_VALUE:
            inputs = self._all(base, names)
            output = next((found for name in ATTENTION_OUTPUT if (found := self._linear(base, name))), None)
            if inputs and output and self._heads_divide(block, inputs, output):
                norms = self._other_parameters(block, [*inputs, output], _head_width(block, in_features(output[1])))
                if norms is None:
                    continue
                style = "colwise" if len(inputs) == 3 else "packed3_colwise"
                self.styles |= {name: style for name, _ in inputs} | {output[0]: "rowwise"}
                self.styles |= {f"{base}.{name}": "replicated_with_grad_allreduce" for name in norms}
                self.heads.append(base)
                return

    def mlp(self, base: str, block: torch.nn.Module) -> None:
        """The widening linears by columns, the narrowing one by rows."""
        for names, last in MLP:
            inputs, output = self._all(base, names), self._linear(base, last)
            if not inputs or not output or any(name in self.styles for name, _ in [*inputs, output]):
                continue
            width = in_features(output[1])
            if width % self._ranks or any(out_features(module) != width for _, module in inputs):
                continue
            own = {id(p) for _, module in [*inputs, output] for p in module.parameters()}
            others = [p for p in block.parameters() if id(p) not in own and p.ndim == 1 and p.shape[-1] == width]
            if others and last != "output.dense":  # something else works on the inner width
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
        """Norms over one head, which may stay whole; None if there is anything else in the block."""
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
