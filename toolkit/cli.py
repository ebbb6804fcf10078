"""The command line: a table of commands, and the one place that turns their exceptions into messages.

Each command is a module of `toolkit/commands`, imported only when it is called.
"""

from __future__ import annotations

import argparse
import datetime
import errno
import importlib
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

from toolkit.errors import ToolkitError, first_line
from toolkit.launching import environment, stop_signals
from toolkit.resources import user_cache

COMMANDS: dict[str, str] = {
    "plan": "rank the plans for a recipe by predicted time and memory, and say why others are refused",
    "rehearse": "run ranks of the chosen plan on fake tensors: memory, collectives, host syncs next to the prediction",
    "train": "plan, write the run directory, launch and supervise the workers",
    "data": "show the data before training: samples with their loss mask, counts, useful fraction, sample ids",
    "sample": "generate text from a run's newest checkpoint",
    "tokenizer": "train a tokenizer on local text",
    "resume": "continue a run from its newest intact checkpoint, under any strategy and number of processes",
    "verify": "check every byte of a checkpoint, or of all checkpoints of a run",
    "export": "write a checkpoint as a Hugging Face model directory",
    "doctor": "check this machine and say how to fix what is wrong",
    "parity": "train a recipe under each strategy and compare losses and gradient norms with one process",
    "coverage": "train tiny models of every type under each strategy and compare them with one process",
    "scale": "predict how a recipe scales with the number of devices, by strategy",
    "compare": "plan a recipe on several clusters: the best plan on each, with speed, cost and energy",
    "validate": "compare the cost model's predictions with measurements in a CSV file",
    "probe": "measure this machine (matmul, memory, collectives) and write a cluster file",
    "rendezvous": "serve the store through which asynchronous islands of several sites exchange updates",
    "report": "show a run in the terminal or as one HTML page; compare several runs",
    "emit": "write the launch files of a plan for deepspeed, accelerate, torchrun, Slurm or Kubernetes",
    "strategies": "list the strategies, or the known devices",
    "keys": "list every recipe key with its type, default and meaning",
}
STOPPABLE = ("train", "resume")
"""Commands that a stop signal ends with the exit code of a saved run."""
ALIASES = {"mailbox": "rendezvous"}
"""Old name → command."""
DEBUG = "TOOLKIT_DEBUG"
"""Environment variable: 1 shows the traceback of every error."""
_PLACES = {
    errno.EROFS: "it is on a read-only file system; choose a place that can be written",
    errno.EACCES: "permission denied; choose another place, or change its permissions",
    errno.EPERM: "not permitted; choose another place, or change its owner",
    errno.ENOSPC: "the disk is full; free some space, or choose another place",
    errno.EDQUOT: "the disk quota is used up; free some space, or choose another place",
    errno.ENOENT: "no such file or directory; check the path",
    errno.ENOTDIR: "a part of the path is not a directory; check the path",
    errno.EISDIR: "is a directory; a file is required",
    errno.EEXIST: "exists already; choose another path",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
    errno.ELOOP: "its symbolic links lead in a circle; check the path",
}
"""Errors of the file system that the user can cure, with what to do: exit code 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; every error is printed as one message."""
    given = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")  # an ASCII terminal shows `?` instead of `×`
    environment.enter_processor_environment()
    try:
        args = _parse(given)
        if args.command not in STOPPABLE:
            return _run(args)
        with stop_signals.ending_the_command():
            code = _run(args)
            if argv is None:
                stop_signals.ignore()
            return code
    except BrokenPipeError:  # the reader has closed the pipe: `toolkit plan ... | head`
        _discard_output()
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if argv is None:
            stop_signals.ignore()  # a second signal must not replace the exit code
        return _failed(error, given)


def _run(args: argparse.Namespace) -> int:
    code = int(_module(args.command).run(args))
    sys.stdout.flush()
    return code


