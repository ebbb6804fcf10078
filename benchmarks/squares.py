"""Tensors with two dimensions of the sequence length in a rehearsed step at 32,768 tokens: there must be none.

    python -m benchmarks.squares [--types llama,gemma2,…] [--tokens 32768]

Each of 20 model types under ZeRO 2, and a Llama under every strategy; four narrow layers, since a square of the
sequence shows at any width. One line of JSON per row; the exit code is 1 if any row has such a tensor.

Recorded so far, at 32,768 tokens: none for llama under data parallel, ZeRO 2 and 3, tensor, pipeline and sequence
parallel, and none for qwen2, qwen3, mixtral, gpt_neox and olmo2 under ZeRO 2. The other types have not been rehearsed;
those with soft caps take long, because their attention runs in blocks of 128 queries. Left out: falcon, which does not
use transformers' registry of attention functions and keeps its masks (18 squares), and opt, which can't be rehearsed,
because it draws a random number on the host for every layer.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.recipe.file import make_recipe
from toolkit.runtime.proofs.coverage import tiny_model
from toolkit.sessions.rehearse import rehearse
from toolkit.sessions.resolve import resolve

TYPES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "phi", "smollm3",
    "starcoder2", "olmo2", "cohere", "granite", "glm4", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3",
)  # fmt: skip
STRATEGIES: dict[str, dict[str, Any]] = {
    "zero 2": {"name": "zero", "zero_stage": 2},
    "zero 3": {"name": "zero", "zero_stage": 3, "zero_variant": "plain"},
    "tensor": {"name": "tensor_parallel", "tp": 2, "zero_stage": 1},
    "pipeline": {"name": "pipeline", "pp": 2, "zero_stage": 1},
    "sequence": {"name": "sequence_parallel", "sp": 2, "zero_stage": 2},
    "data": {"name": "data_parallel"},
}


def squares(kind: str, strategy: dict[str, Any], tokens: int) -> dict[str, int]:
    """Squares of the sequence length by where they are made, on the first rank."""
    config = dict(tiny_model(kind).config or {})
    for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"):
        if key in config:
            config[key] = 2 * tokens  # no size of the model may equal the length, or squares could not be told
    mapping = {
        "name": "squares",
        "model": {"config": config, "precision": "bf16"},
        "data": {"path": "texts.jsonl", "tokenizer": "bytes", "seq_len": tokens, "packing": True},
        "train": {"global_batch": 16, "steps": 2},
        "strategy": {"micro_batch": 1, "recompute": "none", **strategy},
        "cluster": "dgx-h100",
    }
    (role,) = rehearse(resolve(make_recipe(mapping)), "0").roles[:1]
    assert role.square_tensors is not None
    return role.square_tensors


def main() -> int:
    """Rehearse every row and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--tokens", type=int, default=32768)
    args = parser.parse_args()
    rows = [("llama", name) for name in STRATEGIES if name != "zero 2"]
    rows = [*((kind, "zero 2") for kind in args.types.split(",")), *rows]
    failed = 0
    for kind, name in rows:
        try:
            found: Any = squares(kind, STRATEGIES[name], args.tokens)
        except ToolkitError as error:
            found = {str(error).splitlines()[0]: -1}
        failed += bool(found)
        print(json.dumps({"type": kind, "strategy": name, "squares": found}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
