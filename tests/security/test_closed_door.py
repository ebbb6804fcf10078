"""The rendezvous of a local run is closed to the network: a stranger finds no door, under any launcher."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed
import yaml

from benchmarks.harness import stranger
from toolkit.launching import private_network
from toolkit.launching.launchers import import_path
from toolkit.runtime.distributed.process_group import JSON_LIMIT_BYTES, _checked
from toolkit.runtime.distributed.rendezvous import Meeting, listen_at, serve

pytestmark = pytest.mark.slow

TIMEOUT = datetime.timedelta(seconds=20)
NOBODY = 65534
ROOT = Path(__file__).parents[2]
PLANTED = ("psutil", "datasets", "transformers", "torch", "yaml", "deepspeed")
"""Modules in the current directory of a run: each would leave a mark, then break the run."""
STRANGER = """
import socket, sys
opened = []
for target in sys.argv[1:]:
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
        opened.append(target)
    except OSError:
        pass
print(*opened)
"""


def test_the_store_is_where_it_was_told_to_be() -> None:
    store = serve("127.0.0.1", 0, TIMEOUT)
    assert listening(os.getpid(), store.port) == ["127.0.0.1"]
    other = torch.distributed.TCPStore("127.0.0.1", store.port, None, False, TIMEOUT, False)
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_agents_may_count_restarts_differently() -> None:
    """torchrun's agents on two hosts do; a store of rank 0 is new in every attempt."""
    port = free_port()
    stores = [
        Meeting(host="127.0.0.1", port=port, attempt=str(rank)).open(rank, 2, TIMEOUT, several_hosts=False, say=print)
        for rank in (0, 1)
    ]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"


