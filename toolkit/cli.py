"""The command line: a table of commands. Each is a module of `toolkit/commands`, imported only when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from toolkit.errors import ToolkitError

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
    "validate": "compare the cost model's predictions with measurements in a CSV file",
    "probe": "measure this machine (matmul, memory, collectives) and write a cluster file",
    "rendezvous": "serve the store through which asynchronous islands of several sites exchange updates",
    "report": "show a run in the terminal or as one HTML page; compare several runs",
    "emit": "write the launch files of a plan for deepspeed, accelerate, torchrun, Slurm or Kubernetes",
    "strategies": "list the strategies, or the known devices",
    "keys": "list every recipe key with its type, default and meaning",
}
ALIASES = {"mailbox": "rendezvous"}
"""Old name → command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; errors are printed as one message."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parse(given)
        return int(_module(args.command).run(args))
    except ToolkitError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has closed the pipe: `toolkit plan ... | head`
        return 0


def _parse(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="toolkit", description="Hybrid-parallel training of Hugging Face models on DeepSpeed."
    )
    parser.add_argument("--version", action="version", version=_version())
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


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"zero-toolkit {version('zero-toolkit')}"
    except PackageNotFoundError:
        return "zero-toolkit (not installed)"


if __name__ == "__main__":
    sys.exit(main())
