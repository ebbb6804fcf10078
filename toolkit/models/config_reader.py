"""Read a Hugging Face config into the numbers that parameter counts need; all problems are reported at once."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from toolkit.errors import BadInput, Problem
from toolkit.models.architectures import ARCHITECTURES
from toolkit.models.architectures.table_row import Architecture
from toolkit.models.architectures.terms import Experts, Shape

SOURCE = "model config"
LARGEST = 2**48
"""Upper bound of any size: no real config is near it, so a larger number is a typing error."""
MOST_LAYERS = 10_000
"""Upper bound of the number of layers, because they are counted one by one."""
CORE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
"""Keys that every config must define."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config itself, or its text part if transformers builds only that as a causal language model."""
    if not isinstance(config, Mapping):
        raise BadInput(SOURCE, f"{_short(config)} is not a table of keys and values")
    inner, outer = config.get("text_config"), config.get("model_type")
    if not isinstance(inner, Mapping) or (outer is not None and str(outer) not in text_types()):
        return config
    return {"model_type": text_types().get(str(outer))} | dict(inner)


def needs_counting(model_type: Any) -> bool:
    """Whether transformers knows the type and the table does not: its parameters are counted on the meta device."""
    return isinstance(model_type, str) and model_type not in ARCHITECTURES and model_type in known_types()


def known_type(model_type: Any) -> str:
    """The model type; raises `BadInput` unless its parameters can be counted exactly."""
    if not isinstance(model_type, str):
        raise BadInput(f"{SOURCE}: model_type", f"{_short(model_type)} is not a name; give one such as llama or qwen3")
    if model_type in ARCHITECTURES:
        return model_type
    near = difflib.get_close_matches(model_type, ARCHITECTURES, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(sorted(ARCHITECTURES))}"
    raise BadInput(f"{SOURCE}: model_type", f"{_short(model_type)} is not a known model type; {hint}")


def resolve(model_type: str, row: Architecture, config: Mapping[str, Any]) -> Shape:
    """The numbers of the config with defaults filled in; raises `BadInput` that lists every problem."""
    assumed = defaults(model_type)
    aliases = {**assumed.aliases, **row.legacy}
    relevant = {*assumed.values, *aliases, *row.reads, *row.refuses, *(("head_dim",) if row.own_head_dim else ())}
    flat = {key: value for key, value in _flat(config).items() if key in relevant}
    given = {aliases.get(key, key): value for key, value in flat.items()}
    written = {aliases.get(key, key): key for key in flat}
    values = {**assumed.values, **given}
    core = {key: row.names.get(key, aliases.get(key, key)) for key in (*CORE, *_OPTIONAL)}
    layers = values.get(core["num_hidden_layers"])
    found = _value_problems(given, written, layers if isinstance(layers, int) else 0)
    found += _conflicts(flat, aliases) + _missing(row, values, core)
    found += _unknown_layer_types(row, values)
    found += [
        Problem(written.get(key, key), f"adds {what}, which the planner can't count for {model_type} yet")
        for key, what in row.refuses.items()
        if values.get(key)
    ]
    if not found:
        shape = _shape(row, values, core, assumed)
        found = _misfits(row, shape, core, written)
    if found:
        raise BadInput(f"{SOURCE} ({model_type})", found)
    return shape


_OPTIONAL = ("num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings")


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that parameter counts depend on; nested ones as `table.key`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if key in KEYS:
            flat[key] = value
        elif isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": entry for inner, entry in value.items() if inner in KEYS}
    return flat


def _conflicts(flat: Mapping[str, Any], aliases: Mapping[str, str]) -> list[Problem]:
    """Numbers that the config gives under two names with different values."""
    return [
        Problem(key, f"{_short(value)}, but {native}, which is the same number, is {_short(flat[native])}; give one")
        for key, value in flat.items()
        if (native := aliases.get(key, key)) != key and native in flat and flat[native] != value
    ]


def _value_problems(given: Mapping[str, Any], written: Mapping[str, str], layers: int) -> list[Problem]:
    checked = ((written[key], _problem(key.rpartition(".")[2], value, layers)) for key, value in given.items())
    found = [Problem(key, what) for key, what in checked if what]
    if layers > MOST_LAYERS:
        found.append(Problem("num_hidden_layers", f"{_short(layers)} is more than {MOST_LAYERS}"))
    return found


def _problem(name: str, value: Any, layers: int) -> str:
    """The problem with one value, in words; empty if there is none."""
    if name == "per_layer_config" and value is not None:
        return _overrides_problem(value)
    if value is None or name in OTHERS:
        return ""
    if name in FLAGS:
        return "" if isinstance(value, bool) else f"{_short(value)} is not true or false"
    if name in PER_LAYER | CHOSEN:
        return _list_problem(name, value, layers)
    if name in FACTORS:
        return "" if type(value) in (int, float) and 0 < value < LARGEST else f"{_short(value)} is not a number above 0"
    if not isinstance(value, int) or isinstance(value, bool):
        return f"{_short(value)} is not a whole number"
    least = 1 if name in SIZES else -1 if name in OFFSETS else 0
    return "" if least <= value <= LARGEST else f"{_short(value)} is not a whole number from {least} to 2**48"


