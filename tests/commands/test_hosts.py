"""`--hostfile`: real runs over ssh between hosts with their own networks, names and processes."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from benchmarks.harness.hosts import Hosts, why_not
from benchmarks.harness.slow_link import move_into
from tests.conftest import Trainer
from tests.helpers import launching_page
from toolkit.launching.private_network import NETWORK
from toolkit.recipe.file import dump_recipe, load_recipe
from toolkit.run_dir import heartbeat
from toolkit.runtime.hosts.agent import SILENCE_SECONDS
from toolkit.runtime.supervision.warm_pool import enter_worker

reason = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(reason), reason=reason)]
TOOLKIT = [sys.executable, "-m", "toolkit.cli"]
SECRET = "planted-7a1f9c"  # noqa: S105
LONGEST_SECONDS = 4 * SILENCE_SECONDS
RESTART_SECONDS = 10
"""Time to check the remaining hosts and plan for them."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("hosts"), 3) as made:
        yield made


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return launching_page.workspace(tmp_path) / "recipe.yaml"


def run(hosts: Hosts, *argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, env={**hosts.env, **(env or {})}, capture_output=True, text=True, timeout=300)


def assert_clean(hosts: Hosts, *which: int) -> None:
    for index in which:
        assert hosts.processes(index) == [], f"workers stayed on host {index}"


DEEPER = ("model.config.num_hidden_layers=6", "train.global_batch=12", "train.steps=3")
STRATEGIES = {
    "zero": "{name: zero, zero_stage: 2}",
    "pipeline": "{name: pipeline, pp: 6, micro_batch: 2}",
    "hybrid": "{name: hybrid, pp: 3, tp: 2, micro_batch: 2}",
}


