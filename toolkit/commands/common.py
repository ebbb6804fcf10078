"""What several commands share: recipe arguments and the tables that show a decision."""

from __future__ import annotations

import argparse
from pathlib import Path

from toolkit.errors import BadInput
from toolkit.launching.hostfile import Host, read_hostfile
from toolkit.recipe.file import as_mapping, load_recipe, make_recipe
from toolkit.recipe.sections import Recipe
from toolkit.resources import find_recipe
from toolkit.run_dir.async_islands import parse_address
from toolkit.sessions.async_islands import IslandArguments
from toolkit.sessions.tiny_recipe import tiny_recipe


def add_recipe_arguments(parser: argparse.ArgumentParser, *, nproc: bool = True) -> None:
    """RECIPE, overrides, --tiny and --nproc."""
    parser.add_argument("recipe", help="recipe file")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny twin: small model, few steps, processes of this machine"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to change, parsed as YAML")
    if nproc:
        parser.add_argument(
            "--nproc", type=positive, metavar="N", help="processes; default: every device of the cluster"
        )


def read_recipe(args: argparse.Namespace) -> Recipe:
    """The recipe that the arguments name."""
    path = find_recipe(args.recipe)
    if not args.tiny:
        return load_recipe(path, args.overrides)
    return make_recipe(as_mapping(tiny_recipe(load_recipe(path))), args.overrides, source=str(path))


def positive(text: str) -> int:
    """An argument of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} given; at least 1 is required")
    return number


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    """--hostfile, --include and --exclude."""
    parser.add_argument(
        "--hostfile", type=Path, metavar="F", help="train on these hosts (`NAME slots=N` a line), reached by ssh"
    )
    parser.add_argument(
        "--include", default="", metavar="HOSTS", help="only these of the hostfile: HOST@HOST:SLOT,SLOT"
    )
    parser.add_argument("--exclude", default="", metavar="HOSTS", help="all of the hostfile but these")


def read_hosts(args: argparse.Namespace) -> tuple[Host, ...]:
    """The hosts to train on; none: this one."""
    if args.hostfile is None:
        given = [option for option in ("include", "exclude") if getattr(args, option)]
        if given:
            raise BadInput(f"--{given[0]}", "chooses from a hostfile; give --hostfile, too")
        return ()
    if args.nproc is not None:
        raise BadInput("--nproc", "excludes --hostfile, whose slots say how many processes; choose some with --include")
    return read_hostfile(args.hostfile, args.include, args.exclude)


def add_island_arguments(parser: argparse.ArgumentParser) -> None:
    """--mailbox and --island."""
    parser.add_argument(
        "--mailbox", metavar="HOST:PORT", help="with train.outer.mode=async: where `toolkit mailbox` listens"
    )
    parser.add_argument(
        "--island", type=int, metavar="K", help="start this island only, counted from 0; with --mailbox"
    )


def read_part(args: argparse.Namespace) -> IslandArguments:
    """From the command line."""
    if (args.mailbox is None) != (args.island is None):
        raise BadInput("--island", "--island and --mailbox go together: which island this is, and where all meet")
    return IslandArguments(None if args.mailbox is None else parse_address(args.mailbox), args.island)


def add_restart_argument(parser: argparse.ArgumentParser) -> None:
    """--max-restarts."""
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="when a rank fails, go on from the last checkpoint, at most N times; a second failure without progress "
        "takes fewer processes (default 0)",
    )
