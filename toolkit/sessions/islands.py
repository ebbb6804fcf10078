"""Start asynchronous islands: where they meet, what they must have in common, and their supervision."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from toolkit.errors import BadInput, Preempted, RankFailed, ToolkitError
from toolkit.launching import launchers
from toolkit.launching.launchers import Command
from toolkit.launching.stop_signals import StopRequest, forwarded
from toolkit.recipe.file import dump_recipe, make_recipe
from toolkit.recipe.sections import Recipe
from toolkit.recipe.yaml_file import parse_yaml
from toolkit.run_dir.async_islands import EXTRA, Membership, furthest, gather, write_island
from toolkit.run_dir.layout import RunDir
from toolkit.sessions.resolve import Resolved

if TYPE_CHECKING:
    from toolkit.sessions.hosts import LaunchOptions

UPDATES = "updates"
"""Folder of a run directory: the store of islands that all run on this host."""
JOB = "job"
"""Key of the store: the recipe of the job, for islands that join."""
CHECK_SECONDS = 10.0
"""How long a store may take to answer before anything is started."""


@dataclass(frozen=True)
class IslandOptions:
    """Which asynchronous islands this command starts, and where they exchange updates."""

    rendezvous: str | None = None
    """Address of the update store; None: a folder of the run directory."""
    key_file: Path | None = None
    """File with the key of that store."""
    island: int | None = None
    """The only island to start, counted from 0; None: all."""
    joins: bool = False
    """Whether the island joins a running job beyond the islands of its plan."""


class MeetingPlace(NamedTuple):
    """Where islands exchange updates, and the file with the secret that lets them in."""

    address: str
    key_file: str


def start_islands(resolved: Resolved, path: Path, options: LaunchOptions, console: Console) -> int:
    """Start the islands and supervise each; the run continues while at least one is left. Returns the exit code."""
    plan, chosen = resolved.chosen.plan, options.islands
    if options.launcher != "local" or options.hosts:
        what = (
            "asynchronous islands (train.outer.mode async) are started by toolkit itself; "
            "over several hosts, start one on each: toolkit train RECIPE --island K --mailbox ADDRESS --mailbox-key F"
        )
        raise BadInput("--hostfile" if options.hosts else "--launcher", what)
    if chosen.island is not None and not chosen.joins and not 0 <= chosen.island < plan.islands:
        raise BadInput("--island", f"{chosen.island} given; the plan has islands 0 to {plan.islands - 1}")
    meeting = None
    if chosen.rendezvous is not None and chosen.key_file is not None:
        meeting = MeetingPlace(chosen.rendezvous, str(chosen.key_file.resolve()))
        check_store(meeting, resolved)
    run = resolved.write(path, resuming=options.resuming)
    console.print(f"run directory: {path}", highlight=False, markup=False, soft_wrap=True)
    from toolkit.runtime.supervision.supervise import spawn

    with contextlib.ExitStack() as stack:
        islands = prepare_islands(resolved, run, meeting or stack.enter_context(local_store(run)), chosen.island)
        try:
            outcome = watch_islands(islands, console, options.max_restarts, spawn)
        except RankFailed:
            gather(run, plan.islands, "failed")
            raise
    gather(run, plan.islands, {0: "done", Preempted.exit_code: "preempted"}.get(outcome, "failed"))
    return outcome


@contextlib.contextmanager
def local_store(run: RunDir) -> Iterator[MeetingPlace]:
    """An update store for islands of this host: a private folder of the run directory, with a secret of its own."""
    from toolkit.runtime.islands.store_access import ISLANDS_KEY, new_key

    folder = run.path / UPDATES
    shutil.rmtree(folder, ignore_errors=True)  # of a start that was killed
    folder.mkdir(mode=0o700)
    try:
        new_key().write(folder / ISLANDS_KEY)
        yield MeetingPlace((folder / "store").resolve().as_uri(), str((folder / ISLANDS_KEY).resolve()))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_store(meeting: MeetingPlace, resolved: Resolved) -> None:
    """Refuse a store that can't be reached, does not know the secret, or belongs to islands of another recipe."""
    from toolkit.runtime.islands.signed_store import SignedStore
    from toolkit.runtime.islands.store_access import read_key
    from toolkit.runtime.islands.transports import open_transport

    key = read_key(meeting.key_file)
    own = shared_settings(resolved)
    try:
        store = SignedStore(open_transport(meeting.address, key, CHECK_SECONDS), key)
        store.create("recipe", json.dumps(own).encode())
        store.create(JOB, json.dumps(dump_recipe(resolved.recipe)).encode())
        found = store.read("recipe", {})
    except RankFailed as error:
        raise BadInput("--mailbox", str(error)) from None
    differing = sorted(name for name in {*own, *found} if own.get(name) != found.get(name))
    if differing:
        shown = "; ".join(f"{name} is {own.get(name)} here and {found.get(name)} there" for name in differing[:8])
        raise BadInput("--mailbox", f"{meeting.address} belongs to islands of another recipe: {shown}")


class Joining(NamedTuple):
    """What `toolkit train --join` starts with."""

    recipe: Recipe
    nproc: int | None
    options: IslandOptions


