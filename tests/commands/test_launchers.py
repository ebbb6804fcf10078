"""Every way to start a worker gives bit-identical metrics."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit.launch import accelerate_config, free_port
from toolkit.runtime.pool import run_warm  # noqa: F401 - the fork server starts once for all tests

PYTHON = sys.executable
BIN = Path(PYTHON).parent


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launchers")


@pytest.fixture(scope="module")
def recipe(workspace: Path) -> Path:
    from tests.conftest import TINY_LLAMA

    mapping: dict[str, Any] = {
        "name": "tiny",
        "model": {"config": TINY_LLAMA, "precision": "fp32"},
        "data": {"path": "python-stdlib", "tokenizer": "bytes", "seq_len": 32},
        "train": {"global_batch": 8, "steps": 3, "lr": 1e-2},
        "strategy": {"name": "zero", "zero_stage": 2},
        "metrics": {"console": False, "wandb": {"mode": "disabled"}},
    }
    path = workspace / "recipe.yaml"
    path.write_text(yaml.safe_dump(mapping))
    return path


@pytest.fixture(scope="module")
def expected(workspace: Path, recipe: Path) -> list[float]:
    """`toolkit train` itself."""
    return losses(workspace, "toolkit", [PYTHON, "-m", "toolkit.cli", "train", str(recipe), "--nproc", "2"])


def losses(workspace: Path, name: str, command: list[str]) -> list[float]:
    directory = workspace / name
    done = subprocess.run([*command, "--run-dir", str(directory)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert {p.name for p in (directory / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    return [json.loads(line)["loss"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "accelerate"])
def test_toolkit_train_through_each_launcher(
    workspace: Path, recipe: Path, expected: list[float], launcher: str
) -> None:
    command = [PYTHON, "-m", "toolkit.cli", "train", str(recipe), "--nproc", "2", "--launcher", launcher]
    assert losses(workspace, f"by-{launcher}", command) == expected


def test_people_who_launch_by_themselves(workspace: Path, recipe: Path, expected: list[float]) -> None:
    config = workspace / "accelerate.yaml"
    config.write_text(yaml.safe_dump(accelerate_config(workspace / "toolkit" / "deepspeed.json", 2, "cpu")))
    port = str(free_port())
    worker = ["toolkit.worker", str(recipe), "train.seed=0"]
    commands = {
        "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", port, "--module", *worker],
        "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m", *worker],
        "accelerate": [str(BIN / "accelerate"), "launch", "--config_file", str(config), "-m", *worker],
    }
    for name, command in commands.items():
        assert losses(workspace, f"own-{name}", command) == expected, name


def test_faults_under_a_foreign_launcher_are_one_message(recipe: Path) -> None:
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m", "toolkit.worker", str(recipe)]
    done = subprocess.run([*command, "train.sterps=3"], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert done.stderr.count("train.sterps: unknown key; did you mean train.steps?") == 1
