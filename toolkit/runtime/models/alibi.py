"""BLOOM's attention by the kernels of this package, which hold no score per pair of tokens.

ALiBi adds to each score a bias that depends on the head and the key only. So it fits into the product of queries and
keys: keys get further columns with the bias, and queries ones. Every kernel then computes it without knowing of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bloom.modeling_bloom import BloomAttention, dropout_add

COLUMNS = 8
"""Further columns of queries, keys and values: flash kernels take heads whose width is a multiple of 8."""


class RegistryBloomAttention(BloomAttention):  # type: ignore[misc]
    """BLOOM's attention, computed by the function that its config names in transformers' registry."""

    config: Any

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
        _filled(value.transpose(1, 2), value.shape[-1] + COLUMNS),
    )
    return wide[0].transpose(1, 2), wide[1].transpose(1, 2), wide[2].transpose(1, 2)


def _filled(columns: torch.Tensor, width: int = COLUMNS) -> torch.Tensor:
    return pad(columns, (0, width - columns.shape[-1]))


def install(model: PreTrainedModel, name: str) -> None:
    """Make a BLOOM use an attention of transformers' registry."""
    model.config._attn_implementation_internal = name  # set_attn_implementation refuses types with code of their own
    for module in model.modules():
        if type(module) is BloomAttention:
            module.__class__ = RegistryBloomAttention
            module.config = model.config
