"""`toolkit report`: show a run, or compare several."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from toolkit.errors import BadInput
from toolkit.launching.environment import environment
from toolkit.secrets import secrets_in


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="run directory; give several to compare them"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained HTML page instead")


def run(args: argparse.Namespace) -> int:
    """Print the report, or write the page."""
    from toolkit.reports.reader import read_run
    from toolkit.reports.run_page import render
    from toolkit.reports.terminal import show

    runs = [read_run(path) for path in args.run_dirs]
    console = Console()
    if args.html is None:
        show(runs, console)
        return 0
    try:
        args.html.write_text(render(runs, secrets_in(environment())), encoding="utf-8")
    except OSError as error:
        raise BadInput("--html", f"{args.html} can't be written: {error.strerror}") from None
    console.print(f"report: {args.html}", highlight=False, markup=False, soft_wrap=True)
    return 0
