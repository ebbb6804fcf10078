"""The worker process: the same under deepspeed, accelerate, torchrun, Slurm and a notebook.

    deepspeed --module toolkit.worker RECIPE [key=value ...]
    python -m toolkit.worker --run-dir DIR

Everything that it prints goes to `logs/rank-N.log`; only progress (rank 0) and failures reach the terminal.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

from toolkit.launching import private_network
from toolkit.launching.stop_signals import StopRequest, ignore

if __name__ == "__main__":
    EARLY = StopRequest()
    EARLY.listen()  # before the other imports: a stop request during start-up must not count as a failure

from toolkit.clusters.reader import of_nodes
from toolkit.errors import BadInput, RankFailed, ToolkitError
from toolkit.launching.environment import (
    PARENT,
    adopt_slurm,
    enter_device_environment,
    enter_processor_environment,
    enter_start_directory,
    free_port,
    nccl_settings,
    use_loopback,
)
from toolkit.recipe.file import load_recipe
from toolkit.recipe.sections import Recipe
from toolkit.resources import find_recipe
from toolkit.run_dir import layout, lock
from toolkit.run_dir.async_islands import Membership, goes_async
from toolkit.run_dir.layout import RunDir
from toolkit.sessions.preflight import check, prove
from toolkit.sessions.resolve import Resolved, proven, resolve

if TYPE_CHECKING:
    from toolkit.runtime.distributed.process_group import World
    from toolkit.runtime.supervision.heartbeat_thread import HeartbeatThread


class Terminal:
    """The streams that the process was started with, kept when output is sent to a log."""

    def __init__(self) -> None:
        self.out: IO[str] = sys.stdout
        self.err: IO[str] = sys.stderr

    def redirect(self, log: Path) -> None:
        """Send this process's output, native code's too, to the log."""
        log.parent.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        self.out = os.fdopen(os.dup(1), "w", buffering=1)
        self.err = os.fdopen(os.dup(2), "w", buffering=1)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)


@dataclass
class Rank:
    """This process as a rank: its streams, the request to stop, and the pulse once it knows its run directory."""

    number: int
    parent: int | None
    """The supervisor, if one watches; it then reports failures, with more to tell than one rank knows."""
    terminal: Terminal = field(default_factory=Terminal)
    stop: StopRequest = field(default_factory=StopRequest)
    pulse: HeartbeatThread | None = None
    held: ExitStack = field(default_factory=ExitStack)
    """The lock of the run directory, if no supervisor holds it."""

    def settle(self, run: RunDir) -> HeartbeatThread:
        """From here on: output to the log, a heartbeat in the run directory."""
        from toolkit.runtime.supervision.heartbeat_thread import HeartbeatThread

        self.terminal.redirect(run.log(self.number))
        self.pulse = HeartbeatThread(run.heartbeats, self.number, self.terminal.err, self.parent)
        self.pulse.start()
        return self.pulse

    def warn(self, text: str) -> None:
        """Tell the person at the terminal, wherever output goes."""
        print(text, file=self.terminal.err, flush=True)

    def end(self, code: int, error: str) -> int:
        """Tell the log and the supervisor how it ended."""
        if self.pulse is not None:
            with suppress(OSError):  # a full disk: the terminal is told below
                print(error, file=sys.stderr, flush=True)
            if not self.pulse.end(code, error) and code:
                self.warn(f"rank {self.number} failed: {error}")
        self.held.close()
        return code


def main(argv: Sequence[str] | None = None, stop: StopRequest | None = None) -> int:
    """Run as one rank; the exit code is the contract's. `stop` is listening already, if given."""
    args = _parser().parse_intermixed_args(argv)  # overrides may stand behind --run-dir, too
    enter_start_directory()
    enter_processor_environment()
    adopt_slurm()
    parent = os.environ.get(PARENT)
    rank = Rank(int(os.environ.get("RANK", 0)), int(parent) if parent else None, stop=stop or StopRequest())
    rank.stop.listen()
    try:
        _run(args, rank)
    except ToolkitError as error:
        # The same problem meets every rank: one of them says it.
        if rank.number == 0:
            print(error, file=rank.terminal.err, flush=True)
        return rank.end(error.exit_code, str(error))
    except Exception as error:
        with suppress(OSError):  # the disk of the log is full
            traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        if rank.parent is None:
            print(f"rank {rank.number} failed: {text}", file=rank.terminal.err, flush=True)
        return rank.end(RankFailed.exit_code, text)
    return rank.end(0, "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="toolkit.worker", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", nargs="?", help="recipe file, for people who launch by themselves")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--run-dir", type=Path, help="a prepared run directory; with RECIPE: where to make one")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # some launchers pass it
    return parser