def test_a_port_that_is_taken_is_an_error_and_not_another_address() -> None:
    with listen_at("127.0.0.1", 0) as taken:
        meeting = Meeting(host="127.0.0.1", port=taken.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            meeting.open(0, 1, TIMEOUT, several_hosts=False, say=print)


def test_an_address_of_another_host_opens_all_and_says_so() -> None:
    said: list[str] = []
    port = free_port()
    store = Meeting(host="198.51.100.7", port=port)
    with contextlib.suppress(torch.distributed.DistError):  # nobody reaches that address from here
        store.open(0, 1, datetime.timedelta(seconds=1), several_hosts=True, say=said.append)
    assert len(said) == 1
    assert f"listens on ALL addresses of {socket.gethostname()}, port {port}" in said[0]


def test_lengths_are_checked_before_memory_is_taken() -> None:
    for length in (0, -1, JSON_LIMIT_BYTES + 1, 2**62):
        with pytest.raises(ValueError, match="bytes between ranks"):
            _checked(length)


@pytest.fixture(params=["local", "deepspeed", "torchrun", "accelerate"])
def running(request: pytest.FixtureRequest, recipe_mapping: dict[str, Any], tmp_path: Path) -> Iterator[psutil.Process]:
    """A run of two processes under a launcher, with its first step done, in a directory of planted modules."""
    with training(recipe_mapping, tmp_path, request.param) as process:
        yield process


@contextlib.contextmanager
def training(recipe_mapping: dict[str, Any], tmp_path: Path, launcher: str, **more: str) -> Iterator[psutil.Process]:
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text("open('EXECUTED', 'w')\nraise SystemExit('the wrong module')\n")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe_mapping))
    run = tmp_path / "run"
    command = [sys.executable, "-P", "-m", "toolkit.cli", "train", "recipe.yaml", "train.steps=1000000"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    env.pop("PYTHONSAFEPATH", None)
    words = [*command, "--nproc", "2", "--launcher", launcher, "--run-dir", "run"]
    process = subprocess.Popen(words, cwd=tmp_path, env=env)
    try:
        deadline = time.monotonic() + 240
        while not ((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size):
            assert process.poll() is None, "the run has ended"
            assert time.monotonic() < deadline, "training never began"
            time.sleep(0.1)
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 75
    assert not (tmp_path / "EXECUTED").exists(), "a module of the current directory was imported"


def test_another_user_finds_a_closed_door(running: psutil.Process) -> None:
    """No socket that anybody else can see; gloo's are at the loopback of a private network."""
    family = [running, *running.children(recursive=True)]
    doors = open_doors(family)
    if has_private_network():
        assert doors == set()
        assert {door.partition(":")[0] for door in hidden_doors(family)} == {"0100007F"}, "gloo's sockets"
    else:
        check_that_only_loopback_is_open(doors)


def test_without_a_private_network_loopback_alone_is_open(recipe_mapping: dict[str, Any], tmp_path: Path) -> None:
    with training(recipe_mapping, tmp_path, "local", GLOO_SOCKET_IFNAME="lo") as process:
        check_that_only_loopback_is_open(open_doors([process, *process.children(recursive=True)]))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_runs_no_code_and_ends_no_run() -> None:
    """Every attack once; the benchmark has a network of its own, so that other runs on this host are left alone."""
    command = [sys.executable, "-m", "benchmarks.intruder", "--tries", "8", "--steps", "12"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 tries: 0 executed code, 0 ended or changed a run" in done.stdout


def test_the_stranger_recognises_a_store(tmp_path: Path) -> None:
    """The attack above would find a store that listens, and change it."""
    store = serve("127.0.0.1", 0, TIMEOUT)
    visit = stranger.Visit(str(tmp_path / "proof"))
    stranger.store(visit, store.port)
    assert visit.counts["stores"] == 1
    assert store.get("default_pg/0//cpu//0/rank_0") == visit.pickled


def test_the_stranger_finds_an_open_door() -> None:
    with listen_at("127.0.0.1", 0) as door:
        assert door.getsockname()[1] in stranger.doors(os.getuid())


def test_without_rights_there_is_a_private_network_too(tmp_path: Path) -> None:
    """The way of users that are not root: a user namespace, without any capability in the worker."""
    with ExitStack() as held:
        try:
            opened = private_network._ask_helper({**os.environ, **import_path()})
        except OSError:
            pytest.skip("this host allows no user namespaces")
        for descriptor in opened:
            held.callback(os.close, descriptor)
        env = {private_network.NETWORK: ":".join(f"/proc/{os.getpid()}/fd/{each}" for each in opened)}
        done = subprocess.run([sys.executable, "-c", INSIDE], env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["127.0.0.1", "hidden", "0" * 16, str(os.getuid())]


INSIDE = """
import os, socket
from pathlib import Path
from toolkit.launching import private_network
network = private_network.enter(os.environ)
door = network.call(socket.create_server, ("127.0.0.1", 0))
address, port = door.getsockname()
try:
    socket.create_connection((address, port), timeout=2)
    seen = "seen"
except OSError:
    seen = "hidden"
capabilities = Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0]
print(address, seen, capabilities, os.getuid())
"""


def has_private_network() -> bool:
    with private_network.private_network({**os.environ, **import_path()}) as variables:
        return bool(variables)


def open_doors(family: list[psutil.Process]) -> set[Any]:
    """Addresses at which the processes listen in the network of this host."""
    return {c.laddr for each in family for c in each.net_connections("inet") if c.status == psutil.CONN_LISTEN}


def hidden_doors(family: list[psutil.Process]) -> set[str]:
    """Addresses at which somebody listens in the networks that threads of these processes have entered."""
    own = os.readlink("/proc/self/ns/net")
    tasks = [task for each in family for task in Path(f"/proc/{each.pid}/task").iterdir()]
    inside = [task for task in tasks if os.readlink(task / "ns/net") != own]
    rows = [line.split() for task in inside for line in (task / "net/tcp").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == stranger.LISTENS}


def check_that_only_loopback_is_open(doors: set[Any]) -> None:
    assert len(doors) > 1, "gloo's sockets"
    assert {door.ip for door in doors} == {"127.0.0.1"}
    targets = [f"{address}:{door.port}" for address in own_addresses() for door in doors]
    assert targets, "this host needs an address besides loopback"
    assert strangers_way_in(targets) == []
    some = next(iter(doors))
    assert strangers_way_in([f"127.0.0.1:{some.port}"]) == [f"127.0.0.1:{some.port}"], "the stranger can connect at all"


def strangers_way_in(targets: list[str]) -> list[str]:
    """The targets to which a process of another user can connect."""
    return as_stranger(STRANGER, targets).split()


def as_stranger(code: str, arguments: list[str]) -> str:
    """Output of Python code that another user runs; the same user's if this test has no right to change users."""
    uid = NOBODY if os.getuid() == 0 else None
    command = ["/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable, "-c", code, *arguments]
    return subprocess.run(command, user=uid, cwd="/", capture_output=True, text=True, check=True, timeout=300).stdout


def own_addresses() -> list[str]:
    """Addresses of this host at which the network reaches it."""
    found = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries if is_network(entry)]
    return found


def is_network(entry: Any) -> bool:
    return entry.family == socket.AF_INET and not entry.address.startswith("127.")


def listening(pid: int, port: int) -> list[str]:
    """Addresses at which a process listens on a port."""
    connections = psutil.Process(pid).net_connections("inet")
    return [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
