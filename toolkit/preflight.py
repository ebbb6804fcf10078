"""What can be found wrong before a process starts: data paths, and W&B without a key."""

from __future__ import annotations

import netrc
import os
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from toolkit.data_files import data_files
from toolkit.recipe import Recipe


class Printer(Protocol):
    """Where notes go."""

    def print(self, *objects: object) -> None:
        """One note."""


def check(recipe: Recipe, console: Printer) -> Recipe:
    """The recipe that will run; faults raise `BadInput`, fallbacks are said aloud."""
    if recipe.data.path != "synthetic":
        data_files(recipe.data.path)
    wandb = recipe.metrics.wandb
    if wandb.mode == "online" and not _has_wandb_key():
        console.print("[yellow]W&B is online in the recipe, but there is no key (`wandb login` or WANDB_API_KEY): recording offline instead; `wandb sync` uploads it later[/]")  # fmt: skip
        return replace(recipe, metrics=replace(recipe.metrics, wandb=replace(wandb, mode="offline")))
    return recipe


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return any("wandb" in host for host in netrc.netrc(str(Path.home() / ".netrc")).hosts)
    except (OSError, netrc.NetrcParseError):
        return False
