"""Emitted files: they plan to exactly the same plan, and run without us."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit import launch
from toolkit.cli import main
from toolkit.emit import TARGETS, fixed_recipe
from toolkit.recipe_file import load_recipe, make_recipe
from toolkit.resolve import resolve


@pytest.fixture
def recipe(recipe_mapping: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_mapping))
    return path


@pytest.mark.parametrize(
    "strategy", ["{name: auto}", "{name: data_parallel}", "{name: zero, zero_stage: 3, offload: cpu}"]
)
@pytest.mark.parametrize("cluster", ["auto", "dgx-h100"])
def test_a_fixed_recipe_has_one_plan(recipe_mapping: dict[str, Any], strategy: str, cluster: str) -> None:
    resolved = resolve(make_recipe(recipe_mapping, [f"strategy={strategy}", f"cluster={cluster}"]), 4)
    fixed = fixed_recipe(resolved.recipe, resolved.chosen.plan, resolved.job.cluster)
    again = resolve(fixed, 4)
    assert [option.plan for option in again.decision.ranked] == [resolved.chosen.plan]
    assert again.deepspeed == resolved.deepspeed


@pytest.mark.parametrize("target", TARGETS)
def test_files_of_the_contract(recipe: Path, tmp_path: Path, target: str) -> None:
    out = tmp_path / target
    assert main(["emit", str(recipe), "--nproc", "2", "--for", target, "--out", str(out)]) == 0
    own = {"deepspeed": "hostfile", "accelerate": "accelerate.yaml", "slurm": "job.sbatch", "k8s": "job.yaml"}
    expected = {"recipe.yaml", "plan.json", "deepspeed.json", "launch.sh", own.get(target, "launch.sh")}
    assert {path.name for path in out.iterdir()} == expected
    assert os.access(out / "launch.sh", os.X_OK)
    load_recipe(out / "recipe.yaml")
    for script in ("launch.sh", "job.sbatch"):
        if (out / script).exists():
            subprocess.run(["bash", "-n", str(out / script)], check=True)
    assert main(["emit", str(recipe), "--nproc", "2", "--for", target, "--out", str(out)]) == 2, (
        "nothing is overwritten"
    )


@pytest.mark.parametrize("target", ["deepspeed", "torchrun", "accelerate"])
def test_emitted_scripts_train(recipe: Path, tmp_path: Path, target: str) -> None:
    out = tmp_path / target
    assert main(["emit", str(recipe), "train.steps=1", "--nproc", "2", "--for", target, "--out", str(out)]) == 0
    env = launch.environment() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([str(out / "launch.sh")], capture_output=True, text=True, env=env, cwd="/", timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (summary,) = out.glob("runs/tiny-*/summary.json")
    assert json.loads(summary.read_text())["status"] == "done"


def test_kubernetes_manifest(recipe: Path, tmp_path: Path) -> None:
    cluster = "cluster={device: H100-SXM5-80GB, nodes: 4, devices_per_node: 8}"
    argv = [
        "emit",
        str(recipe),
        cluster,
        "train.global_batch=32",
        "name=My_Run",
        "--for",
        "k8s",
        "--out",
        str(tmp_path / "k"),
    ]
    assert main(argv) == 0
    config, job = yaml.safe_load_all((tmp_path / "k" / "job.yaml").read_text())
    assert config["metadata"]["name"] == "my-run-recipe"
    roles = job["spec"]["pytorchReplicaSpecs"]
    assert (roles["Master"]["replicas"], roles["Worker"]["replicas"]) == (1, 3)
    pod = roles["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch", "the operator looks for this name"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert all("value" not in variable for variable in container["env"]), "secrets by reference"


def test_slurm_tasks_take_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(key, "x")  # so that they are restored afterwards
        monkeypatch.delenv(key)
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4"}
    for key, value in slurm.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    launch.adopt_slurm()
    assert "RANK" not in os.environ, "inside an allocation, but not started by srun"
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    launch.adopt_slurm()
    assert [os.environ[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["5", "8", "1", "4"]
