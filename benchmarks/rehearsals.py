"""Predicted against rehearsed live bytes by part, over models and strategies at full size.

python -m benchmarks.rehearsals [WORD ...]     # all rows, or those whose name contains every word
"""

from __future__ import annotations

import sys
from dataclasses import asdict

from toolkit.errors import ToolkitError
from toolkit.recipe.file import make_recipe
from toolkit.runtime.rehearsal.report import PARTS
from toolkit.sessions.rehearse import Rehearsal, rehearse
from toolkit.sessions.resolve import resolve
from toolkit.units import GIB

MODELS = {
    "llama-1b": "meta-llama/Llama-3.2-1B",
    "llama-8b": "meta-llama/Llama-3.1-8B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "llama-70b": "meta-llama/Llama-3.1-70B",
}
STRATEGIES = {
    "zero-1": ("strategy.name=zero", "strategy.zero_stage=1"),
    "zero-2": ("strategy.name=zero", "strategy.zero_stage=2"),
    "zero-3": ("strategy.name=zero", "strategy.zero_stage=3", "strategy.zero_variant=plain"),
    "tensor": ("strategy.name=tensor_parallel", "strategy.tp=8"),
    "pipeline": ("strategy.name=pipeline", "strategy.pp=4"),
}
RECOMPUTE = ("none", "full")


def row(model: str, strategy: str, recompute: str) -> Rehearsal:
    """Rehearse the first rank (of every stage) of one combination on 8 H100."""
    mapping = {
        "name": "rehearsals",
        "model": {"path": MODELS[model], "init": "scratch", "precision": "bf16"},
        "data": {"path": "synthetic", "tokenizer": "bytes", "seq_len": 4096},
        "train": {"global_batch": 32, "steps": 2},
        "cluster": "dgx-h100",
    }
    axes = [*STRATEGIES[strategy], "strategy.micro_batch=1", f"strategy.recompute={recompute}"]
    return rehearse(resolve(make_recipe(mapping, axes)), "0")


def main(words: list[str]) -> None:
    """Print the table, and the mean and worst difference."""
    print(f"{'combination':28} {'predicted':>9} {'rehearsed':>9} {'diff':>7}  " + " ".join(f"{p:>17}" for p in PARTS))
    differences = []
    for model in MODELS:
        for strategy in STRATEGIES:
            for recompute in RECOMPUTE:
                name = f"{model} {strategy} {recompute}"
                if not all(word in name for word in words):
                    continue
                try:
                    result = row(model, strategy, recompute)
                except ToolkitError as error:
                    print(f"{name:28} {str(error).splitlines()[0]}", flush=True)
                    continue
                step, memory = result.roles[0].step, asdict(result.option.estimate.memory)
                difference = result.predicted_bytes / step.device_peak_bytes - 1
                differences.append(abs(difference))
                parts = " ".join(f"{memory[p] / GIB:8.2f}/{step.parts[p] / GIB:<8.2f}" for p in PARTS)
                sizes = f"{result.predicted_bytes / GIB:9.2f} {step.device_peak_bytes / GIB:9.2f}"
                print(f"{name:28} {sizes} {difference:+7.1%}  {parts}", flush=True)
    if differences:
        mean = sum(differences) / len(differences)
        print(f"{len(differences)} rows: mean {mean:.1%}, worst {max(differences):.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
