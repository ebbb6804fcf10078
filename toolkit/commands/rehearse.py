"""`toolkit rehearse`: run ranks of the chosen plan on fake tensors, and compare with the prediction."""

from __future__ import annotations

import argparse
import html
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from toolkit.commands.common import add_recipe_arguments, positive, read_recipe
from toolkit.errors import BadInput
from toolkit.reports.figures import size
from toolkit.runtime.rehearsal.reduced import describe
from toolkit.runtime.rehearsal.report import PARTS, RoleReport, model_part
from toolkit.sessions.rehearse import Rehearsal, rehearse, verdict
from toolkit.sessions.resolve import resolve
from toolkit.units import TERA


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_recipe_arguments(parser)
    parser.add_argument(
        "--ranks", default="roles", metavar="RANKS", help="roles (default: one rank of each kind), all, or 0,8,..."
    )
    parser.add_argument("--steps", type=positive, default=2, metavar="N", help="steps per rank (default 2)")
    parser.add_argument("--json", action="store_true", help="print the rehearsal as JSON")
    parser.add_argument("--html", type=Path, metavar="PAGE", help="write the rehearsal as an HTML page")


def run(args: argparse.Namespace) -> int:
    """Rehearse; exit code 3 if a rank does not fit or collectives do not match."""
    recipe = read_recipe(args)
    if recipe.cluster == "auto" and args.nproc is None:
        what = (
            "auto given, which is this machine; a rehearsal needs the cluster of the plan: give cluster=NAME or --nproc"
        )
        raise BadInput("cluster", what)
    result = rehearse(resolve(recipe, args.nproc), args.ranks, args.steps, _progress)
    if args.html:
        args.html.write_text(_page(recipe.name, result), encoding="utf-8")
    if args.json:
        print(json.dumps(result.to_json(), indent=1))
    else:
        _show(result, Console())
    return 0 if result.fits and not result.mismatches else 3


def _progress(done: int, total: int, left_seconds: float) -> None:
    left = f", about {left_seconds:.0f} s left" if done < total else ""
    print(f"rehearsed {done} of {total} ranks{left}", file=sys.stderr, flush=True)


SQUARE = "tensors sequence × sequence"
MEASURES = (
    "peak in a step", "start, device", "start, host", *PARTS, "TFLOP per step", "host syncs per step", SQUARE, "took",
)  # fmt: skip


def _columns(result: Rehearsal) -> dict[str, tuple[str, ...]]:
    """Heading → values in the order of `MEASURES`: the prediction, then one column per rehearsed rank."""
    memory = asdict(result.option.estimate.memory)
    predicted = (size(result.predicted_bytes), "", "", *(_predicted(memory, part) for part in PARTS), *[""] * 4)
    columns = {"predicted": predicted}
    for role in result.roles:
        step = role.step
        columns[f"rank {role.rank} (stage {role.stage}, tensor {role.tensor}, data {role.data})"] = (
            size(step.device_peak_bytes),
            size(role.start.device_peak_bytes),
            size(role.start.host_peak_bytes),
            *(size(step.parts[part]) for part in PARTS),
            f"{step.flops / TERA:,.2f}",
            str(sum(step.host_syncs.values())),
            "unknown" if role.square_tensors is None else str(sum(role.square_tensors.values())),
            f"{role.wall_seconds:.0f} s",
        )
    return columns


def _predicted(memory: dict[str, int], part: str) -> str:
    """A part of the memory model, which has buckets and temporary tensors as one."""
    return "" if part == "temporary" else size(memory[model_part(part)])


def _show(result: Rehearsal, console: Console) -> None:
    columns = _columns(result)
    table = Table(title=f"{result.option.plan.describe()}: live bytes per device in the last step")
    table.add_column("")
    for heading in columns:
        table.add_column(heading, justify="right")
    for row in zip(MEASURES, *columns.values(), strict=True):
        table.add_row(*row)
    console.print(table)
    for line in _lines(result):
        console.print(escape(line), highlight=False, soft_wrap=True)


def _lines(result: Rehearsal) -> list[str]:
    fullest = max(result.roles, key=result.needed_bytes)
    ran = describe(fullest, result.option.plan.grad_accum)
    lines = [
        verdict(result),
        f"rank {fullest.rank}: {ran}",
        f"peak of rank {fullest.rank} at {fullest.step.peak_at}",
        *_details(fullest),
        *(
            f"  {axis}: {size(rehearsed)} per step in collectives, predicted {size(predicted)}"
            for axis, (predicted, rehearsed) in result.traffic(fullest).items()
        ),
    ]
    if result.mismatches:
        lines += [f"collectives differ: group {list(one.group)[:16]}: {one.what}" for one in result.mismatches]
    elif len(result.roles) > 1:
        lines.append(f"collectives of {len(result.roles)} ranks match")
    return lines


def _details(role: RoleReport) -> list[str]:
    step = role.step
    lines = [
        f"  {size(one.bytes):>10} {one.part:11} {list(one.shape)} {one.dtype}: {one.where}" for one in step.largest
    ]
    for row in step.traffic:
        lines.append(f"  {row['kind']} over {len(row['group'])} ranks: {row['calls']} calls, {size(row['bytes'])}")
    lines += [f"  {count} tensors {what}" for what, count in (role.square_tensors or {}).items()]
    return lines + [f"  host waits {count} times: {site}" for site, count in step.host_syncs.items()]


def _page(name: str, result: Rehearsal) -> str:
    columns = _columns(result)
    cells = "".join(f"<th>{html.escape(heading)}</th>" for heading in ("", *columns))
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in zip(MEASURES, *columns.values(), strict=True)
    )
    lines = "\n".join(html.escape(line) for line in _lines(result))
    return (
        f"<!doctype html><meta charset=utf-8><title>Rehearsal of {html.escape(name)}</title>"
        "<style>body{font:14px system-ui;margin:2em}td,th{padding:4px 10px;text-align:right}"
        "td:first-child{text-align:left}</style>"
        f"<h1>Rehearsal of {html.escape(name)}</h1><p>{html.escape(result.option.plan.describe())}: "
        f"live bytes per device</p><table><tr>{cells}</tr>{rows}</table><pre>{lines}</pre>\n"
    )
