"""Measurements of this machine for the cost model: matmul rate, memory bandwidth, collectives by size.

All processes measure at the same time, so that they share cores, memory and links as in training.
"""

from __future__ import annotations

import multiprocessing
import queue
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from toolkit.launching.environment import set_safe_path
from toolkit.runtime.distributed.rendezvous import Meeting
from toolkit.runtime.machine import host_matmul
from toolkit.units import GIB, KIB, MIB

SIZES = (4 * KIB, 64 * KIB, MIB, 8 * MIB, 32 * MIB)
GPU_SIZES = (*SIZES, 256 * MIB, GIB)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
SECONDS_EACH = 0.3
"""Approximate time per measurement."""
TIMEOUT = timedelta(seconds=120)


@dataclass
class Measured:
    """Measurements of one machine or job."""

    processes: int
    backend: str
    device: str
    memory_bytes: int
    matmul_flops: float = 0.0
    memory_bytes_per_second: float = 0.0
    collectives: dict[str, dict[int, float]] = field(default_factory=dict)
    """Seconds inside a node by operation and bytes."""
    nodes: int = 1
    between: dict[int, float] = field(default_factory=dict)
    """Seconds of an all-reduce between nodes by bytes, with all devices of a node at once."""


@dataclass(frozen=True)
class Ring:
    """Ranks that communicate with each other; `group` None is the world."""

    group: Any
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def neighbour(self, rank: int, step: int) -> int:
        """The rank `step` positions further."""
        return self.ranks[(self.ranks.index(rank) + step) % self.size]


@dataclass(frozen=True)
class Stopwatch:
    """Times a call on a device while all ranks time the same call."""

    device: torch.device
    seconds_each: float

    def seconds(self, run: Callable[[], object], *, shared: bool = False) -> float:
        """Mean seconds per call; `shared`: every rank makes the same number of calls, as collectives need."""
        dist.barrier()
        run()
        calls = max(3, min(200, int(self.seconds_each / self._once(run))))
        if shared:
            agreed = torch.tensor([float(calls)], device=self.device)
            dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
            calls = int(agreed.item())
        started = time.perf_counter()
        for _ in range(calls):
            run()
        self._wait()
        return (time.perf_counter() - started) / calls

    def _once(self, run: Callable[[], object]) -> float:
        started = time.perf_counter()
        run()
        self._wait()
        return max(time.perf_counter() - started, 1e-7)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(processes: int, progress: Callable[[str, int, int], None], seconds_each: float = SECONDS_EACH) -> Measured:
    """Start this many processes on this machine, measure in all of them, and report progress."""
    set_safe_path()
    context = multiprocessing.get_context("spawn")
    reports = context.Queue()
    port = _free_port()
    workers = [
        context.Process(target=_worker, args=(rank, processes, port, reports, seconds_each), daemon=True)
        for rank in range(processes)
    ]
    for worker in workers:
        worker.start()
    try:
        return _listen(reports, workers, progress)
    finally:
        for worker in workers:
            worker.join(timeout=10)
            if worker.is_alive():
                worker.terminate()


def measure_job(
    rank: int,
    world: int,
    per_node: int,
    env: Mapping[str, str],
    progress: Callable[[str, int, int], None],
    seconds_each: float = SECONDS_EACH,
) -> Measured:
    """Measure as one rank of a job that a launcher has started, inside nodes and between them."""
    warnings.simplefilter("ignore", FutureWarning)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank % per_node)
    meeting = Meeting.from_env(env)
    store = meeting.open(rank, world, TIMEOUT, several_hosts=world > per_node, say=_warn)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        inside = _own_ring(rank, [range(first, first + per_node) for first in range(0, world, per_node)])
        across = _own_ring(rank, [range(place, world, per_node) for place in range(per_node)])
        clock = Stopwatch(torch.device("cuda" if cuda else "cpu"), seconds_each)
        return _measure_all(rank, inside, across, progress if rank == 0 else _silent, clock)
    finally:
        dist.destroy_process_group()


def _own_ring(rank: int, rings: Sequence[range]) -> Ring:
    """Create all groups (every rank must) and return the one that this rank is in."""
    made = [(tuple(ranks), dist.new_group(list(ranks))) for ranks in rings]
    return next(Ring(group, ranks) for ranks, group in made if rank in ranks)


def _silent(what: str, done: int, steps: int) -> None:
    """Discards progress: all ranks progress equally, and rank 0 reports."""


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # standard output is the cluster file


def _listen(reports: Any, workers: list[Any], progress: Callable[[str, int, int], None]) -> Measured:
    while True:
        try:
            kind, value = reports.get(timeout=2)
        except queue.Empty:
            failed = [worker.exitcode for worker in workers if worker.exitcode not in (None, 0)]
            if failed:
                raise RuntimeError(f"a measuring process ended with code {failed[0]}") from None
            continue
        if kind == "done":
            assert isinstance(value, Measured)
            return value
        progress(*value)


