"""The process group: joining it, and the few collectives that the training loop itself uses."""

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
    """Rank and world size of this process, overall and on its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> World:
        """Read what the launcher has set; without a launcher, one process."""
        size = int(env.get("WORLD_SIZE", 1))
        return cls(
            rank=int(env.get("RANK", 0)),
            size=size,
            local_rank=int(env.get("LOCAL_RANK", 0)),
            # DeepSpeed's launcher sets LOCAL_SIZE, torchrun sets LOCAL_WORLD_SIZE.
            local_size=int(env.get("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE", size))),
        )


def current_world() -> World:
    """The world of a process group that has been joined, all of it on one host."""
    rank, size = int(dist.get_rank()), int(dist.get_world_size())
    return World(rank=rank, size=size, local_rank=rank, local_size=size)


def join(world: World) -> None:
    """Join the process group, with one thread pool and one device per process."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        # torch splits sums by thread, so results depend on the thread count. torchrun (2.13) sets OMP_NUM_THREADS=1,
        # other launchers set nothing: fixed here, losses are bit-identical under every launcher.
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
    """Keep DeepSpeed from compiling `deepspeed_shm_comm` when a CPU process group starts.

    DeepSpeed 0.19.8 builds it with g++ on first use (about 60 s), though only its inference all-reduce uses it. If the
    build is killed, its lock stays in torch's extension cache and every later start hangs (pytorch#189245). This can go
    when `init_distributed` on a CPU no longer calls `build_shm_op`.
    """
    # By name, because the attribute `deepspeed.comm.torch` is PyTorch itself, which that package imports.
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None


def device() -> torch.device:
    """This process's device."""
    return torch.device(get_accelerator().current_device_name())


def all_sum(values: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Sum over ranks, in place."""
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(values, group=group)
    return values


def all_max(values: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Maximum over ranks, in place; tensors in host memory need a gloo group."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX, group=group)
    return values


def gather_objects(value: T, group: Any = None) -> list[T]:
    """The values of all ranks, on every rank."""
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
    """A gloo group of all ranks, for exchanges that must not wait for the device. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return torch.distributed.new_group(backend="gloo")
