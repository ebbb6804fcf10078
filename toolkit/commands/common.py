"""What several commands share: recipe arguments and the tables that show a decision."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from toolkit.planner.caveats import notes
from toolkit.planner.explain import bottleneck
from toolkit.planner.search import Decision, Option
from toolkit.plans.plan import Refusal
from toolkit.recipe.file import as_mapping, load_recipe, make_recipe
from toolkit.recipe.sections import Recipe
from toolkit.resources import find_recipe
from toolkit.sessions.resolve import Resolved, apart
from toolkit.sessions.tiny_recipe import tiny_twin

GIB = 2**30


def add_recipe_arguments(parser: argparse.ArgumentParser, *, nproc: bool = True) -> None:
    """RECIPE, overrides, --tiny and --nproc."""
    parser.add_argument("recipe", help="recipe file")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny twin: small model, few steps, processes of this machine"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to change, parsed as YAML")
    if nproc:
        parser.add_argument(
            "--nproc", type=positive, metavar="N", help="processes; default: every device of the cluster"
        )


def read_recipe(args: argparse.Namespace) -> Recipe:
    """The recipe that the arguments name."""
    path = find_recipe(args.recipe)
    if not args.tiny:
        return load_recipe(path, args.overrides)
    return make_recipe(as_mapping(tiny_twin(load_recipe(path))), args.overrides, source=str(path))


def positive(text: str) -> int:
    """An argument of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} given; at least 1 is required")
    return number


NOT_SYNCHRONOUS = "the result of local_sgd is not that of synchronous training: islands drift apart between exchanges"
TOO_EARLY = (
    "islands that begin with random weights gain little from one another: train inside one site first, and go on from "
    "there with checkpoint.resume"
)


def show_decision(decision: Decision, console: Console, top: int = 5) -> None:
    """The ranked table, and one line for each reason of refusal."""
    table = Table(title=f"{len(decision.ranked)} of {decision.considered} plans can run; the first is chosen")
    for heading in ("", "plan", "step", "tokens/s", "MFU", "memory", "of"):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    for place, option in enumerate(decision.ranked[:top], 1):
        table.add_row(str(place), option.plan.describe(), *_cells(option))
    if decision.ranked:
        console.print(table)
    for place, option in enumerate(decision.ranked[:top], 1):
        console.print(f"{place}: {bottleneck(option.plan, option.estimate.time)}", highlight=False)
    if decision.chosen is not None and decision.chosen.plan.islands > 1:
        console.print(f"[yellow]note[/] {NOT_SYNCHRONOUS}", highlight=False)
    for refusal in shown_refusals(decision):
        what = refusal.plan.describe() if refusal.plan else refusal.strategy
        console.print(f"[yellow]refused[/] {escape(what)}: {escape(refusal.reason)}", highlight=False)


def all_notes(resolved: Resolved) -> list[str]:
    """What a person should know of the chosen plan."""
    chosen, gain = resolved.decision.chosen, apart(resolved)
    about = notes(chosen.plan, resolved.recipe.train) if chosen else []
    fresh = resolved.recipe.model.init == "scratch" and resolved.recipe.checkpoint.resume in ("auto", "none")
    early = [TOO_EARLY] if chosen and chosen.plan.islands > 1 and fresh else []
    return [*([gain] if gain else []), *early, *about]


def show_notes(found: Sequence[str], console: Console) -> None:
    """A line each."""
    for note in found:
        console.print(f"[yellow]note[/] {escape(note)}", highlight=False)


def _cells(option: Option) -> tuple[str, ...]:
    estimate = option.estimate
    used = f"{estimate.memory.total / GIB:.2f}"
    return (
        f"{estimate.time.total * 1000:,.0f} ms",
        f"{estimate.tokens_per_second:,.0f}",
        f"{estimate.mfu:.1%}",
        used if estimate.fits else f"[red]{used}[/]",
        f"{estimate.memory_limit_bytes / GIB:.1f} GiB",
    )


def shown_refusals(decision: Decision, each: int = 2) -> list[Refusal]:
    """For each strategy the plan that came nearest to fitting, and the first of what it can't do at all."""
    by_strategy: dict[str, list[Refusal]] = {}
    for refusal in reversed(decision.refused):  # misfits come last, the nearest of each strategy
        by_strategy.setdefault(refusal.strategy, []).append(refusal)
    return [refusal for refusals in by_strategy.values() for refusal in [*refusals[:1], *refusals[1:][::-1]][:each]]
