"""`toolkit compare`: the best plan of a recipe on each of several clusters, with speed, cost and energy."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from toolkit.clusters.devices import PRICES_DATE
from toolkit.clusters.reader import named_section
from toolkit.commands.common import add_recipe_arguments, read_recipe
from toolkit.errors import BadInput, NoPlanFits
from toolkit.recipe.sections import Recipe
from toolkit.sessions.resolve import Resolved, explain, resolve

MOST_CLUSTERS = 32
"""Clusters that one command compares."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_recipe_arguments(parser, nproc=False)
    parser.add_argument(
        "--clusters", required=True, metavar="A,B,C", help="names in configs/clusters or paths of cluster files"
    )
    parser.add_argument(
        "--objective",
        default="throughput",
        help="what each cluster's plan is ranked by: throughput, time, cost, memory",
    )
    parser.add_argument(
        "--list-prices", action="store_true", help=f"use list prices of {PRICES_DATE} where a cluster gives no price"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Plan on every cluster and print a line for each; raise `NoPlanFits` if none has a plan."""
    names = list(dict.fromkeys(name.strip() for name in args.clusters.split(",") if name.strip()))
    if not 1 <= len(names) <= MOST_CLUSTERS:
        what = f"{args.clusters[:60]!r} given; 1 to {MOST_CLUSTERS} names are required, separated by commas"
        raise BadInput("--clusters", what)
    recipe = read_recipe(args)
    found = [_plan(recipe, name, args.objective, list_prices=args.list_prices) for name in names]
    result = {"clusters": found, "best": _best(found)}
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        _show(result, Console())
    if all(one["plan"] is None for one in found):
        raise NoPlanFits(
            "no plan fits on any of the clusters: " + "; ".join(f"{c['cluster']}: {c['reason']}" for c in found)
        )
    return 0


def _plan(recipe: Recipe, name: str, objective: str, *, list_prices: bool) -> dict[str, Any]:
    section = named_section(name)
    if list_prices and section.price_per_device_hour is None:
        section = replace(section, price_per_device_hour="list")
    resolved = resolve(replace(recipe, cluster=section), objective=objective)
    return _line(name, resolved)


def _line(name: str, resolved: Resolved) -> dict[str, Any]:
    cluster, option = resolved.job.cluster, resolved.decision.chosen
    shared = {"cluster": name, "device": cluster.device.name, "devices": cluster.devices}
    if option is None or not option.estimate.fits:
        reason = explain(resolved.decision).splitlines()
        return {**shared, "plan": None, "reason": reason[1].strip() if len(reason) > 1 else reason[0]}
    estimate = option.estimate
    assert estimate.money is not None
    return {
        **shared,
        "plan": option.to_json(),
        "describe": option.plan.describe(),
        "step_seconds": estimate.time.total,
        "interval": list(estimate.step_seconds),
        "tokens_per_second": estimate.tokens_per_second,
        "mfu": estimate.mfu,
        "cost": asdict(estimate.money),
    }


def _best(found: list[dict[str, Any]]) -> dict[str, str | None]:
    """The fastest cluster, the cheapest per token, and the one that needs least energy per token."""
    able = [one for one in found if one["plan"] is not None]

    def least(figure: str) -> str | None:
        known = [one for one in able if one["cost"][figure] is not None]
        return min(known, key=lambda one: one["cost"][figure])["cluster"] if known else None

    fastest = max(able, key=lambda one: one["tokens_per_second"])["cluster"] if able else None
    return {"speed": fastest, "cost": least("per_billion_tokens"), "energy": least("kwh_per_billion_tokens")}


def _show(result: dict[str, Any], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("cluster", "devices", "plan", "step", "tokens/s", "MFU", "cost", "kWh"):
        left = heading in ("cluster", "devices", "plan")
        table.add_column(
            heading, justify="left" if left else "right", no_wrap=heading != "plan" and heading != "devices"
        )
    for one in result["clusters"]:
        devices = f"{one['devices']} × {one['device']}"
        if one["plan"] is None:
            table.add_row(escape(one["cluster"]), devices, f"[yellow]none[/]: {escape(one['reason'])}")
            continue
        money = one["cost"]
        table.add_row(
            escape(one["cluster"]), devices, escape(one["describe"]), f"{one['step_seconds']:,.2f} s",
            f"{one['tokens_per_second']:,.0f}", f"{one['mfu']:.0%}", _number(money["per_billion_tokens"]),
            _number(money["kwh_per_billion_tokens"]),
        )  # fmt: skip
    console.print(table)
    console.print("cost and kWh: for a billion tokens", highlight=False)
    for what, name in result["best"].items():
        if name:
            console.print(f"best {what}: {escape(name)}", highlight=False)
    if not result["best"]["cost"]:
        console.print("no prices: set cluster.price_per_device_hour, or give --list-prices", highlight=False)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"
