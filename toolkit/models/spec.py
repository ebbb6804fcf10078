"""The planner's view of a model, read from a Hugging Face config without importing transformers."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.errors import BadInput
from toolkit.models import meta_spec
from toolkit.models.architectures import ARCHITECTURES
from toolkit.models.architectures.table_row import Architecture
from toolkit.models.architectures.terms import Experts, Shape
from toolkit.models.config_reader import known_type, needs_counting, resolve, text_config

__all__ = ["ModelSpec", "load_model_config", "read_model_config"]


OWN_ATTENTION = frozenset(
    {
        "cpmant", "megatron-bert", "mpt", "openai-gpt", "rembert", "roformer", "xglm", "xlm",
    }
)  # fmt: skip
"""Types that compute the scores of all pairs of tokens in code of their own, whatever kernel is asked for."""
BIASED = frozenset({"t5", "mt5", "umt5"})
"""Types that add a learned bias to the scores of all pairs of tokens; their norms are RMS norms."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shape and exact parameter count of a decoder."""

    model_type: str
    """Hugging Face model type, e.g. `llama`."""
    layers: int
    """Number of decoder layers; of an encoder-decoder, of all layers."""
    encoder_layers: int = 0
    """The first of the layers that are an encoder's; 0: there is no encoder."""
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
    """Longest sequence that the model accepts; 0: no limit."""
    tied_embeddings: bool
    """Whether the output head shares the weights of the input embedding."""
    experts: int = 0
    """Routed experts of a mixture-of-experts layer; 0: dense."""
    experts_per_token: int = 0
    """Routed experts that each token visits."""
    expert_ffn: int = 0
    """Inner width of one routed expert."""
    shared_ffn: int = 0
    """Inner width of the experts that every token visits."""
    window: int = 0
    """Tokens that a layer with a sliding window attends to; 0: no such layers."""
    window_layers: int = 0
    """Number of layers with a sliding window."""
    moe_layers: int = 0
    """Number of mixture-of-experts layers."""
    residual_dropout: float = 0.0
    """Share of what attention and MLP add that layers drop; known for the types in `DROPOUT`."""
    embedding_dropout: float = 0.0
    """Share of the embeddings that is dropped."""
    padding_masks: bool = False
    """Whether each attention makes a bias of every pair of tokens in a row from a mask of padding."""
    embedding_params: int
    """Parameters before the first layer: token and position tables, their norms and projections."""
    layer_params: tuple[int, ...]
    """Parameters of each layer."""
    layer_active_params: tuple[int, ...]
    """Parameters of each layer that one token visits; equals `layer_params` without experts."""
    head_params: int
    """Parameters after the last layer: final norm and output head (0 for the head where it is tied)."""

    @property
    def full_scores(self) -> bool:
        """Whether attention holds a score for every pair of tokens, even if flash kernels are there."""
        return self.model_type in OWN_ATTENTION

    @property
    def biased_scores(self) -> bool:
        """Whether fused kernels keep a bias for every pair of tokens, joined with the mask, for each attention."""
        return self.model_type in BIASED

    @property
    def rms_norms(self) -> bool:
        """Whether norms are RMS norms, as those of layers with a gate are."""
        return self.gated_mlp or self.biased_scores

    @property
    def params(self) -> int:
        """All parameters, tied ones counted once."""
        return self.embedding_params + sum(self.layer_params) + self.head_params

    @property
    def active_params(self) -> int:
        """Parameters that one token visits."""
        return self.embedding_params + sum(self.layer_active_params) + self.head_params


