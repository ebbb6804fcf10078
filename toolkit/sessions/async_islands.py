"""Asynchronous islands: each a run of its own with its own supervisor. Islands may leave and rejoin at any time."""

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
from toolkit.launching.launchers import Command, Node
from toolkit.launching.stop_signals import forwarded
from toolkit.run_dir.async_islands import Membership, furthest, gather, write_island
from toolkit.run_dir.layout import RunDir
from toolkit.sessions.hosts import LaunchOptions
from toolkit.sessions.resolve import Resolved

LOOPBACK = "127.0.0.1"


def start(resolved: Resolved, path: Path, options: LaunchOptions, console: Console) -> int:
    """Start the islands and supervise each; the run continues while at least one is left. Returns the exit code."""
    plan, chosen = resolved.chosen.plan, options.islands
    if options.launcher != "local" or options.hosts:
        what = (
            "asynchronous islands (train.outer.mode async) are started by toolkit itself; "
            "over several hosts, start one on each: toolkit train RECIPE --island K --rendezvous HOST:PORT"
        )
        raise BadInput("--hostfile" if options.hosts else "--launcher", what)
    if chosen.island is not None and not 0 <= chosen.island < plan.islands:
        raise BadInput("--island", f"{chosen.island} given; the plan has islands 0 to {plan.islands - 1}")
    run = resolved.write(path, resuming=options.resuming)
    console.print(f"run directory: {path}", highlight=False, soft_wrap=True)
    from toolkit.runtime.islands.async_store import serve
    from toolkit.runtime.supervision.supervise import spawn

    store: Any = None if chosen.rendezvous else serve(LOOPBACK, 0)
    islands = prepare(resolved, run, chosen.rendezvous or (LOOPBACK, int(store.port)), chosen.island)
    try:
        outcome = watch(islands, console, options.max_restarts, spawn)
    except RankFailed:
        gather(run, plan.islands, "failed")
        raise
    gather(run, plan.islands, {0: "done", Preempted.exit_code: "preempted"}.get(outcome, "failed"))
    return outcome


def prepare(resolved: Resolved, run: RunDir, rendezvous: tuple[str, int], only: int | None = None) -> list[Island]:
    """Write the run directory of each island that starts here.

    The island whose checkpoint is furthest is the founder: all begin with its state.
    """
    plan, backend = resolved.chosen.plan, resolved.job.cluster.device.backend
    numbers = range(plan.islands) if only is None else [only]
    founder = furthest(run, plan.islands) if only is None else 0
    islands = []
    for number in numbers:
        membership = Membership(*rendezvous, number, plan.islands, founder)
        first = number * plan.dp if only is None else 0
        commands = _commands(write_island(run, number), membership, plan.dp, first, len(numbers) * plan.dp, backend)
        islands.append(Island(number, run.island(number), commands, resolved.recipe.train.hang_timeout_seconds))
    return islands


def _commands(
    run: RunDir, membership: Membership, ranks: int, first_local: int, local_size: int, backend: str
) -> list[Command]:
    """Return the workers of one island: a process group of their own, on devices that no other island uses."""
    made = launchers.commands("local", run.path, ranks, backend, Node(processes=ranks, port=environment.free_port()))
    env = {**membership.env(), "LOCAL_WORLD_SIZE": str(local_size)}
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
    """One island and the thread that supervises it."""

    number: int
    run: RunDir
    commands: list[Command]
    timeout_seconds: float
    code: int | None = None
    """Exit code; None while the island runs, and after it failed for the last time."""
    error: ToolkitError | None = None
    """The last failure, if there was one."""
    thread: threading.Thread = field(default_factory=threading.Thread)

    def keep(self, console: Console, restarts: int, start: Callable[[Command], Any]) -> None:
        """Run the island; restart it after a failure, at most `restarts` times."""
        from toolkit.runtime.supervision.supervise import run_all

        for left in range(restarts, -1, -1):
            try:
                self.code = run_all(self.commands, self.run, self.timeout_seconds, start)
                return
            except RankFailed as error:
                self.error = error
                what = f"is restarted; restarts left: {left - 1}" if left else "has left; the other islands continue"
                console.print(f"island {self.number} {what}\n{error}", highlight=False, markup=False)


def watch(islands: Sequence[Island], console: Console, restarts: int, start: Callable[[Command], Any]) -> int:
    """Run all islands to their ends and return the exit code of the run; raise if every island failed."""
    with forwarded(partial(_forward, islands)):
        for island in islands:
            island.thread = threading.Thread(target=island.keep, args=(console, restarts, start), daemon=True)
            island.thread.start()
        stopping = False
        while any(island.thread.is_alive() for island in islands):
            for island in islands:
                island.thread.join(0.1)
            # An exit code above 0 is an end that a restart would not change, such as bad data: stop the others, too.
            if not stopping and any(island.code for island in islands):
                stopping = True
                _forward(islands, signal.SIGTERM)
    codes = [island.code for island in islands if island.code is not None]
    if not codes:
        errors = [island.error for island in islands if island.error is not None]
        raise errors[0] if errors else RankFailed("no island could be started")
    return next((code for code in codes if code not in (0, Preempted.exit_code)), max(codes))


def _forward(islands: Sequence[Island], number: signal.Signals) -> None:
    """Send a signal to the workers of all islands."""
    from toolkit.runtime.supervision.supervise import OwnWorkers, send_to_workers

    for island in islands:
        send_to_workers(OwnWorkers(island.commands, island.run).beats(), number)
