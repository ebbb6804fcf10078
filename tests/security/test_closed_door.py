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
    """A run of two processes under a launcher, with its first step done."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe_mapping))
    run = tmp_path / "run"
    command = [sys.executable, "-m", "toolkit.cli", "train", str(tmp_path / "recipe.yaml"), "train.steps=1000000"]
    process = subprocess.Popen([*command, "--nproc", "2", "--launcher", request.param, "--run-dir", str(run)])
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


def test_another_user_finds_a_closed_door(running: psutil.Process) -> None:
    family = [running, *running.children(recursive=True)]
    doors = {c.laddr for each in family for c in each.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert len(doors) > 2, "a store and gloo's sockets"
    assert {door.ip for door in doors} == {"127.0.0.1"}
    targets = [f"{address}:{door.port}" for address in own_addresses() for door in doors]
    assert targets, "this host needs an address besides loopback"
    assert strangers_way_in(targets) == []
    some = next(iter(doors))
    assert strangers_way_in([f"127.0.0.1:{some.port}"]) == [f"127.0.0.1:{some.port}"], "the stranger can connect at all"


def strangers_way_in(targets: list[str]) -> list[str]:
    """The targets to which a process of another user can connect."""
    uid = NOBODY if os.getuid() == 0 else None
    command = ["/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable, "-c", STRANGER, *targets]
    done = subprocess.run(command, user=uid, cwd="/", capture_output=True, text=True, check=True, timeout=300)
    return done.stdout.split()


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
