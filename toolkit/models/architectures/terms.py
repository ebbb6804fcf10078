"""Parameter counts of the parts that decoders are made of: attention, MLP, norms, experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Flag = bool | str
"""True, False, or the config key that decides (`!key`: its opposite)."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The resolved numbers of one config, as the terms read them."""

    values: Mapping[str, Any]
    """Every relevant key, by native name, with defaults filled in."""
    aliases: Mapping[str, str]
    """Common key → native key."""
    layers: int
    """Number of decoder layers."""
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads."""
    head_dim: int
    """Width of one head."""
    ffn: int
    """Inner width of a dense MLP."""
    vocab: int
    """Rows of the embedding table."""
    positions: int
    """Longest sequence; 0: no limit."""

    def get(self, key: str) -> Any:
        """A value of the config, by common or native key."""
        return self.values.get(self.aliases.get(key, key))

    def num(self, key: str) -> int:
        """A number of the config; 0 if it is absent or null."""
        return int(self.get(key) or 0)

    def on(self, flag: Flag) -> bool:
        """Whether a flag is set."""
        if isinstance(flag, bool):
            return flag
        wanted = not flag.startswith("!")
        return bool(self.get(flag.lstrip("!"))) is wanted

    def kind(self, key: str, layer: int, default: str) -> str:
        """The entry of a per-layer list such as `layer_types`, or the default if there is no list."""
        entries = self.get(key)
        return str(entries[layer]) if entries else default


Term = Callable[[Shape, int], int]
"""Parameters of one part of layer number `int`."""
Total = Callable[[Shape], int]
"""Parameters of a part that exists once, or a width."""
Rule = Callable[[Shape, int], bool]
"""Whether layer number `int` is a mixture of experts."""


def nothing(_shape: Shape, _layer: int = 0) -> int:
    """No parameters."""
    return 0


def attention(
    bias: Flag = False, out_bias: Flag | None = None, qk_norm: str = "", norm: Flag = True, square_out: bool = False
) -> Term:
    """Query, key, value and output projections, with norms of queries and keys as in `_qk_norm`."""
    out = bias if out_bias is None else out_bias

    def term(shape: Shape, layer: int) -> int:
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        output = shape.hidden * (shape.hidden if square_out else queries)
        weights = shape.hidden * (queries + 2 * keys) + output
        biases = shape.on(bias) * (queries + 2 * keys) + shape.on(out) * shape.hidden
        return weights + biases + shape.on(norm) * _qk_norm(qk_norm, shape)

    return term


def _qk_norm(kind: str, shape: Shape) -> int:
    """Norms of queries and keys: over one head (`+bias`: with a bias), over all heads, over the hidden size."""
    if kind == "hidden":
        return shape.hidden + shape.hidden // shape.heads * shape.kv_heads
    heads = {"": 0, "head": 2, "head+bias": 4, "all": shape.heads + shape.kv_heads}
    return heads[kind] * shape.head_dim


def latent_attention(bias: Flag = "attention_bias", rope_key: str = "qk_rope_head_dim") -> Term:
    """Multi-head latent attention: low-rank queries (if `q_lora_rank`) and low-rank keys and values."""

    def term(shape: Shape, layer: int) -> int:
        hidden, heads, rank = shape.hidden, shape.heads, shape.num("q_lora_rank")
        rope, nope, value = shape.num(rope_key), shape.num("qk_nope_head_dim"), shape.num("v_head_dim")
        value = value or hidden // heads
        latent = shape.num("kv_lora_rank")
        queries = heads * (shape.num("qk_head_dim") or nope + rope)
        query = rank * (hidden + 1 + queries) if rank else hidden * queries
        keys_values = hidden * (latent + rope) + latent + latent * heads * (nope + value)
        biases = shape.on(bias) * (rank + latent + rope + hidden)
        return query + keys_values + heads * value * hidden + biases

    return term


def indexer(shape: Shape, layer: int) -> int:
    """The indexer of DeepSeek sparse attention, which selects the keys for a query."""
    heads, width = shape.num("index_n_heads"), shape.num("index_head_dim")
    return shape.num("q_lora_rank") * heads * width + shape.hidden * (width + heads) + 2 * width


def delta_attention(shape: Shape, layer: int) -> int:
    """Gated delta rule (linear attention with a short convolution), as in Qwen3-Next."""
    key_heads, heads = (shape.num(f"linear_num_{kind}_heads") or shape.heads for kind in ("key", "value"))
    # OLMo derives missing widths in this way; configs of Qwen always contain them.
    key_width = shape.num("linear_key_head_dim") or int(0.75 * shape.hidden / key_heads)
    width = shape.num("linear_value_head_dim") or 2 * key_width
    keys, values = key_heads * key_width, heads * width
    mixed = 2 * keys + values
    convolution = mixed * shape.num("linear_conv_kernel_dim")
    return shape.hidden * (mixed + 2 * values + 2 * heads) + convolution + 2 * heads + width


def lightning_attention(shape: Shape, layer: int) -> int:
    """Linear attention with an output gate and a norm, as in MiniMax."""
    width = shape.heads * shape.head_dim
    return 5 * shape.hidden * width + width


def by_layer_type(default: Callable[[Shape, int], str], terms: Mapping[str, Term]) -> Term:
    """One term per entry of `layer_types`; `default` gives the entry if the config has no list."""

    def term(shape: Shape, layer: int) -> int:
        return terms[shape.kind("layer_types", layer, default(shape, layer))](shape, layer)

    return term


def mlp(matrices: int, bias: Flag = False, width: Total = lambda shape: shape.ffn) -> Term:
    """A gated (3 matrices) or plain (2) MLP."""

    def term(shape: Shape, layer: int) -> int:
        return mlp_params(shape, width(shape), matrices, shape.on(bias))

    return term


def mlp_params(shape: Shape, width: int, matrices: int, bias: bool) -> int:
    """Parameters of one MLP of the given inner width."""
    return matrices * shape.hidden * width + bias * ((matrices - 1) * width + shape.hidden if width else 0)


def norms(number: int | Total, vectors: int = 1) -> Term:
    """Layer norms over the residual stream: `vectors` is 1 for a scale, 2 for scale and bias, 0 for neither."""

    def term(shape: Shape, layer: int) -> int:
        return (number if isinstance(number, int) else number(shape)) * vectors * shape.hidden

    return term


def cross_attention(width_key: str = "", bias: Flag = True, biases: int = 4) -> Term:
    """Attention to an encoder, with its norm; `biases` is how many of its four projections have a bias."""

    def term(shape: Shape, layer: int) -> int:
        width = shape.num(width_key) or shape.hidden
        weights = 2 * shape.hidden * (shape.hidden + width)
        return weights + (shape.on(bias) * biases + 2) * shape.hidden

    return term


def total(*terms: Term) -> Term:
    """The sum of several parts."""
    return lambda shape, layer: sum(term(shape, layer) for term in terms)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts: in which layers, under which config keys, and what it has besides the expert matrices."""

    number: str = "num_experts"
    """Key with the number of routed experts."""
    visited: str = "num_experts_per_tok"
    """Key with the number of experts that a token visits."""
    width: str = "moe_intermediate_size"
    """Key with the inner width of one expert."""
    sparse: Rule = lambda shape, layer: True
    """Whether a layer is a mixture."""
    shared: Total = nothing
    """Inner width of the experts that every token visits."""
    shared_bias: Flag = False
    """Whether the shared experts have biases."""
    matrices: int = 3
    """Matrices of one expert."""
    bias: bool = False
    """Whether the routed experts have biases."""
    router: int = 0
    """Parameters of the router per expert, besides its row of weights."""
    beside: Total = nothing
    """Anything else in a mixture layer."""

    def expert(self, shape: Shape) -> int:
        """Parameters of one routed expert."""
        return mlp_params(shape, shape.num(self.width), self.matrices, self.bias)

    def always(self, shape: Shape) -> int:
        """Parameters that every token visits: router, shared experts and the rest."""
        router = shape.num(self.number) * (shape.hidden + self.router)
        shared = mlp_params(shape, self.shared(shape), self.matrices, shape.on(self.shared_bias))
        return router + shared + self.beside(shape)


def after(key: str) -> Rule:
    """The first layers are dense; the key gives their number."""
    return lambda shape, layer: layer >= shape.num(key)


def listed(dense: int | str) -> Rule:
    """By `mlp_layer_types`; without it, the first `dense` layers (a number or a key) are dense."""

    def rule(shape: Shape, layer: int) -> bool:
        first = dense if isinstance(dense, int) else shape.num(dense)
        return shape.kind("mlp_layer_types", layer, "dense" if layer < first else "sparse") == "sparse"

    return rule


def stepped(key: str, dense: tuple[int, ...] = ()) -> Rule:
    """Every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`, if the key gives any experts."""

    def rule(shape: Shape, layer: int) -> bool:
        given = shape.get("mlp_only_layers")
        only = dense if given is None else given
        return layer not in only and shape.num(key) > 0 and (layer + 1) % (shape.num("decoder_sparse_step") or 1) == 0

    return rule
