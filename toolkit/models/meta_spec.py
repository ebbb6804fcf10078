"""The spec of a model type that the table of architectures lacks: counted on the meta device, once per config.

Counting needs torch and transformers, which take seconds to import. It therefore runs in a process of its own, and its
result is cached under the user's cache directory.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from toolkit.errors import BadInput
from toolkit.resources import user_cache

COUNTER = "toolkit.runtime.proofs.meta_count"
MOST_SECONDS = 180
"""Longest time that counting may take; importing torch and transformers takes most of it."""

MOST = 2**63
"""No count of parameters and no size is as large as this: a file that says so is damaged."""


def counted(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the counter found for a config, from the cache if it is there."""
    kind = str(config.get("model_type"))
    path = user_cache() / "shapes" / f"{kind}-{_digest(config)}.json"
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        found = None
    if _is_count(found):
        return dict(found)
    print(f"counting the parameters of {kind} on the meta device; this is done once", file=sys.stderr)
    found = _run(kind, config)
    _store(path, found)
    return found


def fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ModelSpec` for such a model; sizes that its config does not name are those of a plain decoder."""
    found = counted(config)
    text, layers = found["text"], found["layers"]
    hidden = _first(text, ("hidden_size", "d_model", "n_embd", "dim"), 1)
    heads = _first(text, ("num_attention_heads", "n_head", "num_heads", "attention_heads"), max(1, hidden // 128))
    vocab = _first(text, ("vocab_size",), 1)
    experts = _first(text, ("num_experts", "num_local_experts", "n_routed_experts"), 0)
    visited = min(experts, _first(text, ("num_experts_per_tok", "moe_topk", "top_k_experts"), 1)) if experts else 0
    sparse = [count > 0 and experts > 0 for count in found["experts"]]
    unused = [
        count * (1 - visited / experts) if use else 0 for count, use in zip(found["experts"], sparse, strict=True)
    ]
    width = _first(text, ("moe_intermediate_size", "intermediate_size"), 4 * hidden)
    mixture = {"experts": experts, "experts_per_token": visited, "expert_ffn": width, "moe_layers": sum(sparse)}
    return {
        "model_type": str(config.get("model_type")),
        "layers": len(layers),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": _first(text, ("num_key_value_heads",), heads),
        "head_dim": _first(text, ("head_dim",), max(1, hidden // heads)),
        "ffn": _first(text, ("intermediate_size", "ffn_dim", "d_ff"), 4 * hidden),
        "gated_mlp": str(text.get("hidden_act", "silu")) in ("silu", "swish", "gelu_pytorch_tanh"),
        "vocab": vocab,
        "max_positions": _first(text, ("max_position_embeddings", "n_positions"), 0),
        "tied_embeddings": bool(found["tied"]),
        "embedding_params": found["outside"] - found["head"],
        "layer_params": tuple(layers),
        "layer_active_params": tuple(round(all_ - out) for all_, out in zip(layers, unused, strict=True)),
        "head_params": found["head"],
        **(mixture if any(sparse) else {}),
    }


def _first(text: Mapping[str, Any], keys: tuple[str, ...], usual: int) -> int:
    """The first of the keys that holds a number above zero."""
    for key in keys:
        value = text.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return usual


def _run(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", COUNTER]  # -P: nothing from the current directory
    try:
        done = subprocess.run(
            command, input=json.dumps(config), capture_output=True, text=True, timeout=MOST_SECONDS, check=False
        )
        found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    except (OSError, ValueError, IndexError, TypeError, subprocess.TimeoutExpired) as error:
        raise BadInput(f"model config ({kind})", f"its parameters could not be counted: {error}") from error
    if found is None or not _is_count(found):
        last = (done.stderr.strip().splitlines() or ["no layers were found"])[-1][:200]
        raise BadInput(f"model config ({kind})", f"transformers could not build it from this config: {last}")
    return dict(found)


def _is_count(found: Any) -> bool:
    """Whether a value is what the counter prints; a damaged file of the cache is not, and is made anew."""
    if not isinstance(found, dict) or not isinstance(found.get("text"), dict) or type(found.get("tied")) is not bool:
        return False
    layers, experts = found.get("layers"), found.get("experts")
    if not isinstance(layers, list) or not isinstance(experts, list) or not layers or len(layers) != len(experts):
        return False
    counts = [*layers, *experts, found.get("outside"), found.get("head")]
    sizes = [value for value in found["text"].values() if isinstance(value, int)]
    plausible = all(type(count) is int and 0 <= count < MOST for count in counts) and all(abs(n) < MOST for n in sizes)
    return plausible and found["head"] <= found["outside"] and all(map(operator.le, experts, layers))


def _store(path: Path, found: Mapping[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")  # two plans may count the same model at once
        part.write_text(json.dumps(found), encoding="utf-8")
        part.replace(path)
    except OSError:
        return  # a read-only home directory: the next plan counts again


def _digest(config: Mapping[str, Any]) -> str:
    try:
        library = version("transformers")
    except PackageNotFoundError:
        library = ""
    text = json.dumps([config, library], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
