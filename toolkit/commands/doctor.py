"""`toolkit doctor`: check this machine and say how to fix what is wrong."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from toolkit.errors import BadInput
from toolkit.launching import environment
from toolkit.launching.machine_checks import ALL, CheckContext, examine
from toolkit.reports.tables import show_findings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--output", type=Path, default=Path("runs"), metavar="DIR", help="directory of the runs (default runs)"
    )
    parser.add_argument(
        "--hostfile", type=Path, metavar="FILE", help="also check these hosts; one line `NAME slots=N` per host"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Return 0 if nothing must be fixed, else 1."""
    context = CheckContext(args.output, environment.environment(), read_hosts(args.hostfile) if args.hostfile else ())
    findings = examine(context, ALL)
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        show_findings(findings, Console())
    return int(any(finding.level == "error" for finding in findings))


def read_hosts(path: Path) -> tuple[str, ...]:
    """Read the host names of a DeepSpeed hostfile."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("--hostfile", f"{path} can't be read: {error}") from None
    return tuple(line.split()[0] for line in lines if line.strip() and not line.lstrip().startswith("#"))
