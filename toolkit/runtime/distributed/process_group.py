"""The process group: joining it, and the few collectives that the training loop itself uses."""

from __future__ import annotations

import datetime
import functools
import importlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator

from toolkit.launching.environment import cores_near, device_ordinal, use_device
from toolkit.launching.private_network import Network
from toolkit.runtime.distributed.rendezvous import Meeting

TIMEOUT = datetime.timedelta(minutes=30)
JSON_LIMIT_BYTES = 64 << 20
"""A longer JSON value from another rank is refused before memory is taken for it."""


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


def join(world: World, meeting: Meeting, say: Callable[[str], object] = print, network: Network | None = None) -> None:
    """Join the process group, with one thread pool and one device per process.

    `say` gets the warning if the rendezvous store has to listen on more addresses than the meeting's. gloo's sockets,
    of this group and of later ones, are in `network` if there is one.
    """
    _prepare(world)
    if network is not None:
        confine_gloo(network)
    accelerator = get_accelerator()
    # Made here, because DeepSpeed's own store would listen on every address of the host. The group keeps the store.
    store = meeting.open(world.rank, world.size, TIMEOUT, several_hosts=world.size > world.local_size, say=say)
    options: dict[str, Any] = {}
    if accelerator.device_name() == "cuda" and world.size > 1:
        # As DeepSpeed 0.19.8 does (`TorchBackend.init_process_group`): otherwise NCCL guesses each rank's device.
        options["device_id"] = accelerator.device(ordinal(world))
    torch.distributed.init_process_group(
        accelerator.communication_backend_name(),
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=TIMEOUT,
        **options,
    )
    _start_deepspeed()


def confine_gloo(network: Network) -> None:
    """Make every gloo group of this process inside the network, where gloo's own threads then stay."""
    kind: Any = torch.distributed.ProcessGroupGloo
    make = kind.__init__

    def make_inside(group: Any, *args: Any, **kwargs: Any) -> None:
        network.call(make, group, *args, **kwargs)

    # In place, because torch.distributed asks whether a group is of this class.
    kind.__init__ = make_inside


def adopt(world: World) -> None:
    """Use a process group that exists already: that of a rehearsal."""
    _prepare(world)
    _start_deepspeed()


def _prepare(world: World) -> None:
    """Set the thread count and the device of this process."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        # torch splits sums by thread, so results depend on the thread count. torchrun (2.13) sets OMP_NUM_THREADS=1,
        # other launchers set nothing: fixed here, losses are bit-identical under every launcher. A process that is
        # confined to fewer cores (taskset, a cpuset) gets no more threads than those: they would spin for one another.
        share = (os.cpu_count() or 1) // world.local_size
        torch.set_num_threads(max(1, min(share, len(os.sched_getaffinity(0)))))
        skip_inference_build()
    else:
        use_device(ordinal(world))
        accelerator.set_device(ordinal(world))
        _use_near_cores(world)
    compile_on_first_call()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)


def ordinal(world: World) -> int:
    """The number of this rank's device among those that the process can see."""
    return device_ordinal(world.local_rank, int(get_accelerator().device_count()))


