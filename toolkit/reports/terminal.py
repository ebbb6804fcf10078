"""The report of one or several runs in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from toolkit.reports import figures
from toolkit.reports.figures import milliseconds, size
from toolkit.reports.reader import RecordedRun
from toolkit.run_dir.step_parts import PARTS

SPARKS = "▁▂▃▄▅▆▇█"
WIDTH = 60
SHOWN_EVENTS = 12


def show(runs: Sequence[RecordedRun], console: Console) -> None:
    """Print one run in full, or several side by side."""
    if len(runs) == 1:
        _one(runs[0], console)
    else:
        _several(runs, console)


def _one(run: RecordedRun, console: Console) -> None:
    console.rule(f"[bold]{escape(run.name)}")
    console.print(figures.plan_words(run), highlight=False, markup=False)
    console.print(f"loss {spark(run)}", highlight=False)
    for key, value in figures.facts(run).items():
        console.print(f"{key:>14}  {value}", highlight=False, markup=False)
    if run.broken:
        console.print(f"metrics.jsonl: {broken_words(run.broken)}; they are not shown", highlight=False, markup=False)
    for table in (_predictions(run), _parts(run), _memory(run), _memory_parts(run), _ranks(run), _collectives(run)):
        if table.row_count:
            console.print(table)
    if run.summary.get("explanation"):
        console.print(run.summary["explanation"], highlight=False, markup=False)
    for rank, (times, seconds) in run.stragglers.items():
        console.print(
            f"straggler: rank {rank}, reported {times} times, {milliseconds(seconds)} slower per step", highlight=False
        )
    for event in run.events[-SHOWN_EVENTS:]:
        console.print(f"step {event.get('step', '?')!s:>7}  {event.get('text', '')}", highlight=False, markup=False)


def broken_words(numbers: Sequence[int]) -> str:
    """Return which lines of a file can't be read."""
    shown = ", ".join(map(str, numbers[:5])) + (" …" if len(numbers) > 5 else "")
    return f"{len(numbers):,} lines can't be read (line {shown})"


def spark(run: RecordedRun) -> str:
    """Return the loss curve as a line of block characters."""
    loss = [value for value in run.scalars["loss"].tolist() if value == value]
    intervals = [loss[i * len(loss) // WIDTH : (i + 1) * len(loss) // WIDTH] for i in range(WIDTH)]
    means = [sum(values) / len(values) for values in intervals if values]
    if not means:
        return ""
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(SPARKS[round((value - low) / span * (len(SPARKS) - 1))] for value in means)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    return table


def _predictions(run: RecordedRun) -> Table:
    table = _table("predicted against measured", "part of a step", "predicted", "measured", "measured / predicted")
    predicted, measured = figures.step_ratio(run)
    for row in figures.rows(run):
        ratio = "–" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.words, milliseconds(row.predicted), milliseconds(row.measured), ratio)
    if predicted:
        table.add_section()
        table.add_row("step", milliseconds(predicted), milliseconds(measured), f"{measured / predicted:.2f}")
    return table


def _parts(run: RecordedRun) -> Table:
    table = _table("where a step's time goes (rank 0)", "part", "per step", "share")
    means = run.mean_parts()
    total = sum(means.values()) or 1.0
    for name, words in PARTS.items():
        if means.get(name):
            table.add_row(words, milliseconds(means[name]), f"{means[name] / total:.1%}")
    return table


def _memory(run: RecordedRun) -> Table:
    predicted = run.plan.get("memory", {}).get("total")
    table = _table(f"peak memory by rank{f', predicted {size(predicted)}' if predicted else ''}", "rank", "peak", "/")
    for rank, peak in enumerate(figures.memory_by_rank(run)[:16]):
        table.add_row(str(rank), size(peak), f"{peak / predicted:.2f}" if predicted else "–")
    return table


def _memory_parts(run: RecordedRun) -> Table:
    table = _table(
        "memory by part (rank with the highest peak)", "part", "predicted", "measured", "measured / predicted"
    )
    for row in figures.memory_rows(run):
        ratio = "–" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.words, size(row.predicted), size(row.measured), ratio)
    return table


def _ranks(run: RecordedRun) -> Table:
    table = _table("over ranks, at the last detailed step", "", "minimum", "mean", "maximum")
    for name, stats in run.ranks.items():
        last = {key: values[-1] for key, values in stats.items()}
        words = size if name.endswith("_bytes") else milliseconds if name.endswith("_seconds") else "{:.1f}".format
        table.add_row(
            name.replace("_seconds", "").replace("_bytes", "").replace("_", " "),
            f"{words(last['min'])} (rank {last['min_rank']:.0f})",
            words(last["mean"]),
            f"{words(last['max'])} (rank {last['max_rank']:.0f})",
        )
    return table


def _collectives(run: RecordedRun) -> Table:
    table = _table("collectives per step (rank 0)", "kind", "calls", "sent", "blocked for")
    for row in figures.collectives(run):
        table.add_row(escape(row["name"]), f"{row['calls']:g}", size(row["bytes"]), milliseconds(row["seconds"]))
    return table


def _several(runs: Sequence[RecordedRun], console: Console) -> None:
    table = Table(title=f"{len(runs)} runs")
    table.add_column("")
    for run in runs:
        table.add_column(escape(run.name), justify="right", overflow="fold")
    table.add_row("plan", *(escape(figures.plan_words(run)) for run in runs))
    table.add_row("loss curve", *(spark(run)[::3] for run in runs))
    found = [figures.facts(run) for run in runs]
    for key in found[0]:
        table.add_row(key, *(escape(one[key]) for one in found))
    console.print(table)
    differing = _table("differences between the recipes", "key", *(escape(run.name) for run in runs))
    for key, values in figures.differing_keys(runs):
        differing.add_row(escape(key), *map(escape, values))
    if differing.row_count:
        console.print(differing)
