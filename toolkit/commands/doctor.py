"""`toolkit doctor`: what is wrong with this machine, and how to fix it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from toolkit.errors import BadInput
from toolkit.launching import environment
from toolkit.launching.machine_checks import ALL, CheckContext, examine
from toolkit.reports.findings import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--output", type=Path, default=Path("runs"), metavar="DIR", help="where runs go (default runs)")
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help="hosts to reach, one a line: `name slots=8`")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """0 if nothing is in the way, 1 if something must be fixed."""
    site = CheckContext(args.output, environment.environment(), read_hosts(args.hostfile) if args.hostfile else ())
    findings = examine(site, ALL)
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        show(findings, Console())
    return int(any(finding.level == "error" for finding in findings))


def read_hosts(path: Path) -> tuple[str, ...]:
    """Host names of a DeepSpeed hostfile."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("--hostfile", f"{path} can't be read: {error}") from None
    return tuple(line.split()[0] for line in lines if line.strip() and not line.lstrip().startswith("#"))
