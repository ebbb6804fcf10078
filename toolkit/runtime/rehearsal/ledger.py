"""The ledger of a rehearsal: live bytes by part, FLOPs, waits of the host, copies and collectives, with call sites."""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as td
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from toolkit.runtime.rehearsal.fake_device import waits
from toolkit.runtime.rehearsal.known_results import SLICE, Call, KnownResults, sliced
from toolkit.runtime.rehearsal.reads import ANSWERS, INSIDE, call_site
from toolkit.runtime.rehearsal.report import PARTS, WIDE, Collective, Group, Key, LargeTensor, Moment, Phase

DEVICE = torch.ops.prim.device.default
LARGEST = 10
"""Tensors at the peak that are listed."""
GATHERS = ("partition_parameters.py", "partitioned_param_coordinator.py")
"""Files of DeepSpeed that gather parameters under ZeRO 3."""
HEAD_LOSS = "toolkit/runtime/models/head_loss.py"
"""Computes the loss from blocks of logits, and the head's gradients."""
LINEAR = "deepspeed/runtime/zero/linear.py"
"""DeepSpeed's linear layer, whose tensors are activations."""
PEERS = ("send", "recv_", "broadcast_", "reduce_")


@dataclass(slots=True)
class Storage:
    """What is known of a live storage."""

    device: str
    bytes: int
    part: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    operator: Any
    place: str
    """Module or line of code."""
    reference: Any
    """Tells when it is freed."""

    @property
    def where(self) -> str:
        """Operator and place."""
        return f"{self.operator} {self.place}"


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator of a rank, in the forward pass and in autograd's thread."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here. torch 2.13 would enter and leave a guard around every operator: 20 µs each."""
        return False

    def __init__(
        self, device: str, results: KnownResults, vocabulary: Iterable[int], lengths: Iterable[int] = ()
    ) -> None:
        """`device`: type of the plan's device. `vocabulary`: sizes of the last dimension that mark logits.

        `lengths`: sizes that are lengths of sequences; tensors with two such dimensions are counted.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.part = "temporary"
        """Part that new tensors belong to, unless their shape or their call site says more."""
        self.module = ""
        """Path of the module whose forward or backward pass runs."""
        self.place: Moment = ()
        """Part of the step, micro-batch, and module with its layer's number left out."""
        self.repeats = False
        """Whether what happens now happens again with every further micro-batch."""
        self.live: dict[int, Storage] = {}
        self._vocabulary, self._lengths = frozenset(vocabulary), frozenset(lengths)
        self._now = {"cpu": 0, device: 0}
        self._by_part = dict.fromkeys(PARTS, 0)
        self._at_peak = False
        self._groups: dict[str, Group] = {}
        self._results = results
        self._operator: Any = ""
        self._begin()
        waits.listener = self.wait

    def _begin(self) -> None:
        self._started = time.process_time()
        self._peaks = dict(self._now)
        self._snapshot: list[Storage] = list(self.live.values())
        self._peak_at: tuple[Any, ...] = ()
        self._operators = 0
        self._counts: dict[Key, int] = {}
        self._repeated: dict[Key, float] = {}
        self._collectives: list[Collective] = []
        self._moments: dict[Moment, tuple[int, tuple[int, ...]]] = {}
        self._moments[("before",)] = (self._now[self.device], tuple(self._by_part.values()))

    def finish(self, name: str, micro_batches: int = 1) -> Phase:
        """The phase since the last call; starts the next one. `micro_batches`: as many as were counted as repeated."""
        self._note_peak()
        parts = dict.fromkeys(PARTS, 0)
        own = [storage for storage in self._snapshot if storage.device == self.device]
        for storage in own:
            parts[storage.part] += storage.bytes
        own.sort(key=lambda storage: -storage.bytes)
        phase = Phase(
            name=name,
            device_peak_bytes=self._peaks[self.device],
            host_peak_bytes=self._peaks["cpu"],
            cpu_seconds=time.process_time() - self._started,
            operators=self._operators,
            counts=self._counts,
            repeated={key: count / micro_batches for key, count in self._repeated.items()},
            collectives=self._collectives,
            parts=parts,
            peak_at=" ".join(map(str, self._peak_at)),
            largest=[
                LargeTensor(s.shape, str(s.dtype).removeprefix("torch."), s.bytes, s.part, s.where)
                for s in own[:LARGEST]
            ],
            moments={moment: parts for moment, (_, parts) in self._moments.items()},
        )
        self._begin()
        return phase

    def _add(self, key: Key, count: int) -> None:
        self._counts[key] = self._counts.get(key, 0) + count
        if self.repeats:
            self._repeated[key] = self._repeated.get(key, 0) + count

    @property
    def flops(self) -> int:
        """Floating-point operations of the phase so far."""
        return self._counts.get(("flops",), 0)

    def add_flops(self, count: int) -> None:
        """Count floating-point operations."""
        if count:
            self._add(("flops",), count)

    def wait(self, kind: str) -> None:
        """Count a wait of the host for the device."""
        self._add(("sync", f"{kind} at {call_site()}"), 1)

    def relabel(self, tensors: Iterable[Any], part: str, *, but: Sequence[str] = ()) -> None:
        """Move the storages of these tensors to a part, unless they belong to one of the parts `but`."""
        for tensor in tensors:
            storage = self.live.get(tensor.untyped_storage()._cdata) if isinstance(tensor, FakeTensor) else None
            if storage is not None and storage.part not in but:
                self._relabel(storage, part)

    def relabel_rest(self, known: set[int], part: str) -> None:
        """Move every storage that is not one of these to a part."""
        for key, storage in self.live.items():
            if key not in known:
                self._relabel(storage, part)

    def _relabel(self, storage: Storage, part: str) -> None:
        if storage.device == self.device:
            self._by_part[storage.part] -= storage.bytes
            self._by_part[part] += storage.bytes
        storage.part = part

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:  # asked about as often as all operators together
            return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        kwargs = kwargs or {}
        self._operators += 1
        answer = ANSWERS.get(func)
        if answer is not None:
            out = answer(self, args, kwargs)
            if isinstance(out, torch.Tensor):
                self._operator = func
                self.count(out)
            if out is not NotImplemented:
                return out
        elif func.namespace in ("c10d", "_c10d_functional"):
            self._collective(func, args, kwargs)
            if func in self._results.collectives and self.device != "cpu":
                return self._results.collectives[func].again(args)
        if func is SLICE and not kwargs and type(args[0]) is FakeTensor and args[0].constant is None:
            out = sliced(*args).made(args[:1], args[0].fake_mode)
            self.count(out)
            return out
        held = self._held_inside(func, args)
        call = Call(func, args, kwargs, self._results.mode)
        known = self._results.find(call)
        if known is not None:
            out = known.made(call.tensors, call.mode)
            self.add_flops(known.flops)
        else:
            out = self._run(func, args, kwargs, call)
        self._operator = func
        if isinstance(out, torch.Tensor):
            self.count(out)
        elif isinstance(out, list | tuple):
            for one in out:
                if isinstance(one, torch.Tensor):
                    self.count(one)
        del held
        return out

    def _run(self, func: Any, args: Any, kwargs: Any, call: Call) -> Any:
        """Run an operator whose result is not known, and remember it."""
        out = func(*args, **kwargs)
        counted = flop_registry.get(func._overloadpacket)
        flops = int(counted(*args, **kwargs, out_val=out)) if counted is not None else 0
        self.add_flops(flops)
        self._results.learn(func, call, out, flops)
        return out

    def _held_inside(self, func: Any, args: Any) -> list[torch.Tensor]:
        """What an operator holds while it runs on a CPU; on accelerators this is an estimate (docs/rehearsal.md)."""
        inside = INSIDE.get(func) if self.device == "cpu" else None
        if inside is None:
            return []
        self._operator, held = func, inside(args)
        for tensor in held:
            self.count(tensor)
        return held

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor's bytes until it is freed, if its storage is a new one."""
        device = tensor.fake_device.type if isinstance(tensor, FakeTensor) else tensor.device.type
        if device == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live:
            return
        size, shape = storage.nbytes(), tuple(tensor.shape)
        site = call_site()
        place = site if self.part == "optimizer" else f"in {self.module or site}"
        if sum(one in self._lengths for one in shape) > 1:
            self._add(("square", f"{list(shape)} by {self._operator} at {site}"), 1)
        freed = weakref.ref(storage, functools.partial(self._drop, key))
        made = Storage(device, size, self._part_of(shape, site), shape, tensor.dtype, self._operator, place, freed)
        self.live[key] = made
        self._now[device] = now = self._now[device] + size
        if device == self.device:
            self._by_part[made.part] += size
            self._note_moment((*self.place, site + WIDE if tensor.dtype == torch.float64 else site), now)
        if now > self._peaks[device]:
            self._peaks[device] = now
            if device == self.device:
                self._at_peak = True
                self._peak_at = (self._operator, place, "at", site) if site else (self._operator, place)

    def _note_moment(self, moment: Moment, now: int) -> None:
        known = self._moments.get(moment)
        if known is None or now > known[0]:
            self._moments[moment] = (now, tuple(self._by_part.values()))

    def _part_of(self, shape: tuple[int, ...], site: str) -> str:
        if len(shape) > 1 and shape[-1] in self._vocabulary and self.part == "activations":
            return "logits"
        if HEAD_LOSS in site and self.part == "activations":
            return "logits"
        if any(name in site for name in GATHERS):
            return "gathered"
        if "deepspeed/runtime" in site and LINEAR not in site and self.part == "activations":
            return "buckets"
        return "temporary" if self.part == "optimizer" else self.part

    def _drop(self, key: int, _reference: Any) -> None:
        self._note_peak()
        storage = self.live.pop(key, None)
        if storage is not None:
            self._now[storage.device] -= storage.bytes
            if storage.device == self.device:
                self._by_part[storage.part] -= storage.bytes

    def _note_peak(self) -> None:
        """Remember what is alive before the first tensor is freed after a new peak."""
        if self._at_peak:
            self._at_peak, self._snapshot = False, list(self.live.values())

    def _collective(self, func: Any, args: Any, kwargs: Any) -> None:
        kind = func._schema.name.split("::")[-1]
        if kind == "wait_tensor":
            return
        sides: list[list[torch.Tensor]] = []
        group, numbers = None, []
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                sides.append([value])
            elif isinstance(value, list | tuple):
                sides.append([one for one in _flat(value) if isinstance(one, torch.Tensor)])
            elif isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
                group = self._group(td.ProcessGroup.unbox(value))
            elif isinstance(value, int) and not isinstance(value, bool):
                numbers.append(value)
        # Inputs and outputs are given: the larger side is what is gathered, or what is reduced.
        tensors = max(sides, key=lambda side: sum(one.numel() for one in side), default=[])
        call = Collective(
            kind=kind.rstrip("_"),
            ranks=group if group is not None else Group(),
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            numel=sum(tensor.numel() for tensor in tensors),
            bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            peer=numbers[0] if kind in PEERS and numbers else None,
            site=sys.intern(call_site(2)),
        )
        self._collectives.append(call)
        self._add(("calls", call.kind, call.ranks, call.site), 1)
        self._add(("bytes", call.kind, call.ranks, call.site), call.bytes)

    def _group(self, group: td.ProcessGroup) -> Group:
        """The ranks of a group: one object however often it is used."""
        known = self._groups.get(group.group_name)
        if known is None:
            known = self._groups[group.group_name] = Group(td.get_process_group_ranks(group))
        return known

    def copied(self, source: Any, target: str, blocking: bool) -> None:
        """Count a copy between host and device."""
        origin = source.fake_device.type if isinstance(source, FakeTensor) else "cpu"
        if origin == target or self.device == "cpu":
            return
        if target == "cpu" and blocking:
            self.wait("copy to host")
        elif target == self.device:
            self._add(("copy", call_site()), source.numel() * source.element_size())


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value
