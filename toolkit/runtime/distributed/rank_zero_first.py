"""Work that one rank does for all: the others wait, and all fail alike."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Protocol

import torch

from toolkit.errors import BadInput
from toolkit.runtime.distributed.process_group import World, broadcast_object, gather_objects

PATIENCE = datetime.timedelta(days=2)
"""Tokenising a large source takes hours."""


class OncePerHost(Protocol):
    """Ranks that share files."""

    def tell(self, find: Callable[[], str]) -> str:
        """What one rank finds, on all."""

    def once(self, present: Callable[[], bool], make: Callable[[], None]) -> None:
        """Make what is not present, once a host."""


class SingleProcess:
    """One process."""

    def tell(self, find: Callable[[], str]) -> str:
        return find()

    def once(self, present: Callable[[], bool], make: Callable[[], None]) -> None:
        if not present():
            make()


class AllRanks:
    """All ranks of a run. Collective."""

    def __init__(self, world: World) -> None:
        self._world = world
        several = torch.distributed.is_initialized() and world.size > 1
        self._group = torch.distributed.new_group(backend="gloo", timeout=PATIENCE) if several else None

    def tell(self, find: Callable[[], str]) -> str:
        found: str | BadInput = ""
        if self._world.rank == 0:
            try:
                found = find()
            except BadInput as error:
                found = error
        found = broadcast_object(found, self._group)
        if isinstance(found, BadInput):
            raise found
        return found

    def once(self, present: Callable[[], bool], make: Callable[[], None]) -> None:
        """On rank 0 first; then on the first rank of every host that does not see what rank 0 made."""
        for chosen in (self._world.rank == 0, self._world.local_rank == 0):
            missing = not present()
            if not any(gather_objects(missing, self._group)):
                return
            errors = gather_objects(_tried(make) if chosen and missing else None, self._group)
            for error in errors:
                if error is not None:
                    raise error


def _tried(make: Callable[[], None]) -> BadInput | None:
    try:
        make()
    except BadInput as error:
        return error
    return None
