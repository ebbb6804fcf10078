"""The commands of docs/launching.md, for tests to run as they stand there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "launching.md"


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
