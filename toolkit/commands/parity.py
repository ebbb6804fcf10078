"""`toolkit parity`: check that every strategy gives the losses and gradient norms of one process."""

from __future__ import annotations

import argparse
import json

from rich.console import Console
from rich.table import Table

from toolkit.commands.common import add_recipe_arguments, read_recipe
from toolkit.errors import NoPlanFits
from toolkit.launching import environment
from toolkit.reports.tables import plain
from toolkit.sessions.parity import Outcome, cases, compare, parity_json, reference
from toolkit.sessions.preflight import check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_recipe_arguments(parser)
    parser.add_argument(
        "--strategies",
        default="all",
        metavar="A,B",
        help="strategies or variants to compare, e.g. zero,data_parallel (default all)",
    )
    parser.add_argument("--steps", type=int, default=10, metavar="K", help="steps to compare (default 10)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Return 0 if every strategy that can run agrees with one process, 1 if one does not, 3 if none can run."""
    console = Console(stderr=args.json)
    say, nproc = plain(console), args.nproc or 2
    recipe, wanted = check(read_recipe(args), environment.environment(), say), len(cases(args.strategies, nproc))
    with console.status("one process") as status:
        expected = reference(recipe, args.steps)
        outcomes = []
        for outcome in compare(recipe, args.steps, nproc, args.strategies, expected):
            outcomes.append(outcome)
            say(f"{len(outcomes)} of {wanted}: {outcome.name} {_found(outcome)}")  # all strategies take minutes
            status.update(f"{outcome.name} done")
    if args.json:
        print(json.dumps(parity_json(args.steps, expected, outcomes), indent=1))
    else:
        console.print(_table(outcomes, args.steps, nproc))
    if all(outcome.refused for outcome in outcomes):
        raise NoPlanFits("no strategy can run this recipe:\n" + "\n".join(f"  {o.name}: {o.refused}" for o in outcomes))
    return 0 if all(outcome.ok or outcome.refused for outcome in outcomes) else 1


def _found(outcome: Outcome) -> str:
    if outcome.refused:
        return "refused"
    verdict = "ok" if outcome.ok else "off"
    return f"{verdict}, loss {outcome.max_rel_diff:.1e}, grad norm {outcome.max_rel_norm_diff:.1e}"


def _table(outcomes: list[Outcome], steps: int, nproc: int) -> Table:
    table = Table(title=f"{nproc} processes against one, {steps} steps: largest relative difference")
    for heading in ("strategy", "plan", "loss", "grad norm", ""):
        table.add_column(heading, justify="right" if heading in ("loss", "grad norm") else "left")
    for o in outcomes:
        if o.refused:
            table.add_row(o.name, o.refused, "", "", "[yellow]refused[/]")
        else:
            assert o.plan is not None
            verdict = "[green]ok[/]" if o.ok else "[red]off[/]"
            table.add_row(o.name, o.plan.describe(), f"{o.max_rel_diff:.1e}", f"{o.max_rel_norm_diff:.1e}", verdict)
    return table
