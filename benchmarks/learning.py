"""Does each objective learn? Small runs on synthetic tasks with a known best answer; held-out figures as a table.

python -m benchmarks.learning                    # all but DPO, a few minutes in one process
python -m benchmarks.learning --objectives kto

Data: which sound an animal makes, against other sounds. Distillation: a teacher is trained first, then a smaller
student learns from it; the loss is the divergence between both.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from toolkit import cli
from toolkit.launching import environment, launchers
from toolkit.recipe.file import make_recipe
from toolkit.run_dir.layout import RunDir
from toolkit.runtime.supervision.warm_pool import run_warm
from toolkit.sessions.resolve import resolve

SMALL = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 260,
         "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}  # fmt: skip
LARGE = {**SMALL, "hidden_size": 128, "intermediate_size": 384}
PAIRS: dict[str, Any] = {"format": "preference", "seq_len": 128, "steps": 60, "lr": 2e-3}
RUNS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("ipo", "simpo", "cpo", "orpo"), PAIRS),
    "kto": {"format": "preference", "seq_len": 128, "steps": 120, "lr": 2e-3},
    "reward": {"format": "preference", "seq_len": 64, "steps": 320, "lr": 2e-3},
    "rank": {"format": "ranking", "seq_len": 64, "steps": 160, "lr": 2e-3},
    "distill": {"format": "instruction", "seq_len": 64, "steps": 120, "lr": 4e-3},
}
COLUMNS = ("loss", "accuracy", "mrr", "ndcg")


def run(folder: Path, name: str, model: dict[str, Any], **train: Any) -> tuple[RunDir, list[dict[str, Any]]]:
    """A run in one process, and its evaluations."""
    given = RUNS[name]
    recipe = {
        "name": name, "model": {"config": model, "precision": "fp32"},
        "data": {"path": "synthetic", "format": given["format"], "tokenizer": "bytes", "seq_len": given["seq_len"],
                 "eval_fraction": 0.2, "cache": str(folder / "cache"),
                 **({"candidates": 4} if given["format"] == "ranking" else {})},
        "train": {"global_batch": 16, "lr": given["lr"], "schedule": "constant", "warmup": 0.1, "steps": given["steps"],
                  "eval_every": given["steps"] // 4, **train},
        "strategy": {"name": "data_parallel"}, "checkpoint": {"every": 10**6},
        "metrics": {"console": False, "wandb": {"mode": "disabled"}},
    }  # fmt: skip
    directory = resolve(make_recipe(recipe), 1).write(folder / f"{name}-{len(list(folder.iterdir()))}")
    if any(run_warm(launchers.commands("local", directory.path, 1, "cpu"))):
        raise RuntimeError(directory.log(0).read_text()[-2000:])
    return directory, [json.loads(line) for line in directory.evaluations.read_text().splitlines()]


def learned(folder: Path, name: str) -> list[dict[str, Any]]:
    """Evaluations of an objective: before training, and at four moments of it."""
    objective: dict[str, Any] = {"objective": name}
    model = SMALL
    if name == "distill":
        teacher, _ = run(folder, name, LARGE)
        if cli.main(["export", str(teacher.path), str(folder / "teacher")]):
            raise RuntimeError("the teacher can't be exported")
        objective["distill"] = {"teacher": str(folder / "teacher"), "top_k": 260}
    _, before = run(folder, name, model, **objective, steps=1, lr=1e-12, eval_every=1)
    _, curve = run(folder, name, model, **objective)
    return [{**before[0], "step": 0}, *curve]


def main() -> int:
    """Print a table for each objective."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", default=",".join(RUNS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="learning-") as directory:
        for name in args.objectives.split(","):
            records = learned(Path(directory), name)
            shown = [key for key in COLUMNS if key in records[-1]]
            print(f"{name}\n| step | {' | '.join(shown)} |", flush=True)
            for record in records:
                print(f"| {record['step']} | {' | '.join(f'{record[key]:.4f}' for key in shown)} |", flush=True)
    return 0


if __name__ == "__main__":
    environment.enter_processor_environment()
    sys.exit(main())