def join_job(options: IslandOptions, overrides: Sequence[str], ranks: int | None = None) -> Joining:
    """Read the recipe of a running job from its store and take a place among its islands.

    `ranks`: of this island, which may have more or fewer than the others; default: one, or as the cluster says.

    Code that the recipe names (`metrics.sinks`, `model.trust_remote_code`) was typed on another host: it runs here only
    if it is typed here, too.
    """
    from toolkit.runtime.islands.signed_store import SignedStore
    from toolkit.runtime.islands.store_access import read_key
    from toolkit.runtime.islands.transports import open_transport

    assert options.rendezvous is not None
    assert options.key_file is not None
    key = read_key(options.key_file)
    try:
        store = SignedStore(open_transport(options.rendezvous, key, CHECK_SECONDS), key)
        text, settings = store.read(JOB), store.read("recipe", {})
    except RankFailed as error:
        raise BadInput("--join", str(error)) from None
    if not isinstance(text, str):
        raise BadInput("--join", f"{options.rendezvous} holds no job; start its first island with --island 0 --mailbox")
    source = f"the recipe in {options.rendezvous}"
    given = parse_yaml(text, source)
    here = ["output=runs", "checkpoint.resume=auto", "metrics.sinks=[]", *overrides]
    recipe = make_recipe(given, here, source=source)
    typed = [override.partition("=")[0].strip() for override in overrides]
    if recipe.model.trust_remote_code and "model.trust_remote_code" not in typed:
        what = f"true in {source}: Python code of the model would run here; if you trust it, add "
        raise BadInput("model.trust_remote_code", f"{what}model.trust_remote_code=true")
    number = settings["strategy.islands"] + store.number(EXTRA, 1) - 1
    total = settings["strategy.islands"] * (ranks or 1) if recipe.cluster == "auto" else None
    return Joining(recipe, total, replace(options, island=number, joins=True))


def shared_settings(resolved: Resolved) -> dict[str, Any]:
    """What must be equal on all islands: key → value. Where data and checkpoints lie may differ."""
    recipe, plan = resolved.recipe, resolved.chosen.plan
    sections = {"model": asdict(recipe.model), "train": asdict(recipe.train), "data": asdict(recipe.data)}
    own = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    for key in ("model.path", "data.path", "train.hang_timeout_seconds"):
        own.pop(key, None)
    axes = {f"strategy.{axis}": getattr(plan, axis) for axis in ("islands", "local_steps")}
    return dict(json.loads(json.dumps({**own, **axes})))


def prepare_islands(
    resolved: Resolved, run: RunDir, meeting: MeetingPlace, only: int | None = None
) -> list[LaunchedIsland]:
    """Write the run directory of each island that starts here.

    The island whose checkpoint is furthest is the founder: all begin with its state.
    """
    plan, backend = resolved.chosen.plan, resolved.job.cluster.device.backend
    numbers = range(plan.islands) if only is None else [only]
    founder = furthest(run, plan.islands) if only is None else 0
    islands = []
    for number in numbers:
        membership = Membership(meeting.address, meeting.key_file, number, plan.islands, founder)
        first = number * plan.dp if only is None else 0
        own = write_island(run, number, alone=only is not None)
        commands = _commands(own, membership, plan.dp, first, len(numbers) * plan.dp, backend)
        islands.append(LaunchedIsland(number, run.island(number), commands, resolved.recipe.train.hang_timeout_seconds))
    return islands


def _commands(
    run: RunDir, membership: Membership, ranks: int, first_local: int, local_size: int, backend: str
) -> list[Command]:
    """Return the workers of one island: a process group of their own, on devices that no other island uses."""
    made = launchers.commands("local", run.path, ranks, backend)
    env = {**membership.env(), "LOCAL_WORLD_SIZE": str(local_size)}
    return [
        replace(command, env={**command.env, **env, "LOCAL_RANK": str(first_local + (command.rank or 0))})
        for command in made
    ]


@dataclass
class LaunchedIsland:
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

    def keep(self, console: Console, restarts: int, spawn: Callable[[Command], Any], stop: StopRequest) -> None:
        """Run the island; restart it after a failure, at most `restarts` times."""
        from toolkit.runtime.supervision.supervise import run_all

        for left in range(restarts, -1, -1):
            try:
                self.code = run_all(self.commands, self.run, self.timeout_seconds, spawn, stop=stop)
                return
            except RankFailed as error:
                self.error = error
                if error.stopped:
                    return
                what = f"is restarted; restarts left: {left - 1}" if left else "has left; the other islands continue"
                console.print(f"island {self.number} {what}\n{error}", highlight=False, markup=False)


def watch_islands(
    islands: Sequence[LaunchedIsland], console: Console, restarts: int, spawn: Callable[[Command], Any]
) -> int:
    """Run all islands to their ends and return the exit code of the run; raise if every island failed."""
    stop = StopRequest()
    with forwarded(stop.record):
        for island in islands:
            island.thread = threading.Thread(target=island.keep, args=(console, restarts, spawn, stop), daemon=True)
            island.thread.start()
        while any(island.thread.is_alive() for island in islands):
            for island in islands:
                island.thread.join(0.1)
            # An exit code above 0 is an end that a restart would not change, such as bad data: stop the others, too.
            # An island that was asked to stop has handed its round back, and the others continue.
            if not stop.signal and any(island.code not in (None, 0, Preempted.exit_code) for island in islands):
                stop.record(signal.SIGTERM)
    codes = [island.code for island in islands if island.code is not None]
    if not codes:
        errors = [island.error for island in islands if island.error is not None]
        raise errors[0] if errors else RankFailed("no island could be started")
    # Whoever ends with 0 has seen the end of the run, even if others were asked to stop before.
    return next((code for code in codes if code not in (0, Preempted.exit_code)), min(codes))
