"""`--hostfile`: real runs over ssh between hosts with networks, names and processes of their own."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import launching_page
from tests.conftest import Trainer
from tests.hosts import Hosts, why_not
from toolkit import heartbeat
from toolkit.runtime.host_agent import SILENCE_SECONDS

reason = why_not()
pytestmark = pytest.mark.skipif(bool(reason), reason=reason)
TOOLKIT = [sys.executable, "-m", "toolkit.cli"]
SECRET = "planted-7a1f9c"  # noqa: S105
CRITICAL_SECONDS = SILENCE_SECONDS + 10


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("hosts"), 3) as made:
        yield made


@pytest.fixture
def recipe(recipe_mapping: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    mapping = {**recipe_mapping, "output": str(tmp_path / "runs")}
    mapping["model"]["config"]["num_hidden_layers"] = 6
    mapping["train"] |= {"global_batch": 12, "steps": 3}
    path.write_text(yaml.safe_dump(mapping))
    return path


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def run(hosts: Hosts, *argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, env={**hosts.env, **(env or {})}, capture_output=True, text=True, timeout=300)


def assert_clean(hosts: Hosts, *which: int) -> None:
    for index in which:
        assert hosts.processes(index) == [], f"workers stayed on host {index}"


@pytest.mark.parametrize(
    "strategy",
    [
        "{name: zero, zero_stage: 2}",
        "{name: pipeline, pp: 6, micro_batch: 2}",
        "{name: hybrid, pp: 3, tp: 2, micro_batch: 2}",
    ],
)
def test_three_hosts_train_as_one_process(
    hosts: Hosts, recipe: Path, tmp_path: Path, train: Trainer, strategy: str
) -> None:
    done = run(
        hosts, *TOOLKIT, "train", str(recipe), f"strategy={strategy}", "--hostfile", str(hosts.hostfile(2)),
        "--run-dir", str(tmp_path / "run"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    one = train("train.global_batch=12", "train.steps=3", "model.config.num_hidden_layers=6", nproc=1)
    assert losses(tmp_path / "run") == pytest.approx(one.losses, rel=1e-5)
    beats = heartbeat.read_all(tmp_path / "run" / "heartbeats")
    assert [beats[rank].host for rank in range(6)] == ["host-1"] * 2 + ["host-2"] * 2 + ["host-3"] * 2
    assert_clean(hosts, 0, 1, 2)


@pytest.fixture
def seen_secrets() -> Iterator[list[str]]:
    """Every command line of this machine, while the test runs, that has the planted secret in it."""
    found: list[str] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            found.extend(line for line in command_lines() if SECRET in line)

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield found
    ended.set()
    watcher.join()


def command_lines() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_text(errors="replace")


def test_every_command_of_the_page_gives_the_same_bits_and_shows_no_secret(
    hosts: Hosts, recipe: Path, tmp_path: Path, seen_secrets: list[str]
) -> None:
    planted = {"WANDB_API_KEY": SECRET * 4, "HF_TOKEN": f"hf_{SECRET}", "NCCL_DEBUG": "WARN"}
    page = launching_page.environment()
    env = {**page, **planted, "PATH": f"{hosts.env['PATH']}:{page['PATH']}"}
    shutil.copy(hosts.hostfile(1, 2), tmp_path / "hosts")
    mapping = yaml.safe_load(recipe.read_text())
    mapping["strategy"] = {"name": "zero", "zero_stage": 2, "micro_batch": 6}
    mapping["metrics"]["wandb"]["mode"] = "offline"
    recipe.write_text(yaml.safe_dump(mapping))
    found = {}
    for command in launching_page.commands("Many hosts"):
        found[command], said = launching_page.run(command.replace("node-1", hosts.addresses[0]), tmp_path, env)
        assert SECRET not in said
        assert ("not passed on to other hosts" in said) == command.endswith("--launcher deepspeed")
    first, *others = found.values()
    assert len(first) == 3
    assert all(values == first for values in others), found
    assert seen_secrets == []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("wandb" in path.parts for path in files)
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert_clean(hosts, 0, 1)


class Started:
    """`toolkit train` over two hosts, to be disturbed once it trains."""

    def __init__(self, hosts: Hosts, recipe: Path, path: Path, *more: str) -> None:
        self.path = path
        argv = [*TOOLKIT, "train", str(recipe), "strategy.name=zero", "train.schedule=constant", *more]
        argv += ["--hostfile", str(hosts.hostfile(1, 2)), "--run-dir", str(path)]
        self.process = subprocess.Popen(
            argv, env=hosts.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def at_step(self, step: int) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.process.poll() is None:
            beats = heartbeat.read_all(self.path / "heartbeats")
            if len(beats) == 2 and all(beat.step >= step for beat in beats.values()):
                return
            time.sleep(0.05)
        raise AssertionError(f"it never got to step {step}: {self.end()}")

    def end(self) -> str:
        return self.process.communicate(timeout=120)[0]


def test_a_host_whose_network_fails_is_named(hosts: Hosts, recipe: Path, tmp_path: Path) -> None:
    started = Started(hosts, recipe, tmp_path / "run", "train.steps=100000")
    started.at_step(2)
    hosts.unplug(1)
    try:
        since = time.monotonic()
        text = started.end()
        assert started.process.returncode == 4, text
        assert time.monotonic() - since < CRITICAL_SECONDS
        assert f"host {hosts.addresses[1]} was lost: " in text
        assert "it ran rank 1, at step" in text
        assert "Traceback" not in text
        assert_clean(hosts, 0)
        while hosts.processes(1) and time.monotonic() - since < 2 * CRITICAL_SECONDS:
            time.sleep(0.2)
        assert_clean(hosts, 1)  # it heard nothing any more, and ended its workers by itself
    finally:
        hosts.plug(1)


def test_a_host_that_dies_is_left_out_of_the_restart(
    hosts: Hosts, recipe: Path, tmp_path: Path, train: Trainer
) -> None:
    started = Started(hosts, recipe, tmp_path / "run", "train.steps=12", "checkpoint.every=2", "--max-restarts", "1")
    started.at_step(3)
    hosts.power_off(1)
    try:
        text = started.end()
        assert started.process.returncode == 0, text
        assert f"host {hosts.addresses[1]} was lost: " in text
        assert "with 1 processes; restarts left: 0" in text
        one = train(
            "train.global_batch=12", "train.steps=12", "train.schedule=constant", "model.config.num_hidden_layers=6",
            nproc=1,
        )  # fmt: skip
        assert losses(tmp_path / "run") == pytest.approx(one.losses, rel=1e-5)
        assert_clean(hosts, 0, 1)
    finally:
        hosts.power_on(1)


def test_a_rank_that_dies_on_a_host_is_named(hosts: Hosts, recipe: Path, tmp_path: Path) -> None:
    started = Started(hosts, recipe, tmp_path / "run", "train.steps=100000")
    started.at_step(2)
    hosts.kill(1, "toolkit.worker")
    text = started.end()
    assert started.process.returncode == 4, text
    assert "rank 1 on host-2 was ended by SIGKILL at step" in text
    assert_clean(hosts, 0, 1)


def test_a_request_to_stop_reaches_every_host(hosts: Hosts, recipe: Path, tmp_path: Path) -> None:
    started = Started(hosts, recipe, tmp_path / "run", "train.steps=100000", "checkpoint.every=50000")
    started.at_step(2)
    started.process.send_signal(signal.SIGTERM)
    text = started.end()
    assert started.process.returncode == 75, text
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    assert_clean(hosts, 0, 1)


def test_hosts_that_do_not_answer_are_named_before_the_start(hosts: Hosts, recipe: Path, tmp_path: Path) -> None:
    absent = [hosts.addresses[0].rpartition(".")[0] + ".77", "no-such-host.invalid"]
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{name} slots=1\n" for name in (hosts.addresses[0], *absent)))
    done = run(hosts, *TOOLKIT, "train", str(recipe), "--hostfile", str(hostfile))
    assert done.returncode == 2
    assert all(f"  {name}: " in done.stderr for name in absent), done.stderr
    assert "Traceback" not in done.stderr
    assert f"  {hosts.addresses[0]}: " not in done.stderr
    assert not (tmp_path / "runs").exists()
    assert_clean(hosts, 0)
