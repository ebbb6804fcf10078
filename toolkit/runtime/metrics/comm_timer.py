"""Bytes that this process's collectives send, and the time it is blocked in them, measured without synchronisation.

On a CPU the blocked time is all of the communication. On an accelerator collectives return at once: the blocked time is
what the host waits for, and the clock's events on the device measure the rest. DeepSpeed 0.19.8's own comms logger
synchronises the device at every collective, which slows the run it measures.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import deepspeed.comm.comm as comm
import torch

from toolkit.runtime.metrics.step_clock import RECEIVE, Clock, HostClock


@dataclass(frozen=True)
class Kind:
    """Where a collective of DeepSpeed's backend has its payload and group, and how many bytes it sends."""

    payload: str
    """Name of the argument with this rank's input."""
    place: int
    """Its position among positional arguments."""
    group_place: int
    sent: Callable[[int, int], float]
    """(payload bytes, ranks) → bytes that a rank sends in a ring algorithm."""


def _all_but_one(size: int, ranks: int) -> float:
    return size * (ranks - 1) / ranks


def _to_all_others(size: int, ranks: int) -> float:
    return size * (ranks - 1)


KINDS = {
    "all_reduce": Kind("tensor", 0, 2, lambda size, ranks: 2 * _all_but_one(size, ranks)),
    "all_reduce_coalesced": Kind("tensors", 0, 2, lambda size, ranks: 2 * _all_but_one(size, ranks)),
    "reduce_scatter": Kind("input_list", 1, 3, _all_but_one),
    "reduce_scatter_tensor": Kind("input_tensor", 1, 3, _all_but_one),
    "reduce": Kind("tensor", 0, 3, _all_but_one),
    "all_gather": Kind("tensor", 1, 2, _to_all_others),
    "all_gather_into_tensor": Kind("input_tensor", 1, 2, _to_all_others),
    "all_gather_coalesced": Kind("input_tensors", 1, 2, _to_all_others),
    "broadcast": Kind("tensor", 0, 2, _all_but_one),
    "all_to_all_single": Kind("input", 1, 4, _all_but_one),
    "all_to_all": Kind("input_tensor_list", 1, 2, _all_but_one),
    "send": Kind("tensor", 0, 2, lambda size, ranks: size),
    "isend": Kind("tensor", 0, 2, lambda size, ranks: size),
    "recv": Kind("tensor", 0, 2, lambda size, ranks: 0),
    "irecv": Kind("tensor", 0, 2, lambda size, ranks: 0),
    "barrier": Kind("", 9, 0, lambda size, ranks: 0),
}
REDUCES = frozenset({"all_reduce", "all_reduce_coalesced", "reduce_scatter", "reduce_scatter_tensor", "reduce"})
GATHERS = frozenset({"all_gather", "all_gather_into_tensor", "all_gather_coalesced", "broadcast"})


@dataclass
class Tally:
    """Totals of the collectives of one kind and purpose."""

    calls: int = 0
    bytes: float = 0.0
    seconds: float = 0.0


@dataclass
class Traffic:
    """Totals since the last `take`."""

    seconds: float = 0.0
    """Time that this rank was blocked in collectives."""
    tallies: dict[str, Tally] = field(default_factory=dict)


