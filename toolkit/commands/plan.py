"""`toolkit plan`: rank plans and give reasons for refusals, without importing torch."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from toolkit.commands.common import add_recipe_arguments, positive, read_recipe
from toolkit.errors import BadInput
from toolkit.recipe.file import dump_recipe
from toolkit.recipe.sections import Recipe
from toolkit.reports.tables import show_decision, show_notes
from toolkit.sessions.advice import advise
from toolkit.sessions.resolve import Resolved, plan_notes, resolve
from toolkit.sessions.sites import has_sites, plan_sites, show_sites


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_recipe_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the decision as JSON")
    parser.add_argument("--top", type=positive, default=5, metavar="N", help="number of plans to show (default 5)")
    parser.add_argument(
        "--objective", default="throughput", help="what to rank by: throughput (default), time, cost or memory"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="rehearse the chosen plan on fake tensors; if it does not fit, the next one",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write an HTML page with all plans: memory, time, refusals"
    )


def run(args: argparse.Namespace) -> int:
    """Plan a recipe and print the ranking; raise `NoPlanFits` (exit code 3) if no plan fits."""
    if args.html:
        from toolkit.reports.template import check_writable

        check_writable(args.html)
    recipe = read_recipe(args)
    if has_sites(recipe):
        return _plan_sites(recipe, args)
    resolved = resolve(recipe, args.nproc, args.objective)
    if args.rehearse:
        from toolkit.sessions.rehearsal_verdict import rehearsed  # imported where used: most calls do not rehearse

        resolved = rehearsed(resolved, partial(print, file=sys.stderr, flush=True))
    if args.html:
        _write_page(args.html, resolved)
    notes, advice = plan_notes(resolved), advise(resolved.recipe, resolved.job, resolved.decision)
    if args.json:
        found = asdict(advice) if advice else None
        decision = {**resolved.decision.to_json(), "notes": notes, "advice": found}
        if args.rehearse:
            decision["rehearsal"] = _known_verdict(resolved)
        print(json.dumps(decision, indent=1))
    else:
        console = Console()
        show_decision(resolved.decision, console, args.top)
        show_notes(notes, console)
        if advice:
            console.print(f"[green]advice[/] {escape(str(advice))}", highlight=False)
    _ = resolved.chosen  # raises if no plan fits
    return 0


def _plan_sites(recipe: Recipe, args: argparse.Namespace) -> int:
    """Plan a recipe with a list of unequal sites: a plan for each."""
    for option in ("html", "rehearse", "nproc"):
        if getattr(args, option):
            raise BadInput(
                f"--{option}", "can't be combined with a list of cluster.sites; give one site as the cluster"
            )
    sites = plan_sites(recipe, args.objective)
    if args.json:
        first = sites[0].resolved.decision.to_json()
        print(json.dumps({**first, "sites": [site.to_json() for site in sites]}, indent=1))
    else:
        show_sites(sites, Console())
    for site in sites:
        _ = site.resolved.chosen  # raises if no plan fits
    return 0


def _write_page(path: Path, resolved: Resolved) -> None:
    from toolkit.reports.plan_page import render
    from toolkit.reports.template import write_page

    write_page(path, render(resolved.decision, resolved.job, dump_recipe(resolved.recipe)))


def _known_verdict(resolved: Resolved) -> dict[str, Any] | None:
    from toolkit.sessions.rehearsal_verdict import known_verdict

    known = known_verdict(resolved) if resolved.decision.chosen else None
    return asdict(known) if known else None
