"""`toolkit keys`: every recipe key, from the one place where it is documented."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from toolkit.recipe.documentation import recipe_keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("prefix", nargs="?", default="", help="only keys that start so, e.g. train")


def run(args: argparse.Namespace) -> int:
    """Show the table."""
    table = Table("key", "type", "default", "meaning")
    for key in recipe_keys():
        if key.path.startswith(args.prefix):
            table.add_row(key.path, key.kind, key.default, key.meaning)
    Console().print(table)
    return 0
