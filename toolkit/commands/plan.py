"""`toolkit plan`: ranked plans and refusals with reasons; no torch."""

from __future__ import annotations

import argparse
import json

from rich.console import Console

from toolkit.commands.common import add_recipe_arguments, read_recipe, show_decision
from toolkit.resolve import resolve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_recipe_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the decision as JSON")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="plans to show (default 5)")


def run(args: argparse.Namespace) -> int:
    """Plan, show, and exit 3 if nothing fits."""
    resolved = resolve(read_recipe(args), args.nproc)
    if args.json:
        print(json.dumps(resolved.decision.to_json(), indent=1))
    else:
        show_decision(resolved.decision, Console(), args.top)
    _ = resolved.chosen
    return 0