def _worker(rank: int, world: int, port: int, reports: Any, seconds_each: float) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames all_gather_into_tensor; both names work
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:
        torch.set_num_threads(max(1, (multiprocessing.cpu_count()) // world))
    store = Meeting(host="127.0.0.1", port=port).open(rank, world, TIMEOUT, several_hosts=False, say=_warn)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        clock = Stopwatch(torch.device("cuda" if cuda else "cpu"), seconds_each)
        progress = (lambda *what: reports.put(("progress", what))) if rank == 0 else _silent
        found = _measure_all(rank, Ring(None, tuple(range(world))), Ring(None, (rank,)), progress, clock)
        if rank == 0:
            reports.put(("done", found))
            reports.close()
            reports.join_thread()
    finally:
        dist.destroy_process_group()


def _measure_all(
    rank: int, inside: Ring, across: Ring, progress: Callable[[str, int, int], None], clock: Stopwatch
) -> Measured:
    sizes = GPU_SIZES if clock.device.type == "cuda" else SIZES
    names = COLLECTIVES if inside.size > 1 else ()
    steps = 2 + len(names) * len(sizes) + (len(sizes) if across.size > 1 else 0)
    done = 0

    def report(what: str) -> None:
        nonlocal done
        done += 1
        progress(what, done, steps)

    found = _describe(inside.size, clock.device)
    found.nodes = across.size
    found.matmul_flops = _matmul_flops(clock)
    report("matmul")
    found.memory_bytes_per_second = _memory_rate(clock)
    report("memory")
    for name in names:
        found.collectives[name] = {}
        for size in sizes:
            found.collectives[name][size] = clock.seconds(
                _collective(name, size, rank, inside, clock.device), shared=True
            )
            report(f"{name} {size:,} bytes")
    for size in sizes if across.size > 1 else ():
        found.between[size] = clock.seconds(_collective("all_reduce", size, rank, across, clock.device), shared=True)
        report(f"all_reduce between nodes {size:,} bytes")
    return found


def _describe(world: int, device: torch.device) -> Measured:
    if device.type == "cpu":
        return Measured(world, "cpu", "cpu", 0)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Measured(world, "rocm" if torch.version.hip else "cuda", properties.name, properties.total_memory)


def _matmul_flops(clock: Stopwatch) -> float:
    """Best rate over a few sizes, in the dtype that training uses on the device."""
    sides = (4096, 8192) if clock.device.type == "cuda" else (256, 512, 1024)
    host_matmul.switch(on=clock.device.type == "cpu" and not host_matmul.why_not())  # as `model.kernels: auto` does
    return max(_matmul_rate(side, clock) for side in sides)


def _matmul_rate(side: int, clock: Stopwatch) -> float:
    kind = torch.bfloat16 if clock.device.type == "cuda" else torch.float32
    a, b = (torch.randn(side, side, device=clock.device).to(kind) for _ in range(2))
    return 2 * side**3 / clock.seconds(lambda: torch.mm(a, b))


def _memory_rate(clock: Stopwatch) -> float:
    """Bytes per second of an element-wise operator on a tensor that is larger than the caches."""
    size = 2**28 if clock.device.type == "cuda" else 2**24
    source = torch.ones(size, device=clock.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / clock.seconds(lambda: torch.mul(source, 2.0, out=target))


def _collective(name: str, size: int, rank: int, ring: Ring, device: torch.device) -> Callable[[], object]:
    """One operation on `size` bytes in total (all-gather: of the result; reduce-scatter: of the input)."""
    count = max(ring.size, size // 4 // ring.size * ring.size)
    whole, part = torch.ones(count, device=device), torch.ones(count // ring.size, device=device)
    other = torch.empty_like(whole)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole, group=ring.group)
    if name == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=ring.group)
    if name == "reduce_scatter":
        return lambda: _reduce_scatter(part, whole, ring, device)
    if name == "all_to_all":
        return lambda: dist.all_to_all_single(other, whole, group=ring.group)
    return lambda: _exchange(whole, other, rank, ring)


def _reduce_scatter(part: torch.Tensor, whole: torch.Tensor, ring: Ring, device: torch.device) -> None:
    if device.type == "cuda":
        dist.reduce_scatter_tensor(part, whole, group=ring.group)
    else:  # gloo (torch 2.13) has no reduce-scatter; DeepSpeed all-reduces and keeps its part
        dist.all_reduce(whole, group=ring.group)


def _exchange(whole: torch.Tensor, other: torch.Tensor, rank: int, ring: Ring) -> None:
    """Every rank sends to the next, as pipeline stages do."""
    sending = dist.isend(whole, ring.neighbour(rank, 1), group=ring.group)
    dist.recv(other, ring.neighbour(rank, -1), group=ring.group)
    assert sending is not None
    sending.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
