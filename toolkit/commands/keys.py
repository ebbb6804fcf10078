"""`toolkit keys`: list every recipe key with its type, default and meaning."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from toolkit.recipe.documentation import recipe_keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("prefix", nargs="?", default="", help="list only keys that start with this, e.g. train")


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    table = Table("key", "type", "default", "meaning")
    for key in recipe_keys():
        if key.path.startswith(args.prefix):
            table.add_row(key.path, key.kind, key.default, key.meaning)
    Console().print(table)
    return 0