@dataclass(frozen=True)
class OnHosts:
    """Enters warm workers into the networks of hosts, two per host."""

    spaces: tuple[str, ...]
    first: str

    def __call__(self, argv: tuple[str, ...], env: dict[str, str]) -> None:
        rank = int(env["RANK"])
        move_into(Path("/run/netns") / self.spaces[rank // 2])
        place = {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": self.first}
        enter_worker(argv, {**env, **place, NETWORK: ""})  # hosts have no private network in common


def test_three_hosts_train_as_one_process(hosts: Hosts, recipe: Path, tmp_path: Path, train: Trainer) -> None:
    one = train(*DEEPER, nproc=1)
    enter = OnHosts(tuple(hosts.space(index) for index in range(3)), hosts.addresses[0])
    for strategy in STRATEGIES.values():
        found = train(*DEEPER, f"strategy={strategy}", nproc=6, enter=enter)
        assert found.losses == pytest.approx(one.losses, rel=1e-5)
    recipe.write_text(dump_recipe(load_recipe(one.run.recipe)))
    done = run(
        hosts, *TOOLKIT, "train", str(recipe), f"strategy={STRATEGIES['hybrid']}",
        *("--hostfile", str(hosts.hostfile(2)), "--run-dir", str(tmp_path / "run")),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert launching_page.losses(tmp_path / "run" / "metrics.jsonl") == found.losses
    beats = heartbeat.read_all(tmp_path / "run" / "heartbeats")
    assert [beats[rank].host for rank in range(6)] == ["host-1"] * 2 + ["host-2"] * 2 + ["host-3"] * 2
    assert_clean(hosts, 0, 1, 2)


@pytest.fixture
def seen_secrets() -> Iterator[list[str]]:
    """Command lines on this machine that contained the planted secret while the test ran."""
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
    hosts: Hosts, recipe: Path, tmp_path: Path, seen_secrets: list[str], launch_reference: list[float]
) -> None:
    planted = {"WANDB_API_KEY": SECRET * 4, "HF_TOKEN": f"hf_{SECRET}", "NCCL_DEBUG": "WARN"}
    page = launching_page.environment()
    env = {**page, **planted, "PATH": f"{hosts.env['PATH']}:{page['PATH']}"}
    shutil.copy(hosts.hostfile(1, 2), tmp_path / "hosts")
    mapping = yaml.safe_load(recipe.read_text())
    mapping["metrics"]["wandb"]["mode"] = "offline"
    recipe.write_text(yaml.safe_dump(mapping))
    for command in launching_page.commands("Many hosts"):
        found, said = launching_page.run(command.replace("node-1", hosts.addresses[0]), tmp_path, env)
        assert found == launch_reference[:3], command
        assert SECRET not in said
        assert ("not passed on to other hosts" in said) == command.endswith("--launcher deepspeed")
    assert seen_secrets == []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("wandb" in path.parts for path in files)
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert_clean(hosts, 0, 1)


class Started:
    """`toolkit train` over two hosts with one restart, which the test interferes with once it trains."""

    def __init__(self, hosts: Hosts, recipe: Path, path: Path) -> None:
        self.path = path
        argv = [*TOOLKIT, "train", str(recipe), "train.steps=100000", "checkpoint.every=2", "--max-restarts", "1"]
        argv += ["--hostfile", str(hosts.hostfile(1, 2)), "--run-dir", str(path)]
        self.process = subprocess.Popen(
            argv, env=hosts.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def at_step(self, step: int, ranks: int = 2, but: int = 0) -> int:
        """Wait until all ranks reach a step; return the process id of the last rank, which must not be `but`."""
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and self.process.poll() is None:
            beats = heartbeat.read_all(self.path / "heartbeats")
            if sorted(beats) == list(range(ranks)) and all(beat.step >= step for beat in beats.values()):
                pid = beats[ranks - 1].pid
                if pid != but:
                    return pid
            time.sleep(0.05)
        raise AssertionError(f"it never reached step {step}: {self.end()}")

    def end(self) -> str:
        return self.process.communicate(timeout=240)[0]


def test_hosts_that_are_lost_are_named_and_excluded(
    hosts: Hosts, recipe: Path, tmp_path: Path, launch_reference: list[float]
) -> None:
    """The network of one host fails and the other resumes alone. Then that one loses power."""
    started = Started(hosts, recipe, tmp_path / "run")
    started.at_step(3)
    hosts.unplug(1)
    since, cut = time.monotonic(), time.time()
    try:
        started.at_step(6, ranks=1)
        planned = (tmp_path / "run" / "plan.json").stat().st_mtime - cut  # named, then planned again
        assert 0 < planned < SILENCE_SECONDS + 10 + RESTART_SECONDS
        while hosts.processes(1) and time.monotonic() - since < LONGEST_SECONDS:
            time.sleep(0.2)
        assert_clean(hosts, 1)  # cut off from the controller, it ended its workers by itself
        hosts.power_off(0)
        since = time.monotonic()
        text = started.end()
        assert time.monotonic() - since < SILENCE_SECONDS + 10
    finally:
        hosts.plug(1)
        hosts.power_on(0)
    assert started.process.returncode == 4, text
    first, second = (text.index(f"host {hosts.addresses[index]} was lost: ") for index in (1, 0))
    assert first < text.index("with 1 processes; restarts left: 0") < second
    assert "it ran rank 1, at step" in text[first:second]
    assert "it ran rank 0, at step" in text[second:]
    assert "Traceback" not in text
    found = launching_page.losses(tmp_path / "run" / "metrics.jsonl")[: len(launch_reference)]
    assert found == pytest.approx(launch_reference[: len(found)], rel=1e-5)
    assert_clean(hosts, 0)


def test_a_rank_that_dies_is_named_and_a_request_to_stop_reaches_every_host(
    hosts: Hosts, recipe: Path, tmp_path: Path
) -> None:
    started = Started(hosts, recipe, tmp_path / "run")
    victim = started.at_step(3)
    hosts.kill(1, "toolkit.worker")
    started.at_step(6, but=victim)
    started.process.send_signal(signal.SIGTERM)
    text = started.end()
    assert "rank 1 on host-2 was ended by SIGKILL at step" in text
    assert "with 2 processes; restarts left: 0" in text
    assert started.process.returncode == 75, text
    assert_clean(hosts, 0, 1)


def test_hosts_that_do_not_answer_are_named_before_the_start(hosts: Hosts, recipe: Path, tmp_path: Path) -> None:
    absent = [hosts.addresses[0].rpartition(".")[0] + ".77", "no-such-host.invalid"]
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{name} slots=1\n" for name in (hosts.addresses[0], *absent)))
    done = run(hosts, *TOOLKIT, "train", str(recipe), "train.global_batch=12", "--hostfile", str(hostfile))
    assert done.returncode == 2
    assert all(f"  {name}: " in done.stderr for name in absent), done.stderr
    assert "Traceback" not in done.stderr
    assert f"  {hosts.addresses[0]}: " not in done.stderr
    assert not list(tmp_path.rglob("plan.json"))
    assert_clean(hosts, 0)
