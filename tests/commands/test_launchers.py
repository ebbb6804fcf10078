"""Every launcher on one machine, with the commands of docs/launching.md, gives bit-identical losses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import launching_page
from toolkit.cli import main

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
EMITS = "toolkit emit"
STRANGE = "$(touch CANARY); touch CANARY"
"""Only a directory, whoever starts the workers."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launching_page.workspace(tmp_path_factory.mktemp("launchers") / STRANGE)


COMMANDS = [*launching_page.commands("This machine"), *launching_page.commands("Your own launcher")]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_same_bits_from_every_launcher(workspace: Path, launch_reference: list[float], command: str) -> None:
    found, _ = launching_page.run(command, workspace, launching_page.environment())
    assert found == ([] if command.startswith(EMITS) else launch_reference[:3])
    if not command.startswith(EMITS):
        newest = max(workspace.rglob("metrics.jsonl"), key=lambda path: path.stat().st_mtime).parent
        assert {path.name for path in (newest / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
        assert json.loads((newest / "summary.json").read_text())["status"] == "done"
    assert not list(workspace.parent.rglob("CANARY")), "a name was executed"


def test_the_manifest_of_the_page(workspace: Path) -> None:
    for command in launching_page.commands("Kubernetes"):
        launching_page.run(command, workspace, launching_page.environment())
    assert "image: registry.example/zero-toolkit:1" in (workspace / "k8s-job" / "job.yaml").read_text()


def test_pipelines_are_refused_under_accelerate(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workspace)
    pipeline = "strategy={name: pipeline, pp: 2}"
    assert main(["train", "recipe.yaml", pipeline, "--nproc", "2", "--launcher", "accelerate"]) == 2
    assert "accelerate does not support pipeline parallelism; use another --launcher" in capsys.readouterr().err


def test_problems_under_another_launcher_are_one_message(workspace: Path) -> None:
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
