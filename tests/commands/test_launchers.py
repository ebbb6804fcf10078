"""Every way to start workers on one machine, by the commands of docs/launching.md, gives bit-identical losses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import launching_page
from tests.conftest import TINY_LLAMA

BIN = Path(sys.executable).parent
EMITS = "toolkit emit"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("launchers")
    mapping: dict[str, Any] = {
        "name": "tiny",
        "model": {"config": TINY_LLAMA, "precision": "fp32"},
        "data": {"path": "python-stdlib", "tokenizer": "bytes", "seq_len": 32},
        "train": {"global_batch": 8, "steps": 3, "lr": 1e-2},
        "strategy": {"name": "zero", "zero_stage": 2},
        "metrics": {"console": False, "wandb": {"mode": "disabled"}},
    }
    (directory / "recipe.yaml").write_text(yaml.safe_dump(mapping))
    return directory


@pytest.fixture(scope="module")
def expected(workspace: Path) -> list[float]:
    """`toolkit train` itself."""
    first = launching_page.commands("This machine")[0]
    losses, _ = launching_page.run(first, workspace, launching_page.environment())
    assert len(losses) == 3
    return losses


OTHERS = [*launching_page.commands("This machine")[1:], *launching_page.commands("Your own launcher")]


@pytest.mark.parametrize("command", OTHERS)
def test_the_same_bits_from_every_launcher(workspace: Path, expected: list[float], command: str) -> None:
    found, _ = launching_page.run(command, workspace, launching_page.environment())
    assert found == ([] if command.startswith(EMITS) else expected)
    if not command.startswith(EMITS):
        newest = max(workspace.rglob("metrics.jsonl"), key=lambda path: path.stat().st_mtime).parent
        assert {path.name for path in (newest / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
        assert json.loads((newest / "summary.json").read_text())["status"] == "done"


def test_the_manifest_of_the_page(workspace: Path) -> None:
    for command in launching_page.commands("Kubernetes"):
        launching_page.run(command, workspace, launching_page.environment())
    assert "image: registry.example/zero-toolkit:1" in (workspace / "k8s-job" / "job.yaml").read_text()


def test_pipelines_are_refused_under_accelerate(workspace: Path) -> None:
    argv = ["train", "recipe.yaml", "strategy={name: pipeline, pp: 2}", "--nproc", "2", "--launcher", "accelerate"]
    done = subprocess.run(
        [sys.executable, "-m", "toolkit.cli", *argv],
        cwd=workspace,
        env=launching_page.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "accelerate has no pipeline; use --launcher local" in done.stderr


def test_faults_under_a_foreign_launcher_are_one_message(workspace: Path) -> None:
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m", "toolkit.worker", "recipe.yaml"]
    done = subprocess.run(
        [*command, "train.sterps=3"],
        cwd=workspace,
        env=launching_page.environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert done.stderr.count("train.sterps: unknown key; did you mean train.steps?") == 1
