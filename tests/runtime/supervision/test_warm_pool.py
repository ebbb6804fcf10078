"""Warm workers: what they inherit from the server that they are forked from."""

from __future__ import annotations

import gc

from toolkit.runtime.supervision.warm_pool import call_on_ranks


def collector() -> tuple[bool, int]:
    return gc.isenabled(), gc.get_freeze_count()


def test_workers_collect_garbage_but_not_what_was_imported() -> None:
    """The server imports with the collector off; half a million objects are not searched in every worker."""
    ((enabled, frozen),) = call_on_ranks(collector, nproc=1)
    assert enabled
    assert frozen > 100_000
