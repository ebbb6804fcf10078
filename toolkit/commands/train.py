"""`toolkit train`: plan a recipe, write the run directory, launch the workers and supervise them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from toolkit.commands.common import add_recipe_arguments, read_recipe
from toolkit.commands.launch_arguments import (
    add_join_argument,
    add_launch_arguments,
    read_join_options,
    read_launch_options,
)
from toolkit.launching import launchers
from toolkit.recipe.file import dump_recipe
from toolkit.recipe.sections import Recipe
from toolkit.reports.tables import plain, show_decision, show_notes
from toolkit.run_dir import layout
from toolkit.sessions.hosts import LaunchOptions, planned_commands
from toolkit.sessions.islands import join_job
from toolkit.sessions.prepare import prepare_training
from toolkit.sessions.resolve import Resolved, plan_notes
from toolkit.sessions.sites import site_of
from toolkit.sessions.start import start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_recipe_arguments(parser, optional=True)
    add_join_argument(parser)
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="run directory to create (default: OUTPUT/NAME-TIME)"
    )
    add_launch_arguments(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print recipe, plan, DeepSpeed config and commands; start nothing"
    )
    parser.add_argument(
        "--no-rehearse",
        action="store_true",
        help="start without a rehearsal of the plan on fake tensors (plans for CPUs have none)",
    )


def run(args: argparse.Namespace) -> int:
    """Train a recipe on this host, or on those of a hostfile or a Ray cluster."""
    console = Console()
    recipe, nproc, options = _read(args)
    if args.run_dir is not None and not args.dry_run:
        _check_run_dir(args.run_dir, recipe)
    resolved = prepare_training(
        recipe,
        nproc,
        options,
        plain(console),
        prove_splits=not args.dry_run,
        rehearses=not args.no_rehearse,
    )
    if resolved.decision.chosen is None:
        show_decision(resolved.decision, console)
    _ = resolved.chosen  # raises if no plan fits
    path = args.run_dir or layout.new_run_path(resolved.recipe.output, resolved.recipe.name)
    if args.dry_run:
        _show_dry_run(resolved, planned_commands(options.launcher, path, resolved.job.cluster, options.hosts), console)
        return 0
    show_decision(resolved.decision, console, top=3)
    show_notes(plan_notes(resolved), console)
    return start(resolved, path, options, console)


def _read(args: argparse.Namespace) -> tuple[Recipe, int | None, LaunchOptions]:
    """(recipe, number of processes, options), from the command line or from the job that this island joins."""
    if args.join is None:
        return site_of(read_recipe(args), args.island), args.nproc, read_launch_options(args)
    options = read_join_options(args)
    joining = join_job(options.islands, [*([args.recipe] if args.recipe else []), *args.overrides], args.nproc)
    return joining.recipe, joining.nproc, replace(options, islands=joining.options)


def _check_run_dir(path: Path, recipe: Recipe) -> None:
    """Raise `BadInput` for a directory of something else, before the time that a proof and a rehearsal take.

    One with a lock is left to the lock, which says whose run it is.
    """
    section = recipe.checkpoint
    if not (path / layout.LOCK).exists() and not layout.can_resume(path, section.resume, section.every):
        layout.check_free(path)


def _show_dry_run(resolved: Resolved, commands: Mapping[str, Sequence[launchers.Command]], console: Console) -> None:
    console.rule("recipe")
    console.print(dump_recipe(resolved.recipe), markup=False, highlight=False)
    console.rule("plan")
    show_decision(resolved.decision, console, top=3)
    show_notes(plan_notes(resolved), console)
    console.rule("deepspeed.json")
    console.print(json.dumps(resolved.deepspeed, indent=2), markup=False, highlight=False)
    for host, started in commands.items():
        console.rule(f"command on {host}")
        for command in started:
            settings = " ".join(f"{key}={value}" for key, value in command.env.items())
            console.print(f"{settings} {' '.join(command.argv)}", markup=False, highlight=False, soft_wrap=True)
