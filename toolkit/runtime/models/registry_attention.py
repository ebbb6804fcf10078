"""Attention of types that transformers 5.22.2 computes by code of their own, made to use its registry of functions.

So the kernels of all other types compute it: documents stay apart, and no tensor has two dimensions of the sequence
length. A trial on a tiny model shows whether results stay the same (`attention.py`).

BLOOM's ALiBi adds to each score a bias that depends on the head and the key only. So it fits into the product of
queries and keys: keys get further columns with the bias, and queries ones. Every kernel then computes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bloom.modeling_bloom import BloomAttention, dropout_add
from transformers.models.codegen.modeling_codegen import CodeGenAttention
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention
from transformers.models.gpt_neox_japanese.modeling_gpt_neox_japanese import GPTNeoXJapaneseAttention
from transformers.models.gptj.modeling_gptj import GPTJAttention

BIAS_COLUMNS = 8
"""Further columns of queries, keys and values: flash kernels take heads whose width is a multiple of 8."""


class RegistryBloomAttention(BloomAttention):  # type: ignore[misc]
    """BLOOM's attention, computed by the function that its config names in transformers' registry."""

    config: Any
    placed: Callable[[torch.Tensor], torch.Tensor] | None = None
    """From biases of keys that are numbered from 0 to those of the tokens of a rank that shares the sequence."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        alibi: torch.Tensor,
        attention_mask: Any,
        layer_past: Any = None,
        **settings: Any,
    ) -> tuple[torch.Tensor, None]:
        """Output with the residual added; transformers dictates the signature."""
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        bias = alibi.view(key.shape[0], self.num_heads, -1)
        bias = bias if self.placed is None else self.placed(bias)
        attended, _ = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation](
            self,
            *with_bias(query, key, value, bias, self.inv_norm_factor),
            attention_mask,
            scaling=self.inv_norm_factor,
            dropout=self.attention_dropout.p if self.training else 0.0,
        )
        output = self.dense(attended[..., : self.head_dim].flatten(2))
        return dropout_add(output, residual, self.hidden_dropout, self.training), None


def with_bias(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values (rows, heads, tokens, width) with columns that add a bias (rows, heads, keys) to scores.

    A kernel multiplies products by `scale`, so keys hold bias / scale: rounded, and in a second column what rounding
    took away. Results are laid out token by token, as kernels of variable length read them.
    """
    exact = bias.to(torch.promote_types(bias.dtype, torch.float32)).transpose(1, 2) / scale
    high = exact.to(key.dtype)
    columns = torch.stack([high, (exact - high).to(key.dtype)], -1)
    ones = columns.new_ones(()).expand(*query.transpose(1, 2).shape[:3], columns.shape[-1])
    wide = (
        torch.cat([query.transpose(1, 2), _filled(ones)], -1),
        torch.cat([key.transpose(1, 2), _filled(columns)], -1),
        _filled(value.transpose(1, 2), value.shape[-1] + BIAS_COLUMNS),
    )
    return wide[0].transpose(1, 2), wide[1].transpose(1, 2), wide[2].transpose(1, 2)


def _filled(columns: torch.Tensor, width: int = BIAS_COLUMNS) -> torch.Tensor:
    return pad(columns, (0, width - columns.shape[-1]))


class RegistryAttention:
    """Computes what a method `_attn` of transformers gets by the function that the config names in its registry."""

    config: Any

    def _attn(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None) -> Any:
        """(rows, heads, tokens, width) → the same; transformers dictates the signature."""
        mask: Any = attention_mask
        module: Any = self
        local = getattr(module, "attention_type", "global") == "local"
        if isinstance(mask, torch.Tensor) or (mask is None and local):  # generation; `_attn` adds masks
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, torch.finfo(query.dtype).min)
            return super()._attn(query, key, value, mask)  # type: ignore[misc]
        if local:
            mask = replace(mask, window=self.config.window_size)
        dropout = getattr(module, "attn_dropout", None) or module.attention_dropout
        attended, _ = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation](
            module,
            *(each.to(value.dtype) for each in (query, key, value)),
            mask,
            scaling=1.0 if isinstance(module, GPTNeoSelfAttention) else query.shape[-1] ** -0.5,
            dropout=dropout.p if module.training else 0.0,
        )
        return attended.transpose(1, 2), None


class RegistryFalconAttention(FalconAttention):  # type: ignore[misc]
    """Falcon's attention with rotary embeddings, computed by the function that its config names in the registry."""

    config: Any

    def forward(self, hidden_states: torch.Tensor, alibi: Any, attention_mask: Any, **given: Any) -> Any:
        """Output, without scores; transformers dictates the signature."""
        if alibi is not None:
            return super().forward(hidden_states, alibi, attention_mask, **given)
        rows, tokens, _ = hidden_states.shape
        split = self._split_heads(self.query_key_value(hidden_states))
        query, key, value = (each.transpose(1, 2) for each in split)
        query, key = apply_rotary_pos_emb(query, key, *given["position_embeddings"])
        if given.get("layer_past") is not None:
            key, value = given["layer_past"].update(key, value, self.layer_idx)
        if isinstance(attention_mask, torch.Tensor) or attention_mask is None:  # generation; SDPA wants as many heads
            key, value = (each.expand(-1, query.shape[1], -1, -1) for each in (key, value))
        attended, _ = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation](
            self, query, key, value, attention_mask, scaling=self.inv_norm_factor
        )
        return self.dense(attended.reshape(rows, tokens, -1)), None


@functools.cache
def _registered(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A class of attention modules with its computation replaced."""
    return type(f"Registry{kind.__name__}", (RegistryAttention, kind), {})


KINDS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    BloomAttention: RegistryBloomAttention,
    FalconAttention: RegistryFalconAttention,
    **{kind: _registered(kind) for kind in (CodeGenAttention, GPTJAttention, GPTNeoSelfAttention)},
    GPTNeoXJapaneseAttention: _registered(GPTNeoXJapaneseAttention),
}
"""Class of transformers → the one that takes its place."""
TYPES = ("bloom", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj")


def set_function(model: PreTrainedModel, name: str) -> bool:
    """Make a model use a function of transformers' registry; False if its attention is code of its own."""
    if model.config.model_type not in TYPES:
        model.set_attn_implementation(name)
        return bool(model.config._attn_implementation == name)
    for module in model.modules():
        if type(module) in KINDS:
            module.__class__ = KINDS[type(module)]
            module.config = model.config
    for module in model.modules():  # a model and the one inside it may have configs of their own
        if isinstance(module, PreTrainedModel) or type(module) in KINDS.values():
            # set_attn_implementation refuses types with code of their own
            module.config._attn_implementation_internal = name
    return True
