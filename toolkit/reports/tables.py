"""Plans, refusals, notes and findings in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from toolkit.launching.machine_checks import Finding
from toolkit.planner.explain import bottleneck
from toolkit.planner.search import Decision, Option
from toolkit.plans.plan import Refusal
from toolkit.units import GIB

COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}
NOT_SYNCHRONOUS = "local_sgd does not give the result of synchronous training: islands drift apart between exchanges"


def show_decision(decision: Decision, console: Console, top: int = 5) -> None:
    """Print the ranked plans, the bottleneck of each, and one line per refusal."""
    table = Table(
        title=_title(decision),
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for heading in ("", "plan", "step", "±", "tokens/s", "MFU", "start", "memory"):
        table.add_column(heading, justify="left" if heading == "plan" else "right", no_wrap=heading != "plan")
    for rank, option in enumerate(decision.ranked[:top], 1):
        table.add_row(str(rank), escape(option.plan.describe()), *_cells(option))
    if decision.ranked:
        console.print(table)
        for line in _about(decision):
            console.print(line, highlight=False)
    for rank, option in enumerate(decision.ranked[:top], 1):
        console.print(f"{rank}: {bottleneck(option.plan, option.estimate.time)}", highlight=False)
    if decision.chosen is not None and decision.chosen.plan.islands > 1:
        console.print(f"[yellow]note[/] {NOT_SYNCHRONOUS}", highlight=False)
    for refusal in shown_refusals(decision):
        what = refusal.plan.describe() if refusal.plan else refusal.strategy
        console.print(f"[yellow]refused[/] {escape(what)}: {escape(refusal.reason)}", highlight=False)


def _title(decision: Decision) -> str:
    if decision.chosen is not None and not decision.chosen.estimate.fits:
        return "[red]the recipe fixes every axis, and this plan does not fit[/]"
    return f"{len(decision.ranked)} of {decision.considered} plans can run; the first is chosen"


def _about(decision: Decision) -> Iterator[str]:
    """What the columns mean, and what the first plan costs."""
    first = decision.ranked[0].estimate
    usable = (first.memory_limit_bytes - first.memory_margin_bytes) / GIB
    margin = first.memory_margin_bytes / first.memory_limit_bytes
    yield f"start and memory: GiB of {usable:.1f} per device ({first.memory_limit_bytes / GIB:.1f} less {margin:.0%})"
    equal = sum(decision.overlaps_best(option) for option in decision.ranked)
    if equal > 1:
        yield f"± holds for 8 of 10 runs; {equal} plans overlap with the first: it is the simplest of the fastest"
    money = first.money
    if money is not None and money.per_billion_tokens is not None:
        run = f", {money.run:,.2f} for the run" if money.run is not None else ""
        energy = f"; {money.kwh_per_billion_tokens:,.0f} kWh" if money.kwh_per_billion_tokens is not None else ""
        yield f"a billion tokens cost {money.per_billion_tokens:,.0f}{energy}{run}"


def plain(console: Console) -> Callable[[str], None]:
    """Return a function that prints a line as it is: paths and messages may contain rich's markup."""
    return lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)


def show_notes(found: Sequence[str], console: Console) -> None:
    """Print one line per note."""
    for note in found:
        console.print(f"[yellow]note[/] {escape(note)}", highlight=False)


def _cells(option: Option) -> tuple[str, ...]:
    estimate = option.estimate
    used = f"{estimate.memory.total / GIB:.2f}"
    return (
        f"{estimate.time.total * 1000:,.0f} ms",
        f"{_half_width(option):.0%}",
        f"{estimate.tokens_per_second:,.0f}",
        f"{estimate.mfu:.1%}",
        f"{estimate.memory.start / GIB:.2f}",
        used if estimate.fits else f"[red]{used}[/]",
    )


def _half_width(option: Option) -> float:
    low, high = option.estimate.step_seconds
    return (high - low) / 2 / option.estimate.time.total


def shown_refusals(decision: Decision, each: int = 2) -> list[Refusal]:
    """Return for each strategy the plan that came closest to fitting, and the first that it can't run at all."""
    by_strategy: dict[str, list[Refusal]] = {}
    for refusal in reversed(decision.refused):  # plans that do not fit come last, the closest one at the very end
        by_strategy.setdefault(refusal.strategy, []).append(refusal)
    return [refusal for refusals in by_strategy.values() for refusal in [*refusals[:1], *refusals[1:][::-1]][:each]]


def show_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print one line per finding of the machine checks, and one for its fix."""
    for finding in findings:
        console.print(f"[{COLOURS[finding.level]}]{finding.level:8}[/]", end="")
        console.print(f"{finding.check}: {finding.what}", markup=False, highlight=False, soft_wrap=True)
        if finding.fix:
            console.print(f"        fix: {finding.fix}", markup=False, highlight=False, soft_wrap=True)
