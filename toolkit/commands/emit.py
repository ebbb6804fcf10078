"""`toolkit emit`: write launch files that start a plan without the toolkit's own launcher."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from rich.console import Console

from toolkit.commands.common import add_recipe_arguments, read_recipe
from toolkit.errors import BadInput
from toolkit.launching.launch_files import IMAGE, TARGETS, Emission, files, fixed_recipe
from toolkit.recipe.schema import show
from toolkit.sessions.resolve import resolve

_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]*(@sha256:[0-9a-f]{64})?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_recipe_arguments(parser)
    parser.add_argument("--for", dest="target", required=True, choices=tuple(TARGETS), help="what starts the job")
    parser.add_argument("--image", metavar="NAME", help=f"container image, with --for k8s (default {IMAGE})")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to write into")


def run(args: argparse.Namespace) -> int:
    """Plan a recipe and write the files."""
    _check_image(args)
    resolved = resolve(read_recipe(args), args.nproc)
    plan, cluster = resolved.chosen.plan, resolved.job.cluster
    if args.target == "accelerate" and plan.pp > 1:
        raise BadInput(
            "--for",
            "accelerate does not support pipeline parallelism; use --for deepspeed or torchrun, or set strategy.pp=1",
        )
    recipe = fixed_recipe(resolved.recipe, plan, cluster)
    emission = Emission(
        recipe=recipe,
        plan=resolved.plan_json(),
        deepspeed=resolved.deepspeed,
        cluster=cluster,
        image=args.image or IMAGE,
    )
    _write(args.out, files(args.target, emission))
    Console().print(
        f"{plan.describe()}\nwritten to {args.out}; start the job with {args.out / 'launch.sh'}", highlight=False
    )
    return 0


def _check_image(args: argparse.Namespace) -> None:
    if args.image is None:
        return
    if args.target != "k8s":
        raise BadInput("--image", f"is used by --for k8s only; --for {args.target} has no container")
    if not _IMAGE.fullmatch(args.image):
        raise BadInput("--image", f"{show(args.image)} given; REGISTRY/NAME:TAG or NAME@sha256:... is required")


def _write(out: Path, contents: dict[str, str]) -> None:
    present = [name for name in contents if (out / name).exists()]
    if present:
        raise BadInput("--out", f"{out} already contains {present[0]}; choose another directory, or remove it")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (out / name).write_text(text, encoding="utf-8")
            (out / name).chmod(0o755 if name == "launch.sh" else 0o644)
    except OSError as error:
        raise BadInput("--out", f"{out} can't be written: {error.strerror}") from None
