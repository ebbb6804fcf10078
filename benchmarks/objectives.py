"""Every objective under every layout against one process: losses, gradient norms, and resuming in another layout.

python -m benchmarks.objectives                                   # the whole matrix, about 120 short runs
python -m benchmarks.objectives --objectives dpo,kto --layouts zero-3,hybrid

Each cell is a real run of a tiny recipe in real processes, from data to metrics.jsonl: `ok` with the largest relative
difference of losses and of gradient norms, `refused` with the planner's reason, or what differs. `resume`: half of the
steps under ZeRO 2, the rest in tensor shards. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from toolkit.launching import environment, launchers
from toolkit.recipe.file import make_recipe
from toolkit.run_dir.layout import RunDir
from toolkit.run_dir.trajectory import Trajectory, largest_difference
from toolkit.runtime.supervision.warm_pool import run_warm
from toolkit.sessions.resolve import explain, resolve

LOSS, NORM = 2e-5, 1e-4
"""Largest relative differences from one process."""
STEPS = 4
RATE = 1e-3
"""Learning rate of AdamW. At 1e-2 it enlarges the rounding of the first gradients of `rank` 60 times per step: norms in
tensor shards then differ by 1.4e-4 after four steps, and by 7e-6 with plain SGD."""
LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 260,
         "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 192}  # fmt: skip
BERT = {"model_type": "bert", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 260,
        "num_attention_heads": 2, "max_position_embeddings": 192, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}  # fmt: skip
ADAPTERS: dict[str, Any] = {"rank": 4, "alpha": 8}


@dataclass(frozen=True)
class Case:
    """An objective with its data and model."""

    format: str
    train: dict[str, Any]
    config: dict[str, Any]
    seq_len: int = 96


def _distill(**more: Any) -> dict[str, Any]:
    teacher = {**LLAMA, "initializer_range": 0.3}  # one that prefers some tokens
    return {"objective": "distill", "distill": {"teacher_config": teacher, "top_k": 8, "ce_weight": 0.25, **more}}


CASES: dict[str, Case] = {
    **{name: Case("preference", {"objective": name}, LLAMA, 128)
       for name in ("dpo", "ipo", "kto", "orpo", "simpo", "cpo")},
    **{f"{name}-live": Case("preference", {"objective": name, "reference": "live"}, LLAMA, 128)
       for name in ("dpo", "ipo", "kto")},
    "reward": Case("preference", {"objective": "reward"}, LLAMA),
    "rank": Case("ranking", {"objective": "rank"}, LLAMA),
    "rank-bert": Case("ranking", {"objective": "rank"}, BERT),
    "contrastive": Case("pairs", {"objective": "contrastive", "contrastive": {"temperature": 0.2}}, LLAMA),
    "contrastive-bert": Case("pairs", {"objective": "contrastive", "contrastive": {"temperature": 0.2}}, BERT),
    "distill": Case("chat", _distill(), LLAMA),
    "distill-live": Case("chat", _distill(predictions="live"), LLAMA),
    "neftune": Case("chat", {"neftune_alpha": 5.0}, LLAMA),
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp": (2, {"name": "data_parallel"}),
    "zero-2": (2, {"name": "zero", "zero_stage": 2}),
    "zero-3": (2, {"name": "zero", "zero_stage": 3}),
    "tp": (2, {"name": "tensor_parallel", "tp": 2}),
    "pp": (2, {"name": "pipeline", "pp": 2}),
    "hybrid": (4, {"name": "hybrid", "tp": 2, "pp": 2}),
    "sp": (2, {"name": "sequence_parallel", "sp": 2}),
    "lora-tp": (2, {"name": "tensor_parallel", "tp": 2}),
    "resume": (2, {"name": "zero", "zero_stage": 2}),
}
"""Name → (processes, strategy)."""
ALONE: dict[str, Any] = {"name": "data_parallel"}


class Refused(Exception):
    """No plan can do it; the message gives the reason."""


class Matrix:
    """Runs cases in a directory of their own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0
        self.alone = cache(self._alone)
        """One process's losses and norms: (objective, whether it has adapters)."""

    def cell(self, objective: str, layout: str) -> tuple[str, bool]:
        """(what to print, whether it is right) of one objective under one layout."""
        nproc, strategy = LAYOUTS[layout]
        adapters = layout.startswith("lora")
        expected = self.alone(objective, adapters)
        try:
            found = self._resumed(objective) if layout == "resume" else self.run(objective, strategy, nproc, adapters)
        except Refused as refused:
            return f"refused: {refused}", True
        except RuntimeError as error:
            return f"FAILED: {error}", False
        loss = largest_difference(expected.loss, found.loss)
        norm = largest_difference(expected.grad_norm, found.grad_norm)
        right = loss <= LOSS and norm <= NORM and len(found.loss) == STEPS
        return f"{'ok' if right else 'DIFFERS'} {loss:.0e} {norm:.0e}", right

    def _alone(self, objective: str, adapters: bool) -> Trajectory:
        return self.run(objective, ALONE, 1, adapters)

    def _resumed(self, objective: str) -> Trajectory:
        into = self._new()
        half = {"steps": STEPS // 2}
        self.run(objective, LAYOUTS["zero-2"][1], 2, False, into, half)
        axes = LAYOUTS["tp"][1]
        return self.run(objective, axes, 2, False, into)

    def _new(self) -> Path:
        self._count += 1
        return self._directory / f"run-{self._count}"

    def run(
        self, objective: str, strategy: dict[str, Any], nproc: int, adapters: bool, into: Path | None = None,
        train: dict[str, Any] | None = None,
    ) -> Trajectory:  # fmt: skip
        """Losses and gradient norms of a run; raises `Refused` or `RuntimeError`."""
        case = CASES[objective]
        given: dict[str, Any] = {
            "name": "objective",
            "model": {"config": dict(case.config), "precision": "fp32", **({"lora": ADAPTERS} if adapters else {})},
            "data": {"path": "synthetic", "format": case.format, "tokenizer": "bytes", "seq_len": case.seq_len,
                     "cache": str(self._directory / "cache"), **({"candidates": 4} if case.format == "ranking" else {}),
                     },
            "train": {"global_batch": 8, "steps": STEPS, "lr": RATE, "schedule": "constant", "warmup": 0.0,
                      **case.train, **(train or {})},
            "strategy": strategy,
            "checkpoint": {"every": STEPS // 2 if into else 0},
            "metrics": {"console": False, "wandb": {"mode": "disabled"}},
        }  # fmt: skip
        resolved = resolve(make_recipe(given), nproc)
        if resolved.decision.chosen is None:
            raise Refused(explain(resolved.decision).splitlines()[-1].strip())
        directory = resolved.write(into or self._new())
        codes = run_warm(launchers.commands("local", directory.path, nproc, "cpu"))
        if any(codes):
            rank = next(rank for rank, code in enumerate(codes) if code)
            raise RuntimeError("\n".join(directory.log(rank).read_text(errors="replace").splitlines()[-12:]))
        found = trajectory(directory)
        if into is None:
            shutil.rmtree(directory.path)
        return found


def trajectory(run: RunDir) -> Trajectory:
    """Losses and gradient norms of a run directory."""
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return Trajectory(tuple(r["loss"] for r in records), tuple(r["grad_norm"] for r in records))


def rows(objectives: Sequence[str], layouts: Sequence[str], directory: Path) -> Iterator[tuple[str, str, str, bool]]:
    """(objective, layout, what was found, whether it is right) of every cell."""
    matrix = Matrix(directory)
    for objective in objectives:
        for layout in layouts:
            yield objective, layout, *matrix.cell(objective, layout)


def main() -> int:
    """Print the matrix, a line per cell as it is found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", default="all", help=f"all, or some of: {', '.join(CASES)}")
    parser.add_argument("--layouts", default="all", help=f"all, or some of: {', '.join(LAYOUTS)}")
    args = parser.parse_args()
    objectives = list(CASES) if args.objectives == "all" else args.objectives.split(",")
    layouts = list(LAYOUTS) if args.layouts == "all" else args.layouts.split(",")
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="objectives-") as directory:
        for objective, layout, words, right in rows(objectives, layouts, Path(directory)):
            print(f"{objective:18}{layout:10}{words}", flush=True)
            wrong += not right
    print(f"{len(objectives) * len(layouts)} cells, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    environment.enter_processor_environment()
    sys.exit(main())
