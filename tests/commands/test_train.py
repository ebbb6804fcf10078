"""`toolkit train` as a user runs it: files, W&B, a rank that is killed, an interrupt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def recipe(recipe_mapping: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    mapping = {
        **recipe_mapping,
        "metrics": {"every": 2, "wandb": {"mode": "offline", "project": "tests", "tags": ["a"]}},
    }
    path.write_text(yaml.safe_dump(mapping))
    return path


def start(recipe: Path, directory: Path, *argv: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "toolkit.cli", "train", str(recipe), "--nproc", "2", "--run-dir", str(directory)]
    env = {**os.environ, "WANDB_API_KEY": "planted-secret-0123456789abcdef0123456789abcdef", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        # Where the tests run in the background, interrupts are ignored, and children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_files_console_and_wandb(recipe: Path, tmp_path: Path) -> None:
    process = start(recipe, tmp_path / "run", "metrics.sinks=[tests.helpers.own_sinks:BusySink]")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err  # although a thread of a sink is in native code when the worker ends
    run = tmp_path / "run"
    for name in (
        "recipe.yaml",
        "plan.json",
        "deepspeed.json",
        "metrics.jsonl",
        "summary.json",
        "logs/rank-0.log",
        "logs/rank-1.log",
    ):
        assert (run / name).is_file(), name
    for words in ("plans can run", "step 2/4", "tokens/s", "MFU", "predicted", "measured", str(run)):
        assert words in out, words
    assert json.loads((run / "summary.json").read_text())["status"] == "done"
    offline = list(run.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(offline) == 1, "one W&B run per job"
    raw = offline[0].read_bytes()
    for words in (b"global_batch", b"zero_stage", b"grad_norm", b"tests"):
        assert words in raw, words
    everything = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file()) + (out + err).encode()
    assert b"planted-secret" not in everything


def test_a_killed_rank_is_named_and_nobody_stays(recipe: Path, tmp_path: Path) -> None:
    process, workers = start_and_wait(recipe, tmp_path / "run")
    victim = next(pid for pid in workers if environment(pid).get("RANK") == "1")
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - killed < 10
    assert process.returncode == 4
    assert "rank 1 on " in err
    assert "was ended by SIGKILL" in err
    assert "Traceback (most recent call last)" not in err.split("|")[0]
    assert [pid for pid in workers if Path(f"/proc/{pid}").exists()] == []


def test_an_interrupt_ends_every_worker(recipe: Path, tmp_path: Path) -> None:
    process, workers = start_and_wait(recipe, tmp_path / "run")
    assert len(workers) == 2
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert [pid for pid in workers if Path(f"/proc/{pid}").exists()] == []


def start_and_wait(recipe: Path, directory: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a long run, wait for its first recorded step, and return it with the process ids of its workers."""
    process = start(recipe, directory, "train.steps=100000", "metrics.wandb.mode=disabled")
    metrics = directory / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    return process, children(process.pid)


def children(pid: int) -> list[int]:
    listing = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listing]


def environment(pid: int) -> dict[str, str]:
    raw = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(item.decode().split("=", 1) for item in raw if b"=" in item)
