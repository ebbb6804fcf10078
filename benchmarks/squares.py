"""Tensors with two dimensions of the sequence length, and waits of the host, in a rehearsed step at 32,768 tokens.

There must be no such tensor, and one wait.

    python -m benchmarks.squares [--types llama,gemma2,…] [--tokens 32768]

Each of 20 model types under ZeRO 2, and a Llama under every strategy; four narrow layers, since a square of the
sequence shows at any width. One line of JSON per row; the exit code is 1 if any row misses.

Recorded at 32,768 tokens: no square in any of the 31 rows (nor for falcon, bloom and gptj), and one wait of the host
in all but offload to the host, where DeepSpeed itself waits five times more. Left out: opt, which can't be rehearsed,
because it draws a random number on the host for every layer.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from benchmarks.rehearsals import fork_servers
from toolkit.errors import ToolkitError
from toolkit.recipe.file import make_recipe
from toolkit.runtime.rehearsal.report import RoleReport
from toolkit.sessions.rehearse import rehearse
from toolkit.sessions.resolve import resolve

TYPES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "phi", "smollm3",
    "starcoder2", "olmo2", "cohere", "granite", "glm4", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3",
)  # fmt: skip
STRATEGIES: dict[str, dict[str, Any]] = {
    "zero 2": {"name": "zero", "zero_stage": 2},
    "zero 3": {"name": "zero", "zero_stage": 3, "zero_variant": "plain"},
    "tensor": {"name": "tensor_parallel", "tp": 2, "zero_stage": 1, "sequence_sharded": False},
    "pipeline": {"name": "pipeline", "pp": 2, "schedule": "1f1b", "zero_stage": 1},
    "sequence": {"name": "sequence_parallel", "sp": 2, "zero_stage": 2},
    "ring": {"name": "sequence_parallel", "cp": 2, "zero_stage": 2},
    "token shares": {"name": "tensor_parallel", "tp": 2, "zero_stage": 1, "sequence_sharded": True},
    "interleaved": {"name": "pipeline", "pp": 2, "schedule": "interleaved", "chunks": 2, "zero_stage": 1},
    "hybrid": {"name": "hybrid", "tp": 2, "pp": 2, "zero_stage": 1},
    "offload": {"name": "zero", "zero_stage": 3, "zero_variant": "plain", "offload": "cpu_params"},
    "zero 1": {"name": "zero", "zero_stage": 1},
    "data": {"name": "data_parallel"},
}


def rehearsed(kind: str, strategy: dict[str, Any], tokens: int) -> RoleReport:
    """The first rank of a narrow model."""
    # Imports DeepSpeed, which `fork_servers` must come before.
    from toolkit.runtime.proofs.coverage import tiny_model

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
    return rehearse(resolve(make_recipe(mapping)), "0").roles[0]


def main() -> int:
    """Rehearse every row and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--tokens", type=int, default=32768)
    args = parser.parse_args()
    fork_servers()
    types = args.types.split(",")
    rows = [("llama", name) for name in STRATEGIES if name != "zero 2" and "llama" in types]
    rows = [*((kind, "zero 2") for kind in types), *rows]
    failed = 0
    for kind, name in rows:
        row: dict[str, Any] = {"type": kind, "strategy": name}
        try:
            role = rehearsed(kind, STRATEGIES[name], args.tokens)
            row |= {"squares": role.square_tensors, "host_syncs": role.step.host_syncs}
            row["cpu_seconds"] = round(role.cpu_seconds)
        except ToolkitError as error:
            row["refused"] = str(error).splitlines()[0]
        failed += row.get("squares") != {} or sum(row.get("host_syncs", {}).values()) > 1
        print(json.dumps(row), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
