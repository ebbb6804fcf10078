"""Islands that never wait for one another: each a run of its own, watched by itself; one may leave and come back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from toolkit.errors import BadInput, Preempted, RankFailed, ToolkitError
from toolkit.launching import environment, launchers
from toolkit.launching.hostfile import Host
from toolkit.launching.launchers import Command, Node
from toolkit.launching.stop_signals import forwarded
from toolkit.run_dir.async_islands import Membership, furthest, gather, write_island
from toolkit.run_dir.layout import RunDir
from toolkit.sessions.resolve import Resolved

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class IslandArguments:
    """What of a run this command starts."""

    mailbox: tuple[str, int] | None = None
    """Where the islands meet; None: here."""
    island: int | None = None
    """The only one to start; None: all."""


def start(
    resolved: Resolved,
    path: Path,
    launcher: str,
    hosts: Sequence[Host],
    console: Console,
    part: IslandArguments,
    *,
    max_restarts: int,
    resuming: bool,
) -> int:
    """Start the islands and watch each; the run goes on while one is left. The exit code of the contract."""
    plan = resolved.chosen.plan
    if launcher != "local" or hosts:
        what = (
            "islands that do not wait for one another (train.outer.mode async) are started by toolkit itself; "
            "over several hosts start one on each: toolkit train RECIPE --island K --mailbox HOST:PORT"
        )
        raise BadInput("--hostfile" if hosts else "--launcher", what)
    if part.island is not None and not 0 <= part.island < plan.islands:
        raise BadInput("--island", f"{part.island} given; the plan has islands 0 to {plan.islands - 1}")
    run = resolved.write(path, resuming=resuming)
    console.print(f"run directory: {path}", highlight=False, soft_wrap=True)
    from toolkit.runtime.islands.async_store import serve
    from toolkit.runtime.supervision.supervise import spawn

    store: Any = None if part.mailbox else serve(LOOPBACK, 0)
    islands = prepare(resolved, run, part.mailbox or (LOOPBACK, int(store.port)), part.island)
    try:
        outcome = watch(islands, console, max_restarts, spawn)
    except RankFailed:
        gather(run, plan.islands, "failed")
        raise
    gather(run, plan.islands, {0: "done", Preempted.exit_code: "preempted"}.get(outcome, "failed"))
    return outcome


def prepare(resolved: Resolved, run: RunDir, mailbox: tuple[str, int], only: int | None = None) -> list[Island]:
    """The islands to start here, each with its own run directory; the furthest one's state is where all begin."""
    plan, backend = resolved.chosen.plan, resolved.job.cluster.device.backend
    numbers = range(plan.islands) if only is None else [only]
    founder = furthest(run, plan.islands) if only is None else 0
    islands = []
    for number in numbers:
        member = Membership(*mailbox, number, plan.islands, founder)
        first = number * plan.dp if only is None else 0
        commands = _commands(write_island(run, number), member, plan.dp, first, len(numbers) * plan.dp, backend)
        islands.append(Island(number, run.island(number), commands, resolved.recipe.train.hang_timeout_seconds))
    return islands


def _commands(
    run: RunDir, member: Membership, ranks: int, first_local: int, local_size: int, backend: str
) -> list[Command]:
    """The workers of one island: a world of their own, on devices that are not those of the others."""
    made = launchers.commands("local", run.path, ranks, backend, Node(processes=ranks, port=environment.free_port()))
    env = {**member.env(), "LOCAL_WORLD_SIZE": str(local_size)}
    return [
        Command(
            argv=command.argv,
            env={**command.env, **env, "LOCAL_RANK": str(first_local + (command.rank or 0))},
            rank=command.rank,
        )
        for command in made
    ]


@dataclass
class Island:
    """One of the runs."""

    number: int
    run: RunDir
    commands: list[Command]
    timeout_seconds: float
    code: int | None = None
    """How it ended; None: it runs, or has left."""
    error: ToolkitError | None = None
    """Why it has left."""
    thread: threading.Thread = field(default_factory=threading.Thread)

    def keep(self, console: Console, restarts: int, start: Callable[[Command], Any]) -> None:
        """Run; come back after a failure, as often as is allowed."""
        from toolkit.runtime.supervision.supervise import run_all

        for left in range(restarts, -1, -1):
            try:
                self.code = run_all(self.commands, self.run, self.timeout_seconds, start)
                return
            except RankFailed as error:
                self.error = error
                what = f"comes back; restarts left: {left - 1}" if left else "has left; the others go on"
                console.print(f"island {self.number} {what}\n{error}", highlight=False, markup=False)


def watch(islands: Sequence[Island], console: Console, restarts: int, start: Callable[[Command], Any]) -> int:
    """Run all of them to their ends; 0, or the exit code of the contract."""
    with forwarded(partial(_forward, islands)):
        for island in islands:
            island.thread = threading.Thread(target=island.keep, args=(console, restarts, start), daemon=True)
            island.thread.start()
        told = False
        while any(island.thread.is_alive() for island in islands):
            for island in islands:
                island.thread.join(0.1)
            if not told and any(island.code for island in islands):  # it has said why: the others stop, too
                told = True
                _forward(islands, signal.SIGTERM)
    codes = [island.code for island in islands if island.code is not None]
    if not codes:
        errors = [island.error for island in islands if island.error is not None]
        raise errors[0] if errors else RankFailed("no island could be started")
    return next((code for code in codes if code not in (0, Preempted.exit_code)), max(codes))


def _forward(islands: Sequence[Island], number: signal.Signals) -> None:
    """To the workers of all islands."""
    from toolkit.runtime.supervision.supervise import OwnWorkers, send_to_workers

    for island in islands:
        send_to_workers(OwnWorkers(island.commands, island.run).beats(), number)
