"""The rendezvous of a local run is closed to the network: a stranger finds no door, under any launcher."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed
import yaml

from toolkit.runtime.distributed.process_group import JSON_LIMIT_BYTES, _checked
from toolkit.runtime.distributed.rendezvous import Meeting, listen_at, serve

pytestmark = pytest.mark.slow

TIMEOUT = datetime.timedelta(seconds=20)
NOBODY = 65534
ROOT = Path(__file__).parents[2]
PLANTED = ("psutil", "datasets", "transformers", "torch", "yaml", "deepspeed")
"""Modules in the current directory of a run: each would leave a mark, then break the run."""
ROUNDS = 5
"""How often a stranger's process tries every port."""
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


INTRUDER = """
import contextlib, pickle, socket, struct, sys
from concurrent.futures import ThreadPoolExecutor
class Payload:
    def __reduce__(self):
        return (open, (sys.argv[1], "w"))
def said(data):
    return struct.pack("<Q", len(data)) + data
# torch's protocol (2.13): a magic number, then 7 counts the keys and 1 sets one.
HELLO, COUNT, SET = b"\\0" + struct.pack("<I", 0x3C85F7CE), b"\\7", b"\\1" + said(b"/stranger") + said(b"was here")
def visit(port):
    store = False
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(port)), timeout=0.3) as door:
        door.sendall(HELLO + SET + COUNT)
        store = len(door.recv(8)) == 8
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(port)), timeout=0.3) as door:
        door.sendall(pickle.dumps(Payload()) * 100)
    return store
with ThreadPoolExecutor(64) as pool:
    visits = list(zip(sys.argv[3:] * int(sys.argv[2]), pool.map(visit, sys.argv[3:] * int(sys.argv[2]))))
print(*{port for port, store in visits if store})
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
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text("open('EXECUTED', 'w')\nraise SystemExit('the wrong module')\n")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe_mapping))
    run = tmp_path / "run"
    command = [sys.executable, "-P", "-m", "toolkit.cli", "train", "recipe.yaml", "train.steps=1000000"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("PYTHONSAFEPATH", None)
    words = [*command, "--nproc", "2", "--launcher", request.param, "--run-dir", "run"]
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
    family = [running, *running.children(recursive=True)]
    doors = {c.laddr for each in family for c in each.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert len(doors) > 1, "gloo's sockets"
    assert {door.ip for door in doors} == {"127.0.0.1"}
    targets = [f"{address}:{door.port}" for address in own_addresses() for door in doors]
    assert targets, "this host needs an address besides loopback"
    assert strangers_way_in(targets) == []
    some = next(iter(doors))
    assert strangers_way_in([f"127.0.0.1:{some.port}"]) == [f"127.0.0.1:{some.port}"], "the stranger can connect at all"


def test_another_user_reaches_no_store_and_ends_no_run(recipe_mapping: dict[str, Any], tmp_path: Path) -> None:
    """Fifty tries from the first moment of a run: count a store's keys, change one, send pickles to every port."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe_mapping))
    command = [sys.executable, "-m", "toolkit.cli", "train", str(tmp_path / "recipe.yaml"), "train.steps=400"]
    alone = tmp_path / "alone"
    assert subprocess.run([*command, "--nproc", "2", "--run-dir", str(alone)]).returncode == 0
    attacked, proof = tmp_path / "attacked", tmp_path / "proof"
    tmp_path.chmod(0o777)
    process = subprocess.Popen([*command, "--nproc", "2", "--run-dir", str(attacked)])
    tries = 0
    while process.poll() is None:
        ports = {door.port for door in open_doors(psutil.Process(process.pid))}
        tries += ROUNDS * bool(ports)
        assert stores_found(sorted(ports), proof) == []
    assert process.returncode == 0
    assert tries >= 50
    assert not proof.exists(), "a stranger's code ran"
    assert losses(attacked) == losses(alone)


def test_the_stranger_recognises_a_store(tmp_path: Path) -> None:
    """The attack above would find a store that listens."""
    store = serve("127.0.0.1", 0, TIMEOUT)
    assert stores_found([store.port], tmp_path / "proof") == [store.port]
    assert store.get("stranger") == b"was here"


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def open_doors(process: psutil.Process) -> set[Any]:
    """Addresses at which a process and its descendants listen now."""
    found = set()
    with contextlib.suppress(psutil.Error):
        for each in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                found |= {c.laddr for c in each.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return found


def stores_found(ports: list[int], proof: Path) -> list[int]:
    """The ports at which another user finds a store; every port gets a pickle that would create `proof`."""
    done = as_stranger(INTRUDER, [str(proof), str(ROUNDS), *map(str, ports)])
    return [int(port) for port in done.split()]


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
