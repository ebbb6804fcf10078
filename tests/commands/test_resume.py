"""`toolkit resume`, automatic resume and restarts, as a user runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks.harness.self_killing import scale_losses
from toolkit import cli
from toolkit.checkpoints import store
from toolkit.launching.launchers import Command
from toolkit.recipe.file import load_recipe
from toolkit.run_dir.layout import RunDir
from toolkit.runtime.supervision import supervise
from toolkit.runtime.supervision.warm_pool import Enter, WarmProcess, enter_worker
from toolkit.sessions.hosts import LaunchOptions
from toolkit.sessions.prepare import Consent, prepare_resume
from toolkit.sessions.resolve import resolve

pytestmark = pytest.mark.slow

SAVE = ("checkpoint.every=2", "train.steps=4")


@pytest.fixture
def recipe(recipe_mapping: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_mapping))
    return path


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("warm_workers")
def test_another_strategy_and_world_size_resume(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    first = ["train", str(recipe), *SAVE, "strategy.name=zero", "--nproc", "2", "--run-dir", str(run)]
    assert cli.main(first) == 0
    edited = (run / "recipe.yaml").read_text().replace("lr: 0.01", "lr: 0.02")
    (run / "recipe.yaml").write_text(edited)
    capfd.readouterr()
    monkeypatch.undo()  # warm workers write where the test that needed the first of them did
    assert cli.main(["resume", str(run), "strategy.name=data_parallel", "train.steps=6", "--nproc", "1"]) == 0
    shown = capfd.readouterr().out
    assert "resuming from" in shown
    differing = [line for line in shown.splitlines() if "the checkpoint was made with" in line]
    assert len(differing) == 1, "overrides are meant to differ"
    assert "recipe.yaml: train.lr is 0.02; the checkpoint was made with 0.01" in differing[0]
    assert steps(run) == [1, 2, 3, 4, 5, 6]
    assert json.loads((run / "plan.json").read_text())["strategy"] == "data_parallel"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("done", 6)


def test_a_run_of_several_hosts_resumes_on_this_one(recipe: Path, tmp_path: Path) -> None:
    """As after a host was lost; without --nproc, the hosts have to be named."""
    run, said = tmp_path / "run", list[str]()
    resolve(load_recipe(recipe, ["cluster={device: cpu, nodes: 2, devices_per_node: 1}"])).write(run)
    assert cli.main(["resume", str(run)]) == 2
    options = LaunchOptions(resuming=True)
    resolved = prepare_resume(run, (), 2, options, said.append, Consent(), here=True)
    assert (resolved.job.cluster.nodes, resolved.chosen.plan.devices) == (1, 2)
    assert said == ["cluster: several nodes before; now 2 processes on this host"]


def test_a_bare_worker_saves_when_asked_to_stop_and_resumes(recipe: Path, tmp_path: Path) -> None:
    """As under Slurm and Kubernetes: the same command is started again, without our supervisor."""
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


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Callable[[Enter], list[dict[str, Any]]]:
    """Make the command start warm workers that fail in a given way; records the plan of every attempt."""

    def with_failure(enter: Enter) -> list[dict[str, Any]]:
        plans: list[dict[str, Any]] = []

        def run_all(commands: Sequence[Command], run: RunDir, timeout: float) -> int:
            plans.append(json.loads(run.plan.read_text()))
            return original(commands, run, timeout, lambda command: WarmProcess.start(command, enter))

        monkeypatch.setattr(supervise, "run_all", run_all)
        return plans

    original = supervise.run_all
    return with_failure


def own_plan(argv: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(argv[argv.index("--run-dir") + 1]) / "plan.json").read_text())
    return found


def dies_in_company(argv: tuple[str, ...], env: dict[str, str]) -> None:
    """With two processes, rank 1 is killed in step 3; one process trains to the end."""
    died = Path(argv[argv.index("--run-dir") + 1]) / "died"

    def die(count: int) -> float:
        if env["RANK"] == "1" and (count == 3 or died.exists()):
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    scale_losses(die)
    enter_worker(argv, env)


def test_restarts_resume_and_then_use_fewer_processes(
    recipe: Path, tmp_path: Path, attempts: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = attempts(dies_in_company)
    argv = [
        "train",
        str(recipe),
        *SAVE,
        "strategy.name=data_parallel",
        "--nproc",
        "2",
        "--run-dir",
        str(tmp_path / "run"),
        "--max-restarts",
    ]
    assert cli.main([*argv, "1"]) == 4
    assert [plan["dp"] for plan in plans] == [2, 2]
    assert "restarting from step 2 with 2 processes; restarts left: 0" in capsys.readouterr().out
    plans.clear()
    assert cli.main([*argv, "2"]) == 0
    assert [plan["dp"] for plan in plans] == [2, 2, 1], "the second failure without progress uses fewer"
    assert steps(tmp_path / "run") == [1, 2, 3, 4]


def test_a_directory_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["resume", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err


def exhausts_memory(argv: tuple[str, ...], env: dict[str, str]) -> None:
    """Full micro-batches without recompute need more memory in step 3 than any host has."""
    plan = own_plan(argv)
    if plan["micro_batch"] == 4 and plan["recompute"] == "none" and env["RANK"] == "1":
        scale_losses(lambda count: 1.0 if count < 3 else float(torch.empty(2**60, dtype=torch.uint8)[0]))
    enter_worker(argv, env)


def test_out_of_memory_shows_the_next_plan_or_switches_to_it(
    recipe: Path, tmp_path: Path, attempts: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = attempts(exhausts_memory)
    argv = ["train", str(recipe), *SAVE, "--nproc", "2", "strategy.name=zero", "strategy.zero_stage=1"]
    assert cli.main([*argv, "--run-dir", str(tmp_path / "stop")]) == 4
    err = capsys.readouterr().err
    assert "rank 1 on" in err
    assert "can't allocate memory" in err
    assert "predicted:" in err
    assert "the next plan needs" in err
    plans.clear()
    assert cli.main([*argv, "train.on_oom=replan", "--run-dir", str(tmp_path / "replan")]) == 0
    first, second = plans
    assert second["memory"]["total"] < 0.9 * first["memory"]["total"]
    assert second["micro_batch"] * second["grad_accum"] * second["dp"] == 8
    assert "restarting from step 2" in capsys.readouterr().out
    assert steps(tmp_path / "replan") == [1, 2, 3, 4]
    written = yaml.safe_load((tmp_path / "replan" / "recipe.yaml").read_text())
    assert written["strategy"]["micro_batch"] == second["micro_batch"]
