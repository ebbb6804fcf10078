"""The process group: joining it, and the few collectives that the trainer itself uses."""

from __future__ import annotations

import datetime
import importlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator

T = TypeVar("T")
TIMEOUT = datetime.timedelta(minutes=30)


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among the others."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> World:
        """What the launcher says; without a launcher, one process."""
        size = int(env.get("WORLD_SIZE", 1))
        return cls(
            rank=int(env.get("RANK", 0)),
            size=size,
            local_rank=int(env.get("LOCAL_RANK", 0)),
            # DeepSpeed's launcher says LOCAL_SIZE, torch's says LOCAL_WORLD_SIZE.
            local_size=int(env.get("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE", size))),
        )


def current_world() -> World:
    """This process in the group that it has joined, all on one host."""
    rank, size = int(dist.get_rank()), int(dist.get_world_size())
    return World(rank=rank, size=size, local_rank=rank, local_size=size)


def join(world: World) -> None:
    """Join the process group, with one thread pool and one device a process."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        # The same under every launcher, so that results are bit-identical: torchrun would set 1, others nothing.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.local_size))
        skip_inference_build()
    else:
        accelerator.set_device(world.local_rank)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.init_distributed(
        dist_backend=accelerator.communication_backend_name(),
        timeout=TIMEOUT,
        verbose=False,
        auto_mpi_discovery=False,
    )


def skip_inference_build() -> None:
    """DeepSpeed (0.19) compiles an all-reduce for inference when a CPU group starts: a minute for nothing."""
    # By name: the attribute `deepspeed.comm.torch` is PyTorch itself, which that package imports.
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None


def device() -> torch.device:
    """This process's device."""
    return torch.device(get_accelerator().current_device_name())


def all_sum(values: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The sum over ranks, in place."""
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(values, group=group)
    return values


def all_max(values: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The largest over ranks, in place; tensors of the host go with a host group."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX, group=group)
    return values


def gather_objects(value: T, group: Any = None) -> list[T]:
    """Every rank's value, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: T, group: Any = None) -> T:
    """Rank 0's value, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0, group=group)
    return box[0]


def host_group() -> Any:
    """A group of all ranks over the hosts' memory, for what must not wait behind the device. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return torch.distributed.new_group(backend="gloo")