def read_model_config(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a Hugging Face `config.json`, given as a mapping; of a composite model, its text part."""
    text = text_config(config)
    if needs_counting(text.get("model_type")):
        return ModelSpec(**meta_spec.fields(text))
    model_type = known_type(text.get("model_type"))
    row = ARCHITECTURES[model_type]
    shape = resolve(model_type, row, text)
    window, layers = _windows(model_type, text, shape.layers)
    return replace(
        _count(model_type, row, shape),
        window=window,
        window_layers=layers,
        residual_dropout=_dropout(model_type, 0, text),
        embedding_dropout=_dropout(model_type, 1, text),
    )


DROPOUT = {
    **dict.fromkeys(("gpt2", "gpt-sw3"), ("resid_pdrop", "embd_pdrop")),
    **dict.fromkeys(("bert", "roberta", "camembert", "xlm-roberta"), ("hidden_dropout_prob", "hidden_dropout_prob")),
}
"""Types whose masks of dropout have been rehearsed (GPT-2 and BERT, and types with their code), and the keys of the
shares that layers and embeddings drop."""
USUAL_DROPOUT = 0.1
"""That of all these types where the config gives none (transformers' defaults)."""
WINDOW_EVERY = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "gemma3n_text": 5, "cohere2": 4, "gpt_oss": 2, "olmo3": 4}
"""Types in which one layer in so many sees the full sequence; the others have a sliding window."""
USUAL_WINDOW = {
    "gemma2": 4096,
    "gemma3_text": 4096,
    "gemma3": 4096,
    "gemma3n_text": 512,
    "cohere2": 4096,
    "gpt_oss": 128,
    "olmo3": 4096,
}
"""Window in tokens where the config gives none (transformers' defaults)."""
OPTIONAL_WINDOW = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
"""Types that use their window only with `use_sliding_window`."""


def _dropout(model_type: str, place: int, config: Mapping[str, Any]) -> float:
    given = config.get(DROPOUT[model_type][place], USUAL_DROPOUT) if model_type in DROPOUT else 0.0
    return float(given) if isinstance(given, int | float) else 0.0


def _windows(model_type: str, config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """Tokens of the sliding window, and the number of layers that have one; (0, 0) if there are none."""
    given = config.get("sliding_window", USUAL_WINDOW.get(model_type))
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        return 0, 0
    if model_type in OPTIONAL_WINDOW and config.get("use_sliding_window") is not True:
        return 0, 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list | tuple):
        return given, min(layers, sum(kind == "sliding_attention" for kind in kinds))
    every = config.get("sliding_window_pattern", WINDOW_EVERY.get(model_type))
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return given, layers - layers // every
    return (given, layers) if model_type in ("mistral", "mixtral", "starcoder2", "phi3") else (0, 0)


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


def _expert_fields(experts: Experts | None, shape: Shape, sparse_layers: int) -> dict[str, Any]:
    if experts is None or not sparse_layers:
        return {}
    return {
        "experts": shape.num(experts.number),
        "experts_per_token": shape.num(experts.visited),
        "expert_ffn": shape.num(experts.width),
        "shared_ffn": experts.shared(shape),
        "moe_layers": sparse_layers,
    }


LARGEST_BYTES = 4_000_000
"""Upper bound of a config file, which has a few kilobytes; larger files are something else."""
OFFLINE_WAYS = "a local directory, an inline `model.config`, or a name in configs/models works without a network"


def load_model_config(path: str, *, models_dir: Path) -> dict[str, Any]:
    """The config of a model: a directory, JSON file, name in `models_dir` or hub id; raises `BadInput` otherwise."""
    if not path.strip() or "\0" in path:
        raise BadInput("model.path", f"{path!r} is not a path; {OFFLINE_WAYS}")
    local = Path(path).expanduser()
    if _is_dir(local):
        return _read(local / "config.json")
    if local.suffix == ".json":
        return _read(local)
    if local.is_absolute() and local.exists():
        return _read(local)
    bundled = _bundled(path, models_dir)
    return bundled if bundled is not None else _read(_from_hub(path, models_dir))


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long for the file system
        return False


def _bundled(name: str, models_dir: Path) -> dict[str, Any] | None:
    """The config with that file name or hub id in `models_dir`, ignoring case; None if there is none."""
    wanted = name.casefold()
    files = sorted(models_dir.glob("*.json"))
    for file in files:
        if file.stem.casefold() == wanted:
            return _read(file)
    configs = (_read(file) for file in files if "/" in name)
    return next((config for config in configs if str(config.get("_hub_id", "")).casefold() == wanted), None)


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise BadInput(str(path), f"is a device or a pipe; a file is required; {OFFLINE_WAYS}")
        with path.open("rb") as file:
            data = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise BadInput(str(path), f"can't be read ({error.strerror or error}); {OFFLINE_WAYS}") from error
    if len(data) > LARGEST_BYTES:
        raise BadInput(str(path), f"is larger than {LARGEST_BYTES} bytes, so it is not a model config")
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadInput(str(path), f"is not JSON ({error}); give a Hugging Face config.json") from error
    if not isinstance(config, dict):
        raise BadInput(str(path), "does not contain a JSON object; give a Hugging Face config.json")
    return config


CONNECT_SECONDS = 1.5
"""Longest wait for a connection to the hub; huggingface_hub itself retries for 25 seconds."""


def _reachable(endpoint: str) -> bool:
    """Whether the hub, or the proxy to it, accepts a connection."""
    import urllib.parse  # slow, and needed for this alone
    import urllib.request

    target = urllib.parse.urlsplit(endpoint)
    proxy = urllib.request.getproxies().get(target.scheme)
    if proxy and not urllib.request.proxy_bypass(target.hostname or ""):
        target = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}")
    finished, connected = threading.Event(), threading.Event()

    def connect() -> None:
        port = target.port or (80 if target.scheme == "http" else 443)
        with contextlib.suppress(OSError), socket.create_connection((target.hostname, port), CONNECT_SECONDS):
            connected.set()
        finished.set()

    threading.Thread(target=connect, daemon=True).start()  # resolving a name has no time limit of its own
    finished.wait(CONNECT_SECONDS)
    return connected.is_set()


def _from_hub(name: str, models_dir: Path) -> Path:
    """Path of `config.json` from the hub or its cache; huggingface_hub itself honours HF_HUB_OFFLINE."""
    try:
        # Imported here because it is slow, and planning from local files does not need it.
        from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            return Path(cached)
        if not constants.HF_HUB_OFFLINE and not _reachable(constants.ENDPOINT):
            raise ConnectionError(f"{constants.ENDPOINT} can't be reached")
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # network, HTTP, validation, file system: no common base class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise BadInput(
            "model.path",
            f"{name} is neither a directory nor a name in {models_dir}, and its config.json could not be loaded from "
            f"the Hugging Face hub or its cache ({type(error).__name__}: {reason}); {OFFLINE_WAYS}",
        ) from error
