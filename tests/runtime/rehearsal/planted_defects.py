"""Defects that a test plants on one rank of a rehearsal: each would hang or corrupt a real cluster."""

from __future__ import annotations

from typing import Any

import deepspeed.comm as dist
import torch

from toolkit.runtime.distributed.process_group import device


def extra_collective(engine: Any) -> None:
    """A collective under `if rank == 0`."""
    step = engine.step

    def stepped(batch: Any) -> Any:
        dist.all_reduce(torch.ones(3, device=device()))
        return step(batch)

    engine.step = stepped


def smaller_buckets(engine: Any) -> None:
    """Another bucket size on one rank, as with another config file: calls of the wrong size."""
    engine._engine.optimizer.reduce_bucket_size //= 3


def swapped_order(engine: Any) -> None:
    """Two collectives in the other order."""
    step = engine.step
    reduce, held = dist.all_reduce, list[Any]()

    def swapped(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        held.append((tensor, args, kwargs))
        if len(held) < 2:
            return None
        for one, rest, options in reversed(held):
            reduce(one, *rest, **options)
        held.clear()
        return None

    def stepped(batch: Any) -> Any:
        dist.all_reduce = swapped
        return step(batch)

    engine.step = stepped
