"""The commands of docs/launching.md, for tests to run as they stand there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness.tiny_llama import TINY_LLAMA

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "launching.md"
STEPS = 200
"""Of the reference; shorter runs are the beginning of it, because the rate is constant."""
RECIPE: dict[str, Any] = {
    "name": "tiny",
    "model": {
        "config": TINY_LLAMA,
        "precision": "fp32",
    },
    "data": {"path": "python-stdlib", "tokenizer": "bytes", "seq_len": 32},
    "train": {"global_batch": 8, "steps": 3, "lr": 1e-2, "schedule": "constant", "warmup": 0},
    "strategy": {"name": "zero", "zero_stage": 2, "micro_batch": 4},
    "metrics": {"console": False, "wandb": {"mode": "disabled"}},
}
"""What every way to launch trains, with two processes."""


def workspace(directory: Path) -> Path:
    """A directory in which the commands of the page work."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return directory


def commands(heading: str, language: str = "sh") -> list[str]:
    """The lines of the code blocks under a heading."""
    section = re.split(r"(?m)^## ", PAGE.read_text())
    (text,) = [part for part in section if part.startswith(f"{heading}\n")]
    return [line for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]


def environment() -> dict[str, str]:
    """Where the commands are found, and this toolkit."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}


def run(command: str, directory: Path, env: Mapping[str, str]) -> tuple[list[float], str]:
    """The losses of the run that a command starts (none if it starts none), and what it said."""
    before = set(directory.rglob("metrics.jsonl"))
    done = subprocess.run(
        ["bash", "-c", command], cwd=directory, env=dict(env), capture_output=True, text=True, timeout=300
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{command}: {done.returncode}\n{said[-5000:]}"
    new = set(directory.rglob("metrics.jsonl")) - before
    return [loss for path in new for loss in losses(path)], said


def losses(metrics: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
