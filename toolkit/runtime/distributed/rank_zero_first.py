"""Work that one rank does for all: the others wait, and an error is raised on all of them."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, Protocol

import torch

from toolkit.errors import BadInput, NoPlanFits
from toolkit.runtime.distributed.process_group import World, broadcast_object, gather_objects

TIMEOUT = datetime.timedelta(days=2)
"""Timeout of the group: tokenising a large source takes hours."""


class OncePerHost(Protocol):
    """Does work once for all ranks, or once per host."""

    def from_rank_zero(self, find: Callable[[], str]) -> str:
        """Call `find` on rank 0 and return its result on all ranks."""

    def once(self, present: Callable[[], bool], make: Callable[[], None]) -> None:
        """Call `make` once per host where `present` is false."""


class SingleProcess:
    """`OncePerHost` of a single process."""

    def from_rank_zero(self, find: Callable[[], str]) -> str:
        return find()

    def once(self, present: Callable[[], bool], make: Callable[[], None]) -> None:
        if not present():
            make()


class AllRanks:
    """`OncePerHost` of all ranks of a run. Collective."""

    def __init__(self, world: World) -> None:
        self._world = world
        several = torch.distributed.is_initialized() and world.size > 1
        self._group = torch.distributed.new_group(backend="gloo", timeout=TIMEOUT) if several else None

    def from_rank_zero(self, find: Callable[[], str]) -> str:
        return answer_of_rank_zero(find, self._world.rank, self._group)

    def once(self, present: Callable[[], bool], make: Callable[[], None]) -> None:
        """Call `make` on rank 0; then on the first rank of every host that does not see rank 0's result."""
        for chosen in (self._world.rank == 0, self._world.local_rank == 0):
            missing = not present()
            if not any(gather_objects(missing, self._group)):
                return
            errors = gather_objects(_error_of(make) if chosen and missing else None, self._group)
            for error in errors:
                if error is not None:
                    raise BadInput.from_json(error)


def answer_of_rank_zero(find: Callable[[], str], rank: int, group: Any = None) -> str:
    """Call `find` on rank 0; every rank gets its answer, or the same `BadInput` or `NoPlanFits`. Collective."""
    answer: dict[str, Any] = {}
    if rank == 0:
        try:
            answer = {"found": find()}
        except BadInput as error:
            answer = {"error": error.to_json()}
        except NoPlanFits as error:
            answer = {"refused": str(error)}
    answer = broadcast_object(answer, group)
    if "error" in answer:
        raise BadInput.from_json(answer["error"])
    if "refused" in answer:
        raise NoPlanFits(answer["refused"])
    return str(answer["found"])


def _error_of(make: Callable[[], None]) -> dict[str, Any] | None:
    try:
        make()
    except BadInput as error:
        return error.to_json()
    return None
