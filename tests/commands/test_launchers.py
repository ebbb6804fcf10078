"""Every launcher on one machine, with the commands of docs/launching.md, gives bit-identical losses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import launching_page
from toolkit.cli import main
from toolkit.plans.job import raw_config
from toolkit.plans.split_verdicts import Axes, Proofs
from toolkit.recipe.file import load_recipe
from toolkit.verdicts import Verdict

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


@pytest.mark.parametrize(("planted", "code"), [("", 0), ("gradients of 1 parameters of a tiny model are wrong", 3)])
def test_workers_that_people_start_have_the_proof_of_a_split(
    workspace: Path, tmp_path: Path, planted: str, code: int
) -> None:
    """Rank 0 proves while the other one waits; a split that is known to be wrong is refused on both."""
    axes = "strategy={name: tensor_parallel, tp: 2, dp: 1, zero_stage: 1}"
    proofs = tmp_path / ".cache" / "zero-toolkit" / "proofs.json"
    if planted:
        recipe = load_recipe(workspace / "recipe.yaml")
        kept = Proofs(proofs)
        for axes_of_proof in (Axes(2, 1, 1), Axes(2, 1, 1, sequence_sharded=True)):
            kept.put(raw_config(recipe.model), recipe.model, axes_of_proof, Verdict(False, planted))
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m", "toolkit.worker", "recipe.yaml"]
    env = launching_page.environment() | {"HOME": str(tmp_path)}
    done = subprocess.run(
        [*command, axes, "train.steps=1"], cwd=workspace, env=env, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode == 0) == (code == 0), done.stderr
    if planted:
        assert done.stderr.count(planted) == 1
    else:
        assert done.stderr.count("checking the split on a tiny model of the same type") == 1
        assert json.loads(proofs.read_text())