def _list_problem(name: str, value: Any, layers: int) -> str:
    named, least = name.endswith("types"), int(name in PER_LAYER)
    if not isinstance(value, list | tuple) or not all(
        isinstance(entry, str) if named else type(entry) is int and entry >= least for entry in value
    ):
        return f"{_short(value)} is not a list of {'names' if named else f'whole numbers from {least}'}"
    if name in PER_LAYER and len(value) != layers:
        return f"has {len(value)} entries for {layers} layers; give one per layer"
    return ""


def _overrides_problem(value: Any) -> str:
    """The problem with overrides of single layers, by layer number, which saved configs of some types contain."""
    tables: list[Any] = list(value.values()) if isinstance(value, Mapping) else [None]
    if not all(isinstance(table, Mapping) for table in tables):
        return f"{_short(value)} is not a table of tables, one for each layer that differs"
    for key, entry in (item for table in tables for item in table.items()):
        if key not in ("head_dim", "num_key_value_heads") or entry is None or _problem(key, entry, 0):
            return f"{_short(key)}: {_short(entry)} in it can't be counted"
    return ""


def _missing(row: Architecture, values: Mapping[str, Any], core: Mapping[str, str]) -> list[Problem]:
    needed = [core[key] for key in CORE] + list(row.needs)
    if row.ffn is None and core["intermediate_size"] in values:
        needed.append(core["intermediate_size"])
    return [Problem(key, "is required, but null") for key in needed if values.get(key) is None]


def _unknown_layer_types(row: Architecture, values: Mapping[str, Any]) -> list[Problem]:
    """Entries of `layer_types` that the row does not know."""
    given = values.get("layer_types")
    if not row.layer_types or not isinstance(given, list | tuple):
        return []
    unknown = [entry for entry in given if entry not in row.layer_types]
    known = ", ".join(row.layer_types)
    return [Problem("layer_types", f"{_short(unknown[0])} is not one of {known}")] if unknown else []


