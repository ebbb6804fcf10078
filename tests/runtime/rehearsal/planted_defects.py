"""A rehearsal with a defect on one rank, each of which would hang or corrupt a real cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch

from toolkit.runtime.distributed.process_group import device
from toolkit.runtime.pipeline.transfers import Transfers
from toolkit.runtime.rehearsal import rank as rehearsal
from toolkit.runtime.rehearsal import server
from toolkit.runtime.sharding.collectives import TensorGroup


def extra_collective(engine: Any) -> None:
    """A collective under `if rank == 0`."""
    before_step(engine, lambda: dist.all_reduce(torch.ones(3, device=device())))


def smaller_buckets(engine: Any) -> None:
    """Another bucket size on one rank, as with another config file: calls of the wrong size."""
    engine._engine.optimizer.reduce_bucket_size //= 3


def swapped_order(engine: Any) -> None:
    """Two collectives in the other order."""
    reduce, held = dist.all_reduce, list[Any]()

    def swapped(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        held.append((tensor, args, kwargs))
        if len(held) < 2:
            return None
        for one, rest, options in reversed(held):
            reduce(one, *rest, **options)
        held.clear()
        return None

    before_step(engine, lambda: setattr(dist, "all_reduce", swapped))


def gather_on_one_rank(engine: Any) -> None:
    """Parameters of ZeRO 3 gathered under `if rank == 0`, as to print or save them."""
    parameters = list(engine.module.parameters())

    def gather() -> None:
        with deepspeed.zero.GatheredParameters(parameters[:1]):
            pass

    before_step(engine, gather)


def left_out_sum(engine: Any) -> None:
    """One sum over tensor ranks is left out, as under a condition on this rank's data."""
    add, calls = TensorGroup.sum, list[int]()

    def summed(self: TensorGroup, tensor: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return tensor.contiguous().clone() if len(calls) == 5 else add(self, tensor)

    TensorGroup.sum = summed  # type: ignore[method-assign]


def half_a_message(engine: Any) -> None:
    """One stage of a pipeline sends half of what the next one waits for."""
    whole = Transfers._outgoing

    def shorter(self: Transfers, tensors: Any, rank: int) -> Any:
        return [(tensor.flatten()[: tensor.numel() // 2], rank) for tensor, rank in whole(self, tensors, rank)]

    Transfers._outgoing = shorter  # type: ignore[method-assign]


def extra_collective_on_a_stage(engine: Any) -> None:
    """The last stage of a pipeline sums its loss over all ranks, and the first does not."""
    before_step(engine, lambda: dist.all_reduce(torch.ones(1, device=device())))


def before_step(engine: Any, do: Callable[[], Any]) -> None:
    """Do something at the beginning of every step."""
    step = engine.step

    def stepped(batch: Any) -> Any:
        do()
        return step(batch)

    engine.step = stepped


DEFECTS: dict[str, tuple[int, Callable[[Any], None]]] = {
    "extra_collective": (0, extra_collective),
    "smaller_buckets": (1, smaller_buckets),
    "swapped_order": (1, swapped_order),
    "gather_on_one_rank": (0, gather_on_one_rank),
    "left_out_sum": (1, left_out_sum),
    "half_a_message": (0, half_a_message),
    "extra_collective_on_a_stage": (1, extra_collective_on_a_stage),
}
"""Name → (rank, what to do with its engine)."""


def enter(argv: tuple[str, ...], env: dict[str, str]) -> None:
    """Entry of a warm process: rehearse with the defect `argv[0]`; ranks are forked from this process, with it."""
    rank, plant = DEFECTS[argv[0]]
    build = rehearsal.build_engine

    def planted(spec: Any, world: Any) -> Any:
        engine = build(spec, world)
        if world.rank == rank:
            plant(engine)
        return engine

    rehearsal.build_engine = planted
    sys.exit(server.main(list(argv[1:])))
