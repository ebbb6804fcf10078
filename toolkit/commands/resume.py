"""`toolkit resume`: go on with a run, under the same or any other strategy and number of processes."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from toolkit.commands.common import (
    add_host_arguments,
    add_island_arguments,
    add_restart_argument,
    positive,
    read_hosts,
    read_part,
)
from toolkit.errors import BadInput
from toolkit.launching import environment, launchers
from toolkit.recipe.file import load_recipe
from toolkit.reports.plan_table import show_decision
from toolkit.run_dir.layout import RunDir
from toolkit.sessions import ray
from toolkit.sessions.hosts import on_hosts
from toolkit.sessions.preflight import check
from toolkit.sessions.resolve import resolve
from toolkit.sessions.start import start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to change, parsed as YAML")
    parser.add_argument("--nproc", type=positive, metavar="N", help="processes; default: as many as before")
    parser.add_argument(
        "--launcher",
        choices=launchers.LAUNCHERS,
        default="local",
        help="who starts the workers (default: toolkit itself)",
    )
    add_host_arguments(parser)
    add_restart_argument(parser)
    add_island_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Plan again for the processes at hand, then launch into the same directory."""
    directory = RunDir(args.run_dir)
    if not directory.recipe.is_file():
        raise BadInput(str(args.run_dir), "is not a run directory (no recipe.yaml); give one that `toolkit train` made")
    console = Console()
    recipe = load_recipe(directory.recipe, ["checkpoint.resume=auto", *args.overrides])
    recipe = check(recipe, environment.environment(), console.print)
    hosts = read_hosts(args)
    if hosts:
        recipe = on_hosts(replace(recipe, cluster="auto"), hosts)
    nproc = None if hosts else args.nproc or _devices(directory)
    if args.launcher == ray.LAUNCHER:
        if not any(override.startswith("cluster") for override in args.overrides):
            recipe = replace(recipe, cluster="auto")
        recipe = ray.on_ray(recipe, nproc, hosts)
    if recipe.checkpoint.resume != "auto":
        raise BadInput("checkpoint.resume", f"{recipe.checkpoint.resume!r} given; `toolkit resume` goes on by `auto`")
    resolved = resolve(recipe, nproc)
    _ = resolved.chosen
    show_decision(resolved.decision, console, top=1)
    return start(
        resolved,
        args.run_dir,
        args.launcher,
        console,
        max_restarts=args.max_restarts,
        resuming=True,
        hosts=hosts,
        part=read_part(args),
    )


def _devices(directory: RunDir) -> int | None:
    """As many processes as the last plan had."""
    try:
        plan = json.loads(directory.plan.read_text(encoding="utf-8"))
        return int(plan["islands"] * plan["dp"] * plan["tp"] * plan["pp"] * plan["sp"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
