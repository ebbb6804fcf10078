"""Emitted files resolve to exactly the same plan, and run without the toolkit's launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import kubernetes_schema, launching_page
from toolkit.cli import main
from toolkit.launching import environment
from toolkit.launching.launch_files import TARGETS, fixed_recipe
from toolkit.recipe.file import load_recipe, make_recipe
from toolkit.run_dir import heartbeat
from toolkit.sessions.resolve import resolve

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("deepspeed", "deepspeed --num_gpus 2 --module toolkit.worker recipe.yaml"),
        ("torchrun", "torchrun --standalone --nproc-per-node 2 -m toolkit.worker recipe.yaml"),
    ],
)
def test_scripts_are_commands_of_the_page(recipe: Path, tmp_path: Path, target: str, command: str) -> None:
    """The page's test runs those commands; the script adds the run directory and the number of restarts."""
    assert main(["emit", str(recipe), "--nproc", "2", "--for", target, "--out", str(tmp_path / "out")]) == 0
    assert command in launching_page.commands("Your own launcher")
    assert f"\nexec {command} " in (tmp_path / "out" / "launch.sh").read_text()


CLUSTERS = {
    "one node": "cluster={device: H100-SXM5-80GB, nodes: 1, devices_per_node: 8}",
    "four nodes": "cluster={device: H100-SXM5-80GB, nodes: 4, devices_per_node: 8}",
    "CPU": "cluster={device: cpu, nodes: 2, devices_per_node: 16}",
}


def manifest(recipe: Path, out: Path, *more: str) -> tuple[dict[str, Any], dict[str, Any]]:
    assert main(["emit", str(recipe), "train.global_batch=32", *more, "--for", "k8s", "--out", str(out)]) == 0
    config, job = yaml.safe_load_all((out / "job.yaml").read_text())
    return config, job


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_kubernetes_manifests_keep_to_the_schema(recipe: Path, tmp_path: Path, cluster: str) -> None:
    config, job = manifest(recipe, tmp_path / "k", cluster, f"name={'Long_' * 12}x")
    assert kubernetes_schema.problems(config, "V1ConfigMap") == []
    assert kubernetes_schema.problems(job, "KubeflowOrgV1PyTorchJob") == []
    for document in (config, job):
        assert kubernetes_schema.LABEL.fullmatch(document["metadata"]["name"])
    for role in job["spec"]["pytorchReplicaSpecs"].values():
        (container,) = role["template"]["spec"]["containers"]
        for amount in (*container["resources"]["limits"].values(), *container["resources"]["requests"].values()):
            assert kubernetes_schema.QUANTITY.fullmatch(amount)
        volumes = {volume["name"] for volume in role["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_the_schema_finds_problems(recipe: Path, tmp_path: Path) -> None:
    _, job = manifest(recipe, tmp_path / "k", CLUSTERS["CPU"])
    role = job["spec"]["pytorchReplicaSpecs"]["Master"]
    role["template"]["spec"]["containers"][0]["volumeMount"] = []
    role["replicas"] = "1"
    del role["template"]["spec"]["volumes"][0]["name"]
    assert len(kubernetes_schema.problems(job, "KubeflowOrgV1PyTorchJob")) == 3


def test_kubernetes_manifest(recipe: Path, tmp_path: Path) -> None:
    config, job = manifest(recipe, tmp_path / "k", CLUSTERS["four nodes"], "name=My_Run", "--image", "host/team/x:1.2")
    assert config["metadata"]["name"] == "my-run-recipe"
    (tmp_path / "again.yaml").write_text(config["data"]["recipe.yaml"])
    assert load_recipe(tmp_path / "again.yaml").name == "My_Run"
    roles = job["spec"]["pytorchReplicaSpecs"]
    assert (roles["Master"]["replicas"], roles["Worker"]["replicas"]) == (1, 3)
    pod = roles["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch", "the operator requires this name"
    assert container["image"] == "host/team/x:1.2"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert container["command"][-1].startswith("runs/My_Run-"), "a restarted pod resumes there"
    assert any(volume.get("emptyDir", {}).get("medium") == "Memory" for volume in pod["volumes"])
    assert all("value" not in variable for variable in container["env"]), "secrets by reference"


@pytest.mark.parametrize(
    ("target", "image"), [("slurm", "x:1"), ("k8s", "-x"), ("k8s", "x; rm"), ("k8s", "$(x)"), ("k8s", "x\n- y")]
)
def test_images_are_checked(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, image: str
) -> None:
    argv = ["emit", str(recipe), "--nproc", "2", "--for", target, "--image", image, "--out", str(tmp_path / "out")]
    with contextlib.suppress(SystemExit):
        assert main(argv) == 2
    assert "--image" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_torchrun_on_two_nodes_starts_failed_workers_again(tmp_path: Path, launch_reference: list[float]) -> None:
    """Two torchrun agents on this machine, with the page's commands: when a worker is killed, both restart theirs."""
    emit, start = launching_page.commands("torchrun on many nodes")
    workspace = launching_page.workspace(tmp_path)
    launching_page.run(f"{emit} train.steps=40", workspace, launching_page.environment())
    env = launching_page.environment() | {"MASTER_PORT": str(environment.free_port())}
    argv = ["bash", "-c", start.replace("node-1", "127.0.0.1")]
    with (tmp_path / "log").open("w") as log:
        agents = [subprocess.Popen(argv, env=env, cwd=workspace, stdout=log, stderr=log) for _ in range(2)]
    try:
        run = workspace / "torchrun-job" / "runs" / "first"
        victim = at_step(run, 12)
        os.kill(victim, signal.SIGKILL)
        assert [agent.wait(300) for agent in agents] == [0, 0], (tmp_path / "log").read_text()
    finally:
        for agent in agents:
            agent.kill()
    assert launching_page.losses(run / "metrics.jsonl") == launch_reference[:40]
    assert heartbeat.read_all(run / "heartbeats")[1].pid != victim


def at_step(run: Path, step: int) -> int:
    """Wait until rank 1 reaches a step; return its process id."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        beats = heartbeat.read_all(run / "heartbeats")
        if 1 in beats and beats[1].step >= step:
            return beats[1].pid
        time.sleep(0.05)
    raise AssertionError("the run never got there")


def test_slurm_tasks_take_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(key, "x")  # so that they are restored afterwards
        monkeypatch.delenv(key)
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4"}
    for key, value in slurm.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    environment.adopt_slurm()
    assert "RANK" not in os.environ, "inside an allocation, but not started by srun"
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    environment.adopt_slurm()
    assert [os.environ[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["5", "8", "1", "4"]