def _run(args: argparse.Namespace, rank: Rank) -> None:
    network = private_network.enter(os.environ)  # first of all, before there are threads
    resolved = None
    if args.recipe is not None:  # every rank finds problems of the input before torch is imported
        recipe = load_recipe(find_recipe(args.recipe), args.overrides)
        recipe = check(recipe, os.environ, lambda note: rank.number or print(note, file=rank.terminal.err))
        resolved = _resolve(recipe)
        if goes_async(recipe, resolved.chosen.plan):
            what = "async islands are worlds of their own; start them with `toolkit train`, or use mode overlap"
            raise BadInput("train.outer.mode", what)
    elif args.run_dir is None:
        raise BadInput("toolkit.worker", "give a recipe, or --run-dir with a prepared directory")
    if "RANK" not in os.environ:  # no launcher: one process
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
        )
    enter_device_environment((args.run_dir or Path(resolved.recipe.output if resolved else ".")).absolute() / "logs")
    gc.disable()  # imports make next to no garbage, and looking for it takes an eighth of their time
    from toolkit.runtime.assemble import RankContext
    from toolkit.runtime.distributed import process_group
    from toolkit.runtime.distributed.rendezvous import Meeting
    from toolkit.runtime.run import run_rank

    gc.enable()
    world = process_group.World.from_env(os.environ)
    _choose_interface(world)
    meeting = Meeting.from_env(os.environ)
    if resolved is None:
        run = RunDir(args.run_dir)
        pulse = rank.settle(run)
        spec = layout.read(run)
        _choose_algorithm(spec.recipe)
        process_group.join(world, meeting, rank.warn, network)
    else:
        _choose_algorithm(resolved.recipe)
        process_group.join(world, meeting, rank.warn, network)
        run = _prepare(resolved, args.run_dir, rank)
        pulse = rank.settle(run)
        spec = layout.read(run)
    run_rank(spec, run, world, RankContext(rank.terminal.out, rank.stop, pulse, Membership.from_env(os.environ)))


def _resolve(recipe: Recipe) -> Resolved:
    """Plan for the world that the launcher has made: hosts like this one, unless the recipe says which."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", world)))
    if recipe.cluster == "auto" and world > local > 0 and world % local == 0:
        return resolve(replace(recipe, cluster=of_nodes("auto", world // local, local)))
    return resolve(recipe, nproc=world)


def _choose_interface(world: World) -> None:
    """Loopback on one host; on several, where gloo would take the host's own name, the way to the first host."""
    from toolkit.runtime.machine.network import interface_towards

    if world.size <= world.local_size:
        use_loopback()
        return
    name = interface_towards(os.environ["MASTER_ADDR"])
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _choose_algorithm(recipe: Recipe) -> None:
    """NCCL reads it when it starts; set here, it is the same under every launcher."""
    os.environ.update(nccl_settings(recipe.train.reduce.algorithm, os.environ))


def _prepare(resolved: Resolved, wanted: Path | None, rank: Rank) -> RunDir:
    """Rank 0 proves the split and makes the run directory; all ranks use it, or fail alike."""
    from toolkit.runtime.distributed.rank_zero_first import answer_of_rank_zero

    recipe = resolved.recipe

    def make() -> str:
        settled = proven(
            resolved, lambda: _resolve(recipe), lambda axes: prove(recipe.model, axes, os.environ), rank.warn
        )
        path = wanted or layout.new_run_path(recipe.output, recipe.name)
        rank.held.enter_context(lock.hold(path, rank.warn))
        settled.write(path)
        return str(path)

    return RunDir(Path(answer_of_rank_zero(make, rank.number)))


def leave(code: int) -> NoReturn:
    """End the process after what was registered to run at its end.

    Not by `sys.exit`: up to Python 3.13 a daemon thread that returns from native code (gloo, torch) while Python is
    torn down is unwound through frames that do not allow it, and a complete run would end in SIGABRT.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as Python does: ends pools, waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the disk is full
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    CODE = main(stop=EARLY)
    ignore()  # Python would restore the default, and the exit code would be lost
    leave(CODE)