def _failed(error: Exception, given: Sequence[str]) -> int:
    """Print one message for an error of a command, and return the exit code."""
    env = environment.environment()
    if env.get(DEBUG, "0") not in ("", "0"):
        traceback.print_exception(error)
    if isinstance(error, ToolkitError):
        print(error, file=sys.stderr)
        return error.exit_code
    if isinstance(error, OSError) and error.errno in _PLACES:
        if isinstance(error.filename, str | bytes):
            print(f"{os.fsdecode(error.filename)}: {_PLACES[error.errno]}", file=sys.stderr)
            return 2
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # errors of writing name no file
            print(f"a file could not be written: {_PLACES[error.errno]}", file=sys.stderr)
            return 2
    from toolkit.secrets import redact_text, secrets_in

    hidden = secrets_in(env)
    log = write_crash_log(error, given, hidden)
    what = redact_text(first_line(error), hidden)[:300]
    print(
        f"toolkit failed: {type(error).__name__}: {what}\n"
        f"this is a defect of the toolkit, or an input that it should have refused; details: {log}\n"
        f"{DEBUG}=1 shows the traceback here",
        file=sys.stderr,
    )
    return 1


def write_crash_log(error: Exception, given: Sequence[str], hidden: Iterable[str]) -> str:
    """Write arguments, versions and traceback of an unexpected error, without secrets; return the path."""
    from toolkit.checkpoints.format import versions
    from toolkit.secrets import redact, redact_text

    words = redact([_without_secret(word) for word in given], hidden)
    text = "\n".join(
        [
            f"time: {datetime.datetime.now().astimezone().isoformat()}",
            f"version: {_version()}",
            f"arguments: {words}",
            *(f"{package}: {version}" for package, version in versions().items()),
            "",
            redact_text("".join(traceback.format_exception(error)), hidden),
        ]
    )
    name = f"crash-{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.log"
    for in_home in (True, False):
        try:
            directory = user_cache() / "crashes" if in_home else Path(tempfile.mkdtemp(prefix="zero-toolkit-"))
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = directory / name
            with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600), encoding="utf-8") as file:
                file.write(text)
            return str(path)
        except OSError:  # a read-only home directory: try the temporary one
            continue
    return "not written: neither the home nor the temporary directory can be written to"


def _without_secret(word: str) -> str:
    from toolkit.secrets import HIDDEN, is_secret_name

    key, equals, _ = word.partition("=")
    return f"{key}={HIDDEN}" if equals and is_secret_name(key.lstrip("-")) else word


def _discard_output() -> None:
    """Send what is still buffered nowhere: Python would report the closed pipe again when it exits."""
    if sys.stdout is sys.__stdout__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _parse(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="toolkit", description="Hybrid-parallel training of Hugging Face models on DeepSpeed."
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    called = [ALIASES.get(word, word) for word in given[:1]]
    for name, summary in COMMANDS.items():
        old_names = [alias for alias, command in ALIASES.items() if command == name]
        sub = commands.add_parser(name, aliases=old_names, help=summary, description=summary)
        if name in called:
            _module(name).add_arguments(sub)
    args, rest = parser.parse_known_args(given)
    stray = [word for word in rest if word.startswith("-") or "overrides" not in args]
    if stray:
        parser.error(f"unrecognized arguments: {' '.join(stray)}")
    if rest:  # overrides after an option
        args.overrides = [*args.overrides, *rest]
    return args


def _module(command: str) -> ModuleType:
    return importlib.import_module(f"toolkit.commands.{ALIASES.get(command, command)}")


class _ShowVersion(argparse.Action):
    """`--version`. Unlike argparse's own action it looks the version up only when asked: that takes 20 ms."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(_version())
        parser.exit()


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"zero-toolkit {version('zero-toolkit')}"
    except PackageNotFoundError:
        return "zero-toolkit (not installed)"


if __name__ == "__main__":
    sys.exit(main())
