"""`toolkit scale`: predicted throughput of a recipe by number of devices and strategy."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from toolkit.commands.common import add_recipe_arguments, positive, read_recipe
from toolkit.errors import BadInput
from toolkit.plans.job import make_job
from toolkit.plans.noise_scale import advice
from toolkit.reports.template import check_writable, fill, write_page
from toolkit.sessions.scaling import measured_critical_batch, parse_devices, proposers, scaling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_recipe_arguments(parser)
    parser.add_argument(
        "--devices", default="8..1024", help="numbers of devices: 8..16384 doubles, 8,16,64 is a list (default 8..1024)"
    )
    parser.add_argument(
        "--tokens", type=_tokens, default=0.0, help="token budget, e.g. 1e12, to show days and device-hours"
    )
    parser.add_argument(
        "--strong", action="store_true", help="keep the global batch (default: it grows with the number of devices)"
    )
    known = parser.add_mutually_exclusive_group()
    known.add_argument(
        "--critical-batch",
        type=positive,
        metavar="N",
        help="batch size in sequences beyond which a larger one hardly saves steps",
    )
    known.add_argument(
        "--noise-from",
        type=Path,
        metavar="RUN_DIR",
        help="use the critical batch that a run measured (metrics.noise_scale)",
    )
    parser.add_argument("--json", action="store_true", help="print the curves as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the curves as an HTML page")


def run(args: argparse.Namespace) -> int:
    """Plan for every number of devices and print the curves."""
    if args.html:
        check_writable(args.html)
    recipe = read_recipe(args)
    job = make_job(recipe, args.nproc)
    critical: int | None = args.critical_batch or recipe.train.critical_batch
    if args.noise_from:
        critical = measured_critical_batch(args.noise_from)
    result = scaling(
        job,
        parse_devices(args.devices),
        proposers(recipe.strategy.name),
        weak=not args.strong,
        tokens=args.tokens,
        critical_batch=critical,
    )
    if critical:
        result["critical_batch"]["advice"] = advice(critical, recipe.train.global_batch)
    if args.html:
        page = fill("scale.html", {**result, "title": f"{recipe.name} on {job.cluster.device.name}"})
        write_page(args.html, page)
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        _show(result, Console())
    return 0


def _tokens(text: str) -> float:
    tokens = float(text)
    if not 0 <= tokens < math.inf:
        raise BadInput("--tokens", f"{text} given; a positive number is required")
    return tokens


def _show(result: dict[str, Any], console: Console) -> None:
    for name, points in result["strategies"].items():
        console.print(_table(name, points, budget=bool(result["tokens"])))
        reason = next((point["reason"] for point in points if point["plan"] is None), None)
        if reason:
            console.print(f"[yellow]none[/] {name}: {escape(reason)}", highlight=False)
        end = result["diminishing"][name]
        if end:
            console.print(f"{name}: beyond {end} devices, doubling them adds less than 50% throughput", highlight=False)
    critical = result["critical_batch"]
    if critical["sequences"]:
        console.print(critical["advice"], highlight=False, markup=False)
    if critical["passed_at_devices"]:
        console.print(
            f"from {critical['passed_at_devices']} devices on, the batch exceeds the critical batch of "
            f"{critical['sequences']} sequences: more devices save less training time than shown",
            highlight=False,
        )


def _table(name: str, points: list[dict[str, Any]], *, budget: bool) -> Table:
    table = Table(title=name)
    headings = ["devices", "batch", "plan", "tokens/s", "efficiency", "exposed"] + (
        ["days", "device-hours"] if budget else []
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    for point in points:
        table.add_row(str(point["devices"]), str(point["global_batch"]), *_cells(point, budget=budget))
    return table


def _cells(point: dict[str, Any], *, budget: bool) -> list[str]:
    if point["plan"] is None:
        return ["[yellow]none[/]"]
    cells = [
        point["plan"],
        f"{point['tokens_per_second']:,.0f}",
        f"{point['efficiency']:.0%}",
        f"{point['exposed']:.0%}",
    ]
    return cells + ([f"{point['days']:,.1f}", f"{point['device_hours']:,.0f}"] if budget else [])
