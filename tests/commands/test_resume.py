"""`toolkit resume`, automatic going on, and restarts, as a person runs them."""

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

from toolkit import checkpoint_store as store
from toolkit import cli

SAVE = ("checkpoint.every=2", "train.steps=4")


@pytest.fixture
def recipe(recipe_mapping: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_mapping))
    return path


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_another_strategy_and_world_goes_on(recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    first = ["train", str(recipe), *SAVE, "strategy.name=zero", "--nproc", "2", "--run-dir", str(run)]
    assert cli.main(first) == 0
    assert cli.main(["resume", str(run), "strategy.name=data_parallel", "train.steps=6", "--nproc", "1"]) == 0
    assert "going on from" in capfd.readouterr().out
    assert steps(run) == [1, 2, 3, 4, 5, 6]
    assert json.loads((run / "plan.json").read_text())["strategy"] == "data_parallel"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("done", 6)


def test_a_bare_worker_goes_on_and_saves_when_asked_to_stop(recipe: Path, tmp_path: Path) -> None:
    """The path of Slurm and Kubernetes: the same command again, without our supervisor."""
    run = tmp_path / "run"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--module", "toolkit.worker"]
    command = [sys.executable, *launcher, str(recipe), "--run-dir", str(run), "checkpoint.every=5"]
    process = subprocess.Popen([*command, "train.steps=1000000"], stderr=subprocess.PIPE, text=True)
    try:
        for pid in _worker_pids(run, process):
            os.kill(pid, signal.SIGTERM)
        process.communicate(timeout=120)
    finally:
        process.kill()
    beats = [json.loads((run / "heartbeats" / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [beat["exit_code"] for beat in beats] == [75, 75]
    newest = store.steps(run / "checkpoints")[0]
    assert steps(run)[-1] == newest
    done = subprocess.run([*command, f"train.steps={newest + 2}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert steps(run) == list(range(1, newest + 3))


def _worker_pids(run: Path, launcher: subprocess.Popen[str]) -> list[int]:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and launcher.poll() is None:
        try:
            beats = [json.loads((run / "heartbeats" / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
            if all(beat["step"] >= 1 for beat in beats):
                return [beat["pid"] for beat in beats]
        except (OSError, ValueError):
            pass
        time.sleep(0.1)
    raise AssertionError("training never began")


def test_restarts_go_on_and_then_take_fewer_processes(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from toolkit.errors import RankFailed
    from toolkit.runtime import supervise

    attempts: list[int] = []

    def run_all(commands: Any, run: Any, timeout: float) -> int:
        attempts.append(len(commands))
        if len(attempts) < 3:
            raise RankFailed("rank 1 on host was ended by SIGKILL at step 3")
        return 0

    monkeypatch.setattr(supervise, "run_all", run_all)
    argv = ["train", str(recipe), *SAVE, "--nproc", "2", "--run-dir", str(tmp_path / "run"), "--max-restarts"]
    assert cli.main([*argv, "2"]) == 0
    assert attempts == [2, 2, 1], "the second failure without progress takes fewer"
    out = capsys.readouterr().out
    assert "starting again from the beginning with 2 processes; restarts left: 1" in out
    attempts.clear()
    assert cli.main([*argv, "1"]) == 4
    assert attempts == [2, 2]


def test_what_is_no_run_directory_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["resume", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err


def test_out_of_memory_shows_the_next_plan_or_goes_on_under_it(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from toolkit.commands import session
    from toolkit.errors import OutOfMemory
    from toolkit.runtime import supervise

    plans: list[dict[str, Any]] = []

    def run_all(commands: Any, run: Any, timeout: float) -> int:
        plans.append(json.loads(run.plan.read_text()))
        if len(plans) % 2:
            raise OutOfMemory("rank 0 on host failed: OutOfMemoryError: CUDA out of memory at step 1")
        return 0

    # Only an accelerator runs out of its memory: what is decided then is tested as if this host had two.
    monkeypatch.setattr(supervise, "run_all", run_all)
    monkeypatch.setattr(session, "check_here", lambda cluster: None)
    cluster = "cluster={device: H100-SXM5-80GB, nodes: 1, devices_per_node: 2}"
    big = "model={path: llama-3.2-1b, init: scratch, precision: bf16}"
    argv = ["train", str(recipe), cluster, big, "data.path=synthetic", "data.seq_len=2048", "train.global_batch=64"]
    assert cli.main([*argv, "--run-dir", str(tmp_path / "stop")]) == 4
    err = capsys.readouterr().err
    assert "predicted:" in err
    assert "the next plan needs" in err
    plans.clear()
    assert cli.main([*argv, "train.on_oom=replan", "--run-dir", str(tmp_path / "replan")]) == 0
    first, second = plans
    assert second["memory"]["total"] < 0.9 * first["memory"]["total"]
    assert second["micro_batch"] * second["grad_accum"] * second["dp"] == 64
    assert (
        yaml.safe_load((tmp_path / "replan" / "recipe.yaml").read_text())["strategy"]["micro_batch"]
        == (second["micro_batch"])
    )
