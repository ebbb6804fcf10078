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
    table = Table(title=f"{result['scored']} of {result['rows']} rows scored")
    for heading in ("source", "split", "rows", "step time MAPE", "bias", "memory rows", "memory MAPE", "bias"):
        text = heading in ("source", "split")
        table.add_column(heading, justify="left" if text else "right", no_wrap=text)
    for name, source in result["by_source"].items():
        time, memory = source["step_time"], source["memory"]
        table.add_row(
            escape(name),
            escape(source["split"]),
            str(time["scored"]),
            *_cells(time),
            str(memory["scored"]),
            *_cells(memory),
        )
    console.print(table)
    for split, error in result["by_split"].items():
        console.print(f"{escape(split)}: {error['mape']:.1%} (mean over {error['sources']} sources)", highlight=False)
    _show_totals(result, console)


def _show_totals(result: dict[str, Any], console: Console) -> None:
    memory, ranking = result["memory"], result["ranking"]
    if memory["scored"]:
        console.print(f"memory: {memory['mape']:.1%} over {memory['scored']} rows", highlight=False)
    if ranking["groups"]:
        console.print(f"ranking: regret {ranking['regret']:.3f} over {ranking['groups']} jobs", highlight=False)
    for reason, count in result["unscored"].items():
        console.print(f"[yellow]not scored[/] ({count}): {escape(reason)}", highlight=False)


def _cells(errors: dict[str, Any]) -> tuple[str, str]:
    if errors["mape"] is None:
        return "", ""
    return f"{errors['mape']:.1%}", f"{errors['bias']:+.1%}"
