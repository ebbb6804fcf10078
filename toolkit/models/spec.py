"""What the planner needs to know of a model, read from a Hugging Face config without importing transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from toolkit.models.architectures import ARCHITECTURES
from toolkit.models.architectures.table_row import Architecture
from toolkit.models.architectures.terms import Experts, Shape
from toolkit.models.config_files import load_model_config
from toolkit.models.config_reader import known_type, resolve, text_config

__all__ = ["ModelSpec", "load_model_config", "read_model_config"]


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
    """The spec of a Hugging Face `config.json`, given as a mapping; a composite model's text part is read."""
    text = text_config(config)
    model_type = known_type(text.get("model_type"))
    row = ARCHITECTURES[model_type]
    return _count(model_type, row, resolve(model_type, row, text))


def _count(model_type: str, row: Architecture, shape: Shape) -> ModelSpec:
    tied = row.ties and shape.on("tie_word_embeddings")
    layers = [_layer(row, shape, index) for index in range(shape.layers)]
    width = row.token_width(shape)
    head = 0 if tied else (width + row.untied_bias) * shape.vocab
    return ModelSpec(
        model_type=model_type,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ffn=shape.ffn,
        gated_mlp=row.gated,
        vocab=shape.vocab,
        max_positions=shape.positions,
        tied_embeddings=tied,
        embedding_params=shape.vocab * width + row.embed(shape),
        layer_params=tuple(layer.params for layer in layers),
        layer_active_params=tuple(layer.active for layer in layers),
        head_params=row.final(shape) + head,
        **_expert_fields(row.experts, shape, sum(layer.sparse for layer in layers)),
    )


class _Layer(NamedTuple):
    params: int
    active: int
    sparse: bool


def _layer(row: Architecture, shape: Shape, index: int) -> _Layer:
    base, experts = row.layer(shape, index), row.experts
    if experts is None or not experts.sparse(shape, index):
        params = base + row.mlp(shape, index)
        return _Layer(params, params, False)
    always, expert = base + experts.always(shape), experts.expert(shape)
    number = shape.num(experts.number)
    visited = min(shape.num(experts.visited), number)
    return _Layer(always + number * expert, always + visited * expert, True)


def _expert_fields(experts: Experts | None, shape: Shape, sparse_layers: int) -> dict[str, int]:
    if experts is None or not sparse_layers:
        return {}
    return {
        "experts": shape.num(experts.number),
        "experts_per_token": shape.num(experts.visited),
        "expert_ffn": shape.num(experts.width),
        "shared_ffn": experts.shared(shape),
        "moe_layers": sparse_layers,
    }
