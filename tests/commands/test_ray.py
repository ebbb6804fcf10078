"""`--launcher ray`: real runs on a temporary Ray cluster, and on a cluster of two nodes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group

from tests.helpers import launching_page
from toolkit.cli import main
from toolkit.clusters.ray_nodes import RayNode, section_of
from toolkit.errors import BadInput
from toolkit.run_dir import heartbeat
from toolkit.runtime.hosts import ray_cluster

pytestmark = pytest.mark.slow

TOOLKIT = [sys.executable, "-m", "toolkit.cli"]
SECRET = "planted-5e0d13"  # noqa: S105
SMALL = {"num_cpus": 1, "object_store_memory": ray_cluster.STORE_BYTES}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A Ray cluster of two nodes with one CPU each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")
        cluster = Cluster(initialize_head=True, head_node_args={**SMALL, "include_dashboard": False})
        try:
            cluster.add_node(**SMALL)
            yield cluster.address
        finally:
            cluster.shutdown()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return launching_page.workspace(tmp_path)


class Started:
    """A run that the test interferes with once it trains."""

    def __init__(self, directory: Path, argv: list[str], env: dict[str, str]) -> None:
        self.run = directory / "run"
        self.process = subprocess.Popen(
            argv, cwd=directory, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def at_step(self, step: int) -> dict[int, heartbeat.Beat]:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and self.process.poll() is None:
            beats = heartbeat.read_all(self.run / "heartbeats")
            if len(beats) == 2 and all(beat.step >= step for beat in beats.values()):
                return beats
            time.sleep(0.05)
        raise AssertionError(f"it never got to step {step}: {self.end()}")

    def end(self) -> str:
        return self.process.communicate(timeout=240)[0]


def command_lines() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


def test_a_run_on_its_own_ray_is_stopped_and_resumes_on_a_cluster(
    directory: Path, address: str, launch_reference: list[float]
) -> None:
    (command,) = launching_page.commands("Ray")
    env = {**launching_page.environment(), "WANDB_API_KEY": SECRET * 4, "HF_TOKEN": f"hf_{SECRET}"}
    env.pop("RAY_ADDRESS", None)
    more = ["train.steps=100000", "checkpoint.every=50000", "--run-dir", "run"]
    started = Started(directory, [*command.split(), *more], env)
    started.at_step(2)
    assert [line for line in command_lines() if SECRET in line] == []
    started.process.send_signal(signal.SIGTERM)
    said = started.end()
    assert started.process.returncode == 75, said
    assert [line for line in command_lines() if str(started.run) in line] == [], "workers stayed"
    stopped = len(launching_page.losses(started.run / "metrics.jsonl"))

    resume = f"toolkit resume run train.steps={stopped + 2} --launcher ray"
    _, again = launching_page.run(resume, directory, {**env, "RAY_ADDRESS": address})
    losses = launching_page.losses(started.run / "metrics.jsonl")[: len(launch_reference)]
    assert len(losses) >= 4
    assert losses == launch_reference[: len(losses)]
    assert "nodes: 2" in (started.run / "recipe.yaml").read_text(), "a bundle of one CPU on each node"
    assert SECRET not in said + again
    logs = Path(ray_cluster_logs())
    files = [path for place in (directory, logs) for path in place.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def ray_cluster_logs() -> str:
    """Session directory of the newest Ray cluster on this machine."""
    return str(Path("/tmp/ray/session_latest").resolve() / "logs")  # noqa: S108


def test_a_rank_that_dies_is_named_and_its_devices_are_given_back(directory: Path, address: str) -> None:
    env = {**launching_page.environment(), "RAY_ADDRESS": address}
    argv = [*TOOLKIT, "train", "recipe.yaml", "train.steps=100000", "--launcher", "ray", "--run-dir", "run"]
    started = Started(directory, argv, env)
    os.kill(started.at_step(2)[1].pid, signal.SIGKILL)
    said = started.end()
    assert started.process.returncode == 4, said
    assert "rank 1 on " in said
    assert "was ended by SIGKILL at step" in said
    assert [line for line in command_lines() if str(started.run) in line] == [], "workers stayed"


@pytest.fixture
def joined(address: str, monkeypatch: pytest.MonkeyPatch, directory: Path) -> Iterator[None]:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.chdir(directory)
    yield
    ray.shutdown()


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["train", "recipe.yaml", "--launcher", "ray", *argv]) == 2
    assert not Path("runs").exists()
    return capsys.readouterr().err


@pytest.mark.usefixtures("joined")
def test_what_a_cluster_lacks_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "3 processes given; the Ray cluster has 1 CPU on " in refusal(capsys, "--nproc", "3")
    told = refusal(capsys, "cluster={device: cpu, nodes: 1, devices_per_node: 2}")
    assert "2 CPU on one node are needed; the Ray cluster has 1 CPU on " in told
    ray_cluster.connect(os.environ["RAY_ADDRESS"])
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU") != 2:  # earlier runs have given everything back
        assert time.monotonic() < deadline
        time.sleep(0.1)
    other_job = placement_group([{"CPU": 1}])
    assert other_job.wait(60)
    monkeypatch.setattr(ray_cluster, "PLACE_SECONDS", 1.0)
    assert "of which 1 are free after 1 s; wait for other jobs" in refusal(capsys, "--nproc", "2")


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("127.0.0.1:1", "no Ray cluster at '127.0.0.1:1': [Errno 111] Connection refused; start one"),
        ("ray://127.0.0.1:10001", "a Ray Client address; run this command on a node of the cluster"),
        ("$(touch CANARY)", "HOST:PORT or `auto`"),
    ],
)
def test_addresses(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    address: str,
    told: str,
) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert told in refusal(capsys, "--nproc", "2")


def test_refusals_before_ray_is_asked(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    Path("hosts").write_text("one slots=2\n")
    assert "ray excludes --hostfile" in refusal(capsys, "--hostfile", "hosts")
    told = refusal(capsys, "cluster={device: cpu, nodes: 2, devices_per_node: 1}")
    assert "RAY_ADDRESS: is not set, so Ray would run on this host alone; the plan has 2 nodes" in told
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else real(name))
    assert "pip install 'zero-toolkit[ray]'" in refusal(capsys, "--nproc", "2")


def test_the_nodes_of_a_cluster_are_planned_for() -> None:
    head = RayNode(name="head", cpus=8)
    large = [RayNode(name=f"n{number}", cpus=64, gpus=8, kind="H100") for number in range(3)]
    half = RayNode(name="half", cpus=64, gpus=4, kind="H100")
    every = section_of([head, *large], None)
    assert (every.device, every.nodes, every.devices_per_node) == ("H100-SXM5-80GB", 3, 8)
    for nproc, shape in {4: (1, 4), 8: (1, 8), 12: (2, 6), 16: (2, 8), 18: (3, 6)}.items():
        found = section_of([head, *large, half], nproc)
        assert (found.nodes, found.devices_per_node) == shape
    cpus = section_of([head, RayNode(name="other", cpus=8)], None)
    assert (cpus.device, cpus.nodes, cpus.devices_per_node) == ("cpu", 2, 8)
    for nodes, nproc in (([*large, half], None), (large, 25), (large, 17), ([RayNode(name="x", cpus=1, gpus=1)], 1)):
        with pytest.raises(BadInput):
            section_of(nodes, nproc)
