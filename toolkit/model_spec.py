"""What the planner needs to know of a model, read from a Hugging Face config without importing transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shape and exact parameter count of a decoder."""

    model_type: str
    """Hugging Face model type, e.g. `llama`."""
    layers: int
    """Number of decoder layers."""
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Attention (query) heads."""
    kv_heads: int
    """Key/value heads: fewer than `heads` with grouped-query attention, 1 with multi-query attention."""
    head_dim: int
    """Width of one attention head."""
    ffn: int
    """Inner width of a dense MLP."""
    gated_mlp: bool
    """Whether the MLP has a gate (three matrices) or not (two)."""
    vocab: int
    """Rows of the embedding table."""
    max_positions: int
    """Longest sequence that the model takes; 0: not limited."""
    tied_embeddings: bool
    """Whether the output head is the input embedding."""
    experts: int = 0
    """Routed experts of a mixture-of-experts layer; 0: dense."""
    experts_per_token: int = 0
    """Routed experts that each token visits."""
    expert_ffn: int = 0
    """Inner width of one routed expert."""
    shared_ffn: int = 0
    """Inner width of the experts that every token visits."""
    moe_layers: int = 0
    """How many of the layers are mixture-of-experts layers."""
    embedding_params: int
    """Parameters before the first layer: token and position tables, their norms and projections."""
    layer_params: tuple[int, ...]
    """Parameters of each layer."""
    layer_active_params: tuple[int, ...]
    """Parameters of each layer that one token visits; equals `layer_params` without experts."""
    head_params: int
    """Parameters after the last layer: final norm and output head (0 for the head where it is tied)."""

    @property
    def params(self) -> int:
        """All parameters, tied ones counted once."""
        return self.embedding_params + sum(self.layer_params) + self.head_params

    @property
    def active_params(self) -> int:
        """Parameters that one token visits."""
        return self.embedding_params + sum(self.layer_active_params) + self.head_params


def read_model_config(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a Hugging Face `config.json`, given as a mapping."""
    raise NotImplementedError
