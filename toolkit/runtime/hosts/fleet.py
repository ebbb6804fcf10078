"""Several hosts under one controller: an agent on each, and a diagnosis if a host or one of its ranks is lost."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from toolkit import errors
from toolkit.errors import BadInput, HostLost, Problem, RankFailed
from toolkit.launching import environment, launchers
from toolkit.launching.launchers import Node
from toolkit.launching.stop_signals import forwarded
from toolkit.run_dir import heartbeat
from toolkit.run_dir.layout import RunDir
from toolkit.runtime.hosts import agent
from toolkit.runtime.hosts.agent import SILENCE_SECONDS
from toolkit.runtime.hosts.agent_link import HostLink
from toolkit.runtime.supervision.supervise import GRACE_SECONDS, POLL_SECONDS

ANSWER_SECONDS = 30.0
"""Time to connect and to start Python on the host."""
LEAVE_SECONDS = 8.0
"""Time for hosts to end their workers after the connection is closed."""


class Fleet:
    """Hosts with one agent each. Leaving the context ends every worker."""

    def __init__(self, links: Sequence[HostLink], source: str) -> None:
        self._links = links
        self._source = source
        """The command-line option that named the hosts."""
        self._stopped = False

    def __enter__(self) -> Fleet:
        try:
            self._greet()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def node(self, index: int) -> Node:
        """A host's part of the run; the rendezvous is on the first host."""
        first = self._links[0]
        return Node(
            processes=len(first.host.slots),
            port=first.hello["port"],
            address=first.address,
            index=index,
            count=len(self._links),
        )

    def check(self, backend: str) -> None:
        """`BadInput` if a host lacks devices, or has other software versions than this one."""
        ours = agent.greeting()
        problems = [p for link in self._links for p in _differences(link, ours, backend)]
        if problems:
            raise BadInput(self._source, problems)

    def run(self, launcher: str, run: RunDir, backend: str, hang_timeout_seconds: float) -> int:
        """Start the workers of every host and wait; return 0 or a documented exit code."""
        shutil.rmtree(run.heartbeats, ignore_errors=True)
        path = run.path.resolve()
        shared = {
            "run_dir": str(path),
            "directory": str(Path.cwd()),
            "fingerprint": agent.fingerprint(run),
            "hang_timeout_seconds": hang_timeout_seconds,
        }
        exports = environment.exported(environment.environment())
        with forwarded(self._forward):
            for index, link in enumerate(self._links):
                node = self.node(index)
                env = {**exports, **link.env}
                commands = [asdict(c) for c in launchers.commands(launcher, path, node.processes, backend, node)]
                link.send(order={**shared, "env": env, "commands": commands})
            try:
                return self._watch(run)
            except RankFailed as error:
                error.stopped = self._stopped
                raise

    def close(self) -> None:
        """Close all connections; agents then end their workers and themselves."""
        for link in self._links:
            link.hang_up()
        deadline = time.monotonic() + LEAVE_SECONDS
        for link in self._links:
            link.leave(max(0.0, deadline - time.monotonic()))

    def _greet(self) -> None:
        """Wait until every host has answered; `BadInput` names all that have not."""
        deadline = time.monotonic() + ANSWER_SECONDS
        _until(lambda: all(link.hello or link.closed for link in self._links), deadline)
        problems = [Problem(link.host.name, link.reason()) for link in self._links if not link.hello]
        if problems:
            raise BadInput("hosts that can't be used", problems)

    def _watch(self, run: RunDir) -> int:
        while True:
            self._check_refusals()
            self._check_lost(run)
            if any(link.end and link.end["code"] for link in self._links):
                return self._verdict(run)
            if all(link.end for link in self._links):
                return 0
            time.sleep(POLL_SECONDS)

    def _check_refusals(self) -> None:
        refused = [Problem(link.host.name, link.refused) for link in self._links if link.refused]
        if refused:
            time.sleep(GRACE_SECONDS)  # often all hosts refuse: wait for the others
            raise BadInput("hosts", [Problem(link.host.name, link.refused) for link in self._links if link.refused])

    def _check_lost(self, run: RunDir) -> None:
        lost = [link for link in self._links if link.is_lost(SILENCE_SECONDS)]
        if lost:
            processes = len(lost[0].host.slots)
            text = "\n".join(_lost(link, self._links.index(link) * processes, run) for link in lost)
            raise HostLost(text, [link.host.name for link in lost])

    def _verdict(self, run: RunDir) -> int:
        """Report what failed first: a lost host, else the rank that did not merely lose another."""
        beats = heartbeat.read_all(run.heartbeats).values()
        by_itself = any(beat.exit_code and not beat.lost_others for beat in beats)
        # Ranks that lost another rank report that before its host's silence is noticed: wait for a lost host first.
        seconds = GRACE_SECONDS if by_itself else SILENCE_SECONDS + GRACE_SECONDS
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not all(link.end for link in self._links):
            self._check_lost(run)
            time.sleep(POLL_SECONDS)
        self._check_lost(run)
        ends = [(link, link.end) for link in self._links if link.end and link.end["code"]]
        for _, end in ends:
            if not end["text"]:  # the workers have reported it themselves
                return int(end["code"])
        # The host of the rank that failed knows most; hosts whose ranks only lost another rank are witnesses.
        _, end = min(ends, key=lambda one: self._is_witness(one[0], run))
        raise getattr(errors, end["kind"], RankFailed)(end["text"])

    def _is_witness(self, link: HostLink, run: RunDir) -> bool:
        beats = heartbeat.read_all(run.heartbeats)
        first = self._links.index(link) * len(link.host.slots)
        own = [beats[rank] for rank in range(first, first + len(link.host.slots)) if rank in beats]
        return bool(own) and all(beat.lost_others for beat in own)

    def _forward(self, number: signal.Signals) -> None:
        """Forward a signal to every host, so that its workers save."""
        self._stopped = True
        for link in self._links:
            link.send(signal=int(number))


def _differences(link: HostLink, ours: Mapping[str, Any], backend: str) -> Iterator[Problem]:
    name, theirs = link.host.name, link.hello
    if backend != "cpu" and theirs["accelerators"] <= max(link.host.slots):
        yield Problem(name, f"slot {max(link.host.slots)} given; it has {theirs['accelerators']} devices")
    if theirs["python"] != ours["python"]:
        yield Problem(name, f"Python {theirs['python']}, here {ours['python']}; use the same environment on all hosts")
    for package, version in ours["versions"].items():
        if theirs["versions"][package] != version:
            what = f"{package} {theirs['versions'][package]}, here {version}; use the same environment on all hosts"
            yield Problem(name, what)


def _lost(link: HostLink, first_rank: int, run: RunDir) -> str:
    beats = heartbeat.read_all(run.heartbeats)
    ranks = range(first_rank, first_rank + len(link.host.slots))
    steps = [beats[rank].step for rank in ranks if rank in beats]
    where = f", at step {min(steps)}" if steps else ""
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    return f"host {link.host.name} was lost: {link.reason()}; it ran {which}{where}"


def _until(done: Callable[[], bool], deadline: float) -> None:
    while not done() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