def _use_near_cores(world: World) -> None:
    """Stay on the cores of the device's NUMA node, with this rank's share of the threads.

    Host memory is then near the device, and the optimizer of offloaded states does not use all cores on every rank.
    """
    allowed = os.sched_getaffinity(0)
    if get_accelerator().device_name() == "cuda":
        found: Any = torch.cuda.get_device_properties(ordinal(world))
        # Not in every torch since 2.10; without them the rank may use all cores, as before.
        place: list[Any] = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
        if None not in place:
            address = "{:04x}:{:02x}:{:02x}.0".format(*place)
            os.sched_setaffinity(0, cores_near(address, allowed))
    torch.set_num_threads(max(1, len(allowed) // world.local_size))


def _start_deepspeed() -> None:
    deepspeed.init_distributed(  # uses the group that is there
        dist_backend=get_accelerator().communication_backend_name(),
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


def compile_on_first_call() -> None:
    """Keep DeepSpeed from importing torch's compiler when a ZeRO optimizer is made.

    ZeRO (DeepSpeed 0.19.8) imports its Muon optimizer whatever optimizer is used, and that decorates three functions
    with `torch.compile`: about two seconds of CPU per rank for a compiler that nothing calls. Here they are compiled
    when they are first called. This can go when a ZeRO run no longer has `torch._inductor.compile_fx` in sys.modules.
    """
    compiler: Any = importlib.import_module("deepspeed.runtime.compiler")
    compiler.compile = lambda: _compiled_on_first_call


def _compiled_on_first_call(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = functools.cache(lambda: torch.compile(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


def device() -> torch.device:
    """This process's device."""
    return torch.device(get_accelerator().current_device_name())


def all_sum(values: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Sum over ranks, in place."""
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(values, group=group)
    return values


def all_reduce_wait(work: Any) -> None:
    """Wait for an all-reduce that was started before. Like `send_wait`, a function so that stacks of a hang show it."""
    work.wait()


def send_wait(work: Any) -> None:
    """Wait for a transfer between two ranks that was started before."""
    work.wait()


class RunningSum:
    """A sum over ranks, in place, that was started and is waited for when it is read: other work runs meanwhile."""

    def __init__(self, values: torch.Tensor, group: Any, ranks: int) -> None:
        """`group`: of these ranks. Collective if there are several."""
        self._values = values
        self._work = dist.all_reduce(values, group=group, async_op=True) if ranks > 1 else None

    @functools.cached_property
    def values(self) -> torch.Tensor:
        """The sum. On an accelerator the stream waits, not the host."""
        if self._work is not None:
            all_reduce_wait(self._work)
        return self._values


class HostSum:
    """A sum of whole numbers over ranks, in host memory: started at once, and waited for when it is read.

    Nothing waits for the device, and the first forward pass runs meanwhile.
    """

    def __init__(self, own: int, group: Any, ranks: int) -> None:
        """`group`: a gloo group of these ranks. Collective if there are several."""
        self._sum = RunningSum(torch.tensor(own), group, ranks)

    @functools.cached_property
    def total(self) -> int:
        """The sum."""
        return int(self._sum.values)


def all_max(values: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Maximum over ranks, in place; tensors in host memory need a gloo group."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX, group=group)
    return values


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """The JSON values of all ranks of the group, on every rank: tuples come back as lists, keys as text.

    Values travel as JSON because unpickling what arrives on a socket would run a stranger's code.
    """
    if not _is_shared(group):
        return [value]
    own = _to_bytes(value, group)
    size = torch.tensor([own.numel()], device=own.device)
    sizes = [torch.empty_like(size) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(sizes, size, group=group)
    lengths = [_checked(int(each)) for each in sizes]
    rows = [torch.empty(max(lengths), dtype=torch.uint8, device=own.device) for _ in lengths]
    padded = torch.nn.functional.pad(own, (0, max(lengths) - own.numel()))
    torch.distributed.all_gather(rows, padded, group=group)
    return [_from_bytes(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def broadcast_object(value: Any, group: Any = None) -> Any:
    """Rank 0's JSON value, on every rank of the group: tuples come back as lists, keys as text."""
    if not _is_shared(group):
        return value
    is_source = torch.distributed.get_rank() == 0
    own = _to_bytes(value if is_source else None, group)
    size = torch.tensor([own.numel()], device=own.device)
    torch.distributed.broadcast(size, src=0, group=group)
    row = own if is_source else torch.empty(_checked(int(size)), dtype=torch.uint8, device=own.device)
    torch.distributed.broadcast(row, src=0, group=group)
    return _from_bytes(row)


def _is_shared(group: Any) -> bool:
    return bool(dist.is_initialized()) and torch.distributed.get_world_size(group) > 1


def _to_bytes(value: Any, group: Any) -> torch.Tensor:
    data = bytearray(json.dumps(value).encode())
    _checked(len(data))
    place = torch.device("cpu") if torch.distributed.get_backend(group) == "gloo" else device()
    return torch.frombuffer(data, dtype=torch.uint8).to(place)


def _from_bytes(row: torch.Tensor) -> Any:
    return json.loads(row.cpu().numpy().tobytes())


def _checked(length: int) -> int:
    if not 0 < length <= JSON_LIMIT_BYTES:
        raise ValueError(f"a value of {length} bytes between ranks; 1 to {JSON_LIMIT_BYTES} bytes are allowed")
    return length


def host_group() -> Any:
    """A gloo group of all ranks, for exchanges that must not wait for the device. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return torch.distributed.new_group(backend="gloo")