def _shape(row: Architecture, values: Mapping[str, Any], core: Mapping[str, str], assumed: Defaults) -> Shape:
    """The shape of the model; keys that transformers has no default for are ignored."""
    number = {key: int(values.get(name) or 0) if name in assumed.values else 0 for key, name in core.items()}
    heads, hidden = number["num_attention_heads"], number["hidden_size"]
    shape = Shape(
        values=values,
        aliases=assumed.aliases,
        layers=number["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=number["num_key_value_heads"] or heads,
        head_dim=row.own_head_dim * int(values.get(core["head_dim"]) or 0) or hidden // heads,
        ffn=number["intermediate_size"],
        vocab=number["vocab_size"],
        positions=number["max_position_embeddings"],
    )
    if row.heads:
        shape = replace(shape, heads=row.heads(shape))
    return replace(
        shape,
        vocab=row.vocab(shape) if row.vocab else shape.vocab,
        kv_heads=row.kv_heads(shape) if row.kv_heads else shape.kv_heads,
        head_dim=row.head_dim(shape) if row.head_dim else shape.head_dim,
        ffn=shape.ffn or (row.ffn(shape) if row.ffn else 0),
    )


def _misfits(row: Architecture, shape: Shape, core: Mapping[str, str], written: Mapping[str, str]) -> list[Problem]:
    """Numbers that are valid each, but do not fit together."""
    found = []
    derived = row.head_dim is None and not (row.own_head_dim and shape.get(core["head_dim"]))
    if derived and shape.hidden % shape.heads:
        key, width = core["num_attention_heads"], core["hidden_size"]
        what = f"{shape.heads} does not divide {written.get(width, width)} {shape.hidden}"
        found.append(Problem(written.get(key, key), what))
    if shape.heads % shape.kv_heads:
        key = core["num_key_value_heads"]
        note = "" if key in written else " (transformers' default, as the config gives none)"
        what = f"{shape.kv_heads}{note} does not divide the {shape.heads} attention heads"
        found.append(Problem(written.get(key, key), what))
    return found + _expert_problems(row.experts, shape, written)


def _expert_problems(experts: Experts | None, shape: Shape, written: Mapping[str, str]) -> list[Problem]:
    if experts is None or not any(experts.sparse(shape, layer) for layer in range(shape.layers)):
        return []
    needed = (experts.number, experts.visited, experts.width)
    found = [Problem(written.get(key, key), "is needed: give a number above 0") for key in needed if not shape.num(key)]
    if not found and shape.num(experts.visited) > shape.num(experts.number):
        what = f"{shape.num(experts.visited)} is more than the {shape.num(experts.number)} experts"
        found.append(Problem(written.get(experts.visited, experts.visited), what))
    return found


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python refuses to print huge numbers and recursive lists.
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= 40 else f"{text[:40]}…"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SIZES = _words(
    """hidden_size n_embd d_model dim embedding_dim vocab_size num_hidden_layers n_layer n_layers num_layers
    num_attention_heads n_head n_heads num_heads attention_heads num_key_value_heads num_kv_heads kv_n_heads
    head_dim kv_channels dim_head dim_ff intermediate_size n_inner ffn_dim ffn_hidden_size dff decoder_layers
    decoder_ffn_dim decoder_attention_heads intermediate_size_mlp dense_intermediate_size
    prefix_dense_intermediate_size moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size
    decoder_sparse_step moe_layer_interval moe_layer_freq interleave_moe_layer_step kv_lora_rank q_lora_rank
    qk_rope_head_dim qk_nope_head_dim qk_head_dim v_head_dim index_n_heads index_head_dim
    word_embed_proj_dim embedding_size expansion_ratio intermediate_multiple_size
    linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim
    type_vocab_size cross_attention_hidden_size decoder_vocab_size task_type_vocab_size
    position_bias_num_buckets input_embedding_size output_embedding_size full_attention_interval n_embed
    global_head_dim num_global_key_value_heads vocab_size_per_layer_input conv_L_cache block_multiple_of
    block_ff_dim index_topk_freq"""
)
"""Keys with a whole number above zero."""
COUNTS = _words(
    """max_position_embeddings n_positions n_ctx max_seq_len num_experts num_local_experts n_routed_experts
    moe_num_experts num_experts_per_tok moe_k moe_topk moe_top_k num_shared_experts n_shared_experts
    moe_num_shared_experts shared_intermediate_size first_k_dense_replace num_dense_layers moe_layer_start_index
    zero_expert_num num_ln_in_parallel_attn position_bias_max_distance prompt_types prompt_length segment_types
    max_target_positions
    hidden_size_per_layer_input num_kv_shared_layers top_k_experts index_skip_topk_offset"""
)
"""Keys with a whole number of at least zero."""
FLAGS = _words(
    """tie_word_embeddings attention_bias attention_out_bias qkv_bias use_qkv_bias mlp_bias bias use_bias
    enable_bias lm_head_bias use_qk_norm qk_layernorm use_post_norm use_parallel_residual parallel_attn multi_query
    new_decoder_architecture do_layer_norm_before _remove_final_layer_norm layer_norm_elementwise_affine
    add_cross_attention is_moe norm_bias decoder_bias classifier_bias use_task_id use_learned_position_embeddings
    layernorm_embedding attention_k_eq_v enable_moe_block use_double_wide_mlp conv_bias block_auto_adjust_ff_dim
    use_expert_bias tie_embedding"""
)
"""Keys that are true or false."""
PER_LAYER = _words("layer_types mlp_layer_types indexer_types num_attention_heads_per_layer")
"""Keys with a list of one entry per layer: names, or numbers above zero."""
CHOSEN = _words("mlp_only_layers moe_layers full_attn_idxs")
"""Keys with a list of layer numbers."""
OTHERS = _words("""hidden_act gating index_topk_pattern sparse_attention_config per_layer_config""")
"""Keys with other values; the rows that read them check them."""
FACTORS = _words("block_ffn_dim_multiplier")
"""Keys with a number above zero, not necessarily whole."""
OFFSETS = _words("moe_layer_end_index")
"""Keys with a whole number, where -1 means the last layer."""
KEYS = SIZES | COUNTS | FLAGS | PER_LAYER | CHOSEN | OFFSETS | FACTORS | OTHERS
"""Every key that a parameter count can depend on; the generated defaults contain exactly these."""


@dataclass(frozen=True)
class Defaults:
    """Defaults of transformers for one model type."""

    values: Mapping[str, Any]
    """Defaults by native key."""
    aliases: Mapping[str, str]
    """Common key to native key, e.g. `hidden_size` to `n_embd`."""


@cache
def _table() -> Mapping[str, Any]:
    table: Mapping[str, Any] = json.loads(Path(__file__).with_name("defaults.json").read_text(encoding="utf-8"))
    return table


def known_types() -> tuple[str, ...]:
    """Every model type that transformers can build as a causal language model."""
    return tuple(_table()["types"])


def text_types() -> Mapping[str, str]:
    """Composite model types, each with the type of its text part."""
    types: Mapping[str, str] = _table()["text_types"]
    return types


def defaults(model_type: str) -> Defaults:
    """Defaults of transformers for keys that a config of this type leaves out."""
    row = _table()["types"][model_type]
    return Defaults(row.get("values", {}), row.get("aliases", {}))
