"""The command line: a table of commands, each a module in `toolkit/commands`, imported when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from toolkit.errors import ToolkitError

COMMANDS: dict[str, str] = {
    "plan": "rank every plan for a recipe, with memory and time, and say why others are refused",
    "train": "plan, write the run directory, launch and watch the workers",
    "data": "look at the data before training: samples with their loss mask, lengths, useful share, sample ids",
    "sample": "text from a run's newest checkpoint",
    "tokenizer": "learn a tokenizer from local text",
    "resume": "go on with a run from its newest whole checkpoint, under any strategy and number of processes",
    "verify": "check every byte of a checkpoint, or of every checkpoint of a run",
    "export": "write a checkpoint as a Hugging Face directory",
    "doctor": "check this machine, and say how to fix what is wrong",
    "parity": "run a recipe under each strategy against one process and compare losses and gradient norms",
    "coverage": "train tiny models of every type under each strategy against one process",
    "scale": "scaling curves of a recipe over numbers of devices, strategy by strategy",
    "validate": "the cost model's predictions against measurements in a CSV file",
    "probe": "measure this machine: matmul, memory, collectives; write a cluster file",
    "mailbox": "where islands of several sites meet that never wait for one another",
    "report": "look at a run, on the terminal or as one page; with several runs: compare them",
    "emit": "write the launch files of a plan for deepspeed, accelerate, torchrun, Slurm or Kubernetes",
    "strategies": "list the strategy registry",
    "keys": "list every recipe key with its type, default and meaning",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is the contract's."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parse(given)
        return int(importlib.import_module(f"toolkit.commands.{args.command}").run(args))
    except ToolkitError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone: `toolkit plan ... | head`
        return 0


def _parse(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="toolkit", description="Hybrid-parallel training of Hugging Face models on DeepSpeed."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary)
        if name in given[:1]:
            importlib.import_module(f"toolkit.commands.{name}").add_arguments(sub)
    args, rest = parser.parse_known_args(given)
    stray = [word for word in rest if word.startswith("-") or "overrides" not in args]
    if stray:
        parser.error(f"unrecognized arguments: {' '.join(stray)}")
    if rest:  # overrides that stand behind an option
        args.overrides = [*args.overrides, *rest]
    return args


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"zero-toolkit {version('zero-toolkit')}"
    except PackageNotFoundError:
        return "zero-toolkit (not installed)"


if __name__ == "__main__":
    sys.exit(main())
