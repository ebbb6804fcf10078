"""`toolkit train`: plan, write the run directory, launch, supervise."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from toolkit.commands.common import (
    add_host_arguments,
    add_island_arguments,
    add_recipe_arguments,
    add_restart_argument,
    read_hosts,
    read_part,
    read_recipe,
)
from toolkit.launching import environment, launchers
from toolkit.recipe.file import dump_recipe
from toolkit.reports.plan_table import show_decision, show_notes
from toolkit.run_dir.layout import new_run_path
from toolkit.sessions import ray
from toolkit.sessions.hosts import check_launcher, on_hosts, planned_commands
from toolkit.sessions.preflight import check, prove
from toolkit.sessions.resolve import Resolved, plan_notes, proven, resolve
from toolkit.sessions.start import start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_recipe_arguments(parser)
    parser.add_argument(
        "--launcher",
        choices=launchers.LAUNCHERS,
        default="local",
        help="who starts the workers (default: toolkit itself)",
    )
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="default: OUTPUT/NAME-TIME")
    add_host_arguments(parser)
    add_restart_argument(parser)
    add_island_arguments(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="show recipe, plan, DeepSpeed config and command; start nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Train a recipe on this host, or on those of a hostfile."""
    console, env = Console(), environment.environment()
    hosts, part = read_hosts(args), read_part(args)
    recipe = on_hosts(check(read_recipe(args), env, console.print), hosts)
    if args.launcher == ray.LAUNCHER:
        recipe = ray.on_ray(recipe, args.nproc, hosts)
    resolved = resolve(recipe, args.nproc)
    if resolved.decision.chosen is not None:
        check_launcher(args.launcher, resolved.chosen.plan)
    if not args.dry_run:
        resolved = proven(
            resolved, lambda: resolve(recipe, args.nproc), lambda axes: prove(recipe.model, axes, env), console.print
        )
    if resolved.decision.chosen is None:
        show_decision(resolved.decision, console)
    _ = resolved.chosen
    path = args.run_dir or new_run_path(recipe.output, recipe.name)
    if args.dry_run:
        commands = planned_commands(args.launcher, path, resolved.job.cluster, hosts)
        return _dry_run(resolved, commands, console)
    show_decision(resolved.decision, console, top=3)
    show_notes(plan_notes(resolved), console)
    return start(resolved, path, args.launcher, console, max_restarts=args.max_restarts, hosts=hosts, part=part)


def _dry_run(resolved: Resolved, commands: Mapping[str, Sequence[launchers.Command]], console: Console) -> int:
    console.rule("recipe")
    console.print(dump_recipe(resolved.recipe), markup=False, highlight=False)
    console.rule("plan")
    show_decision(resolved.decision, console, top=3)
    show_notes(plan_notes(resolved), console)
    console.rule("deepspeed.json")
    console.print(json.dumps(resolved.deepspeed, indent=2), markup=False, highlight=False)
    for place, started in commands.items():
        console.rule(f"command on {place}")
        for command in started:
            settings = " ".join(f"{key}={value}" for key, value in command.env.items())
            console.print(f"{settings} {' '.join(command.argv)}", markup=False, highlight=False, soft_wrap=True)
    return 0