class CommTimer:
    """Wraps DeepSpeed's communication backend and times its collectives."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._traffic = Traffic()
        self._axes: dict[Any, tuple[bool, int]] = {}
        self.clock: Clock = HostClock()
        self.inner_ranks = 1
        """Number of consecutive ranks that hold the shards of one stage or the tokens of one sequence."""

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._backend, name)
        if name not in KINDS:
            return attribute
        timed = self._timed(name, attribute)
        self.__dict__[name] = timed  # from now on found without `__getattr__`
        return timed

    def _timed(self, name: str, collective: Any) -> Any:
        kind, label = KINDS[name], name[1:] if name in ("isend", "irecv") else name

        def run(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group", args[kind.group_place] if len(args) > kind.group_place else None)
            inner, ranks = self._place(group)
            part = self._purpose(name, inner=inner)
            payload = kwargs.get(kind.payload, args[kind.place] if len(args) > kind.place else None)
            start = time.perf_counter()
            self.clock.enter(part)
            try:
                work = collective(*args, **kwargs)
            finally:
                self.clock.leave()
                seconds = time.perf_counter() - start
                tally = self._count(f"{label}/{'pp_comm' if part == RECEIVE else part}", seconds)
                tally.calls += 1
                tally.bytes += kind.sent(size_of(payload), ranks)
            if not isinstance(work, torch.distributed.Work):
                return work
            return _Work(work, self, tally, part, start, seconds)

        return run

    def _count(self, name: str, seconds: float) -> Tally:
        tally = self._traffic.tallies.setdefault(name, Tally())
        tally.seconds += seconds
        self._traffic.seconds += seconds
        return tally

    def _place(self, group: Any) -> tuple[bool, int]:
        """(whether a group is inside one stage of one replica, its size)."""
        if group not in self._axes:
            own = group if group is not None else torch.distributed.group.WORLD
            ranks = torch.distributed.get_process_group_ranks(own)
            inner = self.inner_ranks > 1 and len(ranks) > 1 and len({rank // self.inner_ranks for rank in ranks}) == 1
            self._axes[group] = (inner, len(ranks))
        return self._axes[group]

    def _purpose(self, name: str, *, inner: bool) -> str:
        """The part of a step that a collective belongs to, by its kind, its group and the enclosing part."""
        around = self.clock.part_name
        if name.startswith("all_to_all"):
            return "sp_comm"
        if name in ("send", "isend"):
            return "pp_comm"
        if name in ("recv", "irecv"):
            return RECEIVE
        if inner and around in ("forward", "backward", "pp_comm"):
            return "tp_comm"
        if name in REDUCES and around in ("backward", "grad_sync", "optimizer"):
            return "grad_sync"
        if name in GATHERS and around in ("forward", "backward", "optimizer"):
            return "param_gather"
        return "agree"

    @contextlib.contextmanager
    def held(self, part: str) -> Iterator[None]:
        """Time communication that does not go through DeepSpeed."""
        start = time.perf_counter()
        self.clock.enter(part)
        try:
            yield
        finally:
            self.clock.leave()
            self._traffic.seconds += time.perf_counter() - start

    def waited(self, tally: Tally, part: str, start: float, held: float, seconds: float) -> None:
        """Record the wait for an asynchronous collective."""
        tally.seconds += seconds
        self._traffic.seconds += seconds
        self.clock.hide(part, max(0.0, time.perf_counter() - start - held - seconds))

    def take(self) -> Traffic:
        """Totals since the last call."""
        traffic, self._traffic = self._traffic, Traffic()
        return traffic


class _Work:
    """Wraps the handle of an asynchronous collective and times its `wait`."""

    def __init__(self, work: Any, timer: CommTimer, tally: Tally, part: str, start: float, held: float) -> None:
        self._work, self._timer, self._tally, self._part = work, timer, tally, part
        self._start, self._held = start, held

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait like the wrapped handle."""
        began = time.perf_counter()
        self._timer.clock.enter(self._part)
        try:
            return self._work.wait(*args, **kwargs)
        finally:
            self._timer.clock.leave()
            seconds = time.perf_counter() - began
            self._timer.waited(self._tally, self._part, self._start, self._held, seconds)


def size_of(payload: Any) -> int:
    """Bytes of a tensor, or of a list of tensors."""
    if isinstance(payload, torch.Tensor):
        return payload.numel() * payload.element_size()
    return sum(size_of(item) for item in payload) if isinstance(payload, list | tuple) else 0


def install(clock: Clock, inner_ranks: int) -> CommTimer:
    """Time all collectives of this process from now on.

    Replaces `deepspeed.comm.comm.cdb`, the backend that every call of deepspeed.comm goes through in 0.19.8, which has
    no hook for it. If the name changes, `collectives` in metrics.jsonl stays empty.
    """
    timer = CommTimer(comm.cdb)
    timer.clock, timer.inner_ranks = clock, inner_ranks
    comm.cdb = timer
    return timer
