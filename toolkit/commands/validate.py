"""`toolkit validate`: compare the cost model's predictions with measurements in a CSV file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from toolkit.cost.validation import validate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("csv", type=Path, help="measurements, with the columns of benchmarks/data/published.csv")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Score the predictions and print the errors."""
    result = validate(args.csv)
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        _show(result, Console())
    return 0


def _show(result: dict[str, Any], console: Console) -> None:
    """Print one line per source; the columns are narrow enough for 80 characters."""
    console.print(f"{result['scored']} of {result['rows']} rows scored", highlight=False)
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("source", "split", "rows", "time", "bias", "rows", "memory", "bias"):
        text = heading in ("source", "split")
        table.add_column(heading, justify="left" if text else "right", no_wrap=True)
    for name, source in result["by_source"].items():
        time, memory = source["step_time"], source["memory"]
        counts = [str(part["scored"]) if part["scored"] else "" for part in (time, memory)]
        table.add_row(
            escape(name[:LONGEST_NAME]), escape(source["split"]), counts[0], *_cells(time), counts[1], *_cells(memory)
        )
    console.print(table)
    for split, error in result["by_split"].items():
        console.print(f"{escape(split)}: {error['mape']:.1%} (mean over {error['sources']} sources)", highlight=False)
    _show_totals(result, console)


LONGEST_NAME = 28
"""Characters of a source's name that are shown."""


def _show_totals(result: dict[str, Any], console: Console) -> None:
    memory, ranking = result["memory"], result["ranking"]
    for name, part in result["facts"].items():
        if part["mape"] is not None:
            console.print(f"rows with settings {name}: {part['mape']:.1%} over {part['rows']} rows", highlight=False)
    if memory["scored"]:
        console.print(f"memory: {memory['mape']:.1%} over {memory['scored']} rows", highlight=False)
    check = result["memory_check"]
    if check["ran"]:
        console.print(f"ran but would be refused: {check['refused']} of {check['ran']} rows", highlight=False)
    if check["failed"]:
        console.print(f"ran out of memory but would fit: {check['accepted']} of {check['failed']}", highlight=False)
    if result["interval"]["inside"] is not None:
        console.print(f"inside their 10-90% interval: {result['interval']['inside']:.0%} of rows", highlight=False)
    if ranking["groups"]:
        console.print(f"ranking: regret {ranking['regret']:.3f} over {ranking['groups']} jobs", highlight=False)
    for reason, count in result["unscored"].items():
        console.print(f"[yellow]not scored[/] ({count}): {escape(reason)}", highlight=False)


def _cells(errors: dict[str, Any]) -> tuple[str, str]:
    if errors["mape"] is None:
        return "", ""
    return f"{errors['mape']:.1%}", f"{errors['bias']:+.1%}"
