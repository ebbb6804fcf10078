"""`toolkit emit`: write launch files that start a plan without the toolkit's own launcher."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from rich.console import Console

from toolkit.commands.common import add_recipe_arguments, read_recipe
from toolkit.errors import BadInput
from toolkit.launching.launch_files import IMAGE, TARGETS
from toolkit.recipe.schema import show
from toolkit.reports.tables import plain
from toolkit.sessions.prepare import emit
from toolkit.sessions.rehearsal_verdict import known_verdict, rehearsed
from toolkit.sessions.resolve import resolve

_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]*(@sha256:[0-9a-f]{64})?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_recipe_arguments(parser)
    parser.add_argument("--for", dest="target", required=True, choices=tuple(TARGETS), help="what starts the job")
    parser.add_argument("--image", metavar="NAME", help=f"container image, with --for k8s (default {IMAGE})")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to write into")
    parser.add_argument(
        "--rehearse",
        action=argparse.BooleanOptionalAction,
        help="rehearse the plan on fake tensors first, and note the verdict in plan.json (default: note that of an "
        "earlier rehearsal, if there is one; --no-rehearse: none)",
    )


def run(args: argparse.Namespace) -> int:
    """Plan a recipe and write the files."""
    _check_image(args)
    console = Console()
    resolved = resolve(read_recipe(args), args.nproc)
    if args.rehearse:
        resolved = rehearsed(resolved, plain(console))
    known = known_verdict(resolved) if args.rehearse is not False else None
    emit(resolved, args.target, args.out, image=args.image or IMAGE, rehearsal=known.reason if known else None)
    plan = resolved.chosen.plan
    note = f"rehearsal: {known.reason}" if known else "not rehearsed"
    console.print(
        f"{plan.describe()}\n{note}\nwritten to {args.out}; start the job with {args.out / 'launch.sh'}",
        highlight=False,
        markup=False,
    )
    return 0


def _check_image(args: argparse.Namespace) -> None:
    if args.image is None:
        return
    if args.target != "k8s":
        raise BadInput("--image", f"is used by --for k8s only; --for {args.target} has no container")
    if not _IMAGE.fullmatch(args.image):
        raise BadInput("--image", f"{show(args.image)} given; REGISTRY/NAME:TAG or NAME@sha256:... is required")
