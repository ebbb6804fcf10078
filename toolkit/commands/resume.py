"""`toolkit resume`: continue a run from its newest checkpoint, under any strategy and number of processes."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from toolkit.commands.common import add_overrides, positive
from toolkit.commands.launch_arguments import add_launch_arguments, read_launch_options
from toolkit.reports.tables import plain, show_decision
from toolkit.sessions.prepare import Consent, prepare_resume, previous_num_devices
from toolkit.sessions.start import start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory")
    add_overrides(parser)
    parser.add_argument(
        "--nproc", type=positive, metavar="N", help="number of processes (default: as many as the last plan had)"
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="let the model's own Python code run, if the run directory's recipe has model.trust_remote_code",
    )
    parser.add_argument(
        "--allow-sinks",
        action="store_true",
        help="let metrics.sinks of the run directory's recipe run, though other users can write there",
    )
    add_launch_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Plan again for the processes available now, then launch into the same run directory."""
    console, options = Console(), read_launch_options(args, resuming=True)
    nproc = args.nproc or previous_num_devices(args.run_dir)
    consent = Consent(trust_remote_code=args.trust_remote_code, allow_sinks=args.allow_sinks)
    here = args.nproc is not None
    resolved = prepare_resume(args.run_dir, args.overrides, nproc, options, plain(console), consent, here=here)
    _ = resolved.chosen  # raises if no plan fits
    show_decision(resolved.decision, console, top=1)
    return start(resolved, args.run_dir, options, console)
