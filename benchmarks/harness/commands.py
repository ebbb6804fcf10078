"""Real commands on a tiny recipe that are disturbed: how they are started, what they leave behind, what they lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from benchmarks.harness.tiny_llama import TINY_LLAMA

MARK = "TOOLKIT_BENCHMARK_RUN"
"""Environment variable by which every process of a command is found, whatever its command line says."""

END_SECONDS = 900.0
"""A command that has not ended by then hangs; on a busy machine, imports alone take minutes."""


class Started(Protocol):
    """A started command, as `subprocess.Popen`."""

    def poll(self) -> int | None:
        """Exit code; None while it runs."""

    def kill(self) -> None:
        """Kill the process."""

    def communicate(self, *, timeout: float = ...) -> tuple[str, Any]:
        """Wait, and return what it said."""


def toolkit(*words: str) -> list[str]:
    """A command of the toolkit."""
    return [sys.executable, "-m", "toolkit.cli", *words]


def write_recipe(directory: Path, steps: int, every: int, **sections: Any) -> Path:
    """Write a recipe that trains for some seconds, with checkpoints, and return its path."""
    recipe: dict[str, Any] = {
        "name": "disturbed",
        "model": {"config": dict(TINY_LLAMA), "precision": "fp32"},
        "data": {"path": "synthetic", "tokenizer": "bytes", "seq_len": 32},
        "train": {"global_batch": 8, "steps": steps, "lr": 1e-2},
        "checkpoint": {"every": every, "keep": 3},
        "metrics": {"console": False, "wandb": {"mode": "disabled"}},
    }
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe | sections))
    return path


def start(argv: list[str], mark: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a command whose processes can be found by their mark."""
    return subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(env or {}), MARK: str(mark)},
    )


def finish(process: Started, seconds: float = END_SECONDS) -> tuple[str, bool]:
    """Wait for a command; return what it said, and whether it ended in time. Otherwise it is killed."""
    try:
        return process.communicate(timeout=seconds)[0], True
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0], False


def losses(run: Path) -> dict[int, float]:
    """Step → loss of a run; a line that is being written is left out."""
    path, found = run / "metrics.jsonl", {}
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        found[int(record["step"])] = float(record["loss"])
    return found


def at_step(run: Path, step: int, process: Started, seconds: float = END_SECONDS) -> None:
    """Wait until a run has done so many steps, or has ended."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and max(losses(run), default=0) < step and time.monotonic() < deadline:
        time.sleep(0.02)


def leftovers(mark: Path) -> list[int]:
    """Living processes of a command."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                is_zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                marked = wanted in (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # it has ended, or belongs to somebody else
                continue
            if marked and not is_zombie:
                found.append(int(entry.name))
    return found
