"""Results of operators on fake tensors, remembered by what they were called with.

torch 2.13's fake tensors have a cache of their own, whose keys take longer to make than the rest of a call: 110 µs per
operator, and nine tenths of a rehearsal. Layers repeat, so almost every call has been seen before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

aten = torch.ops.aten
PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
"""Types of arguments that are compared by value."""
NEVER = frozenset({aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.lift.default})
"""Operators that give a fake tensor its constant value."""
NAMESPACES = ("aten", "torch_attn")
"""Where operators are that are remembered: torch's own, and its attention over rows of several documents."""
UNSURE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
"""Tags of operators whose result does not follow from shapes, or that change the shape of an argument."""
NAMES_OF_SHAPE_CHANGES = ("set_", "resize_", "_resize_output_")
INDEX, SLICE = aten.index.Tensor, aten.slice.Tensor


@dataclass(slots=True, frozen=True)
class Result:
    """One tensor that an operator returned: an argument itself, a view of one, or a new tensor."""

    source: int
    """Number of the tensor argument that it is or that it shares its storage with; -1: it is new."""
    is_source: bool
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - a constant

    def made(self, tensors: Sequence[FakeTensor], mode: Any) -> FakeTensor:
        """The tensor for these arguments."""
        if self.is_source:
            return tensors[self.source]
        with torch._C._DisableTorchDispatch():
            if self.source < 0:
                meta = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
            else:
                storage = tensors[self.source].untyped_storage()
                meta = torch.empty(0, dtype=self.dtype, device="meta")
                meta.set_(storage, self.offset, self.shape, self.stride)
            return _fake(meta, self.device, mode)


@dataclass(slots=True, frozen=True)
class Outcome:
    """What a call returned."""

    results: tuple[Result | None, ...]
    kind: type | None
    """`list` or `tuple` of the results; None: a single one."""
    flops: int

    def made(self, tensors: Sequence[FakeTensor], mode: Any) -> Any:
        """The result for these arguments."""
        if self.kind is None:
            (only,) = self.results
            return None if only is None else only.made(tensors, mode)
        return self.kind(None if one is None else one.made(tensors, mode) for one in self.results)


@dataclass(slots=True, frozen=True)
class Sent:
    """What a collective of torch's fake process group returns: work that is done."""

    work: Any
    has_tensors: bool
    """Whether its first argument is returned, too."""

    def again(self, args: Any) -> Any:
        """The result for these arguments."""
        return (args[0], self.work) if self.has_tensors else self.work


class Call:
    """An operator with its arguments; `key` is None if its result can't be remembered."""

    __slots__ = ("key", "mode", "tensors")

    def __init__(self, func: Any, args: Any, kwargs: Any, mode: Any) -> None:
        """`mode`: that of new tensors, where no argument is a tensor."""
        self.tensors: list[FakeTensor] = []
        self.mode: Any = None
        self.key: tuple[Any, ...] | None = None
        parts: list[Any] = [func]
        comparable = _may_be_known(func, args) and self._add(parts, args) and self._add_named(parts, kwargs)
        if comparable and self.tensors:
            self.mode, self.key = self.tensors[0].fake_mode, tuple(parts)
        elif comparable:
            self.mode, self.key = mode, (*parts, torch.get_default_dtype())

    def _add_named(self, parts: list[Any], kwargs: dict[str, Any]) -> bool:
        if not kwargs:
            return True
        parts.append(tuple(kwargs))
        return self._add(parts, kwargs.values())

    def _add(self, parts: list[Any], values: Any) -> bool:
        """Append what tells a call from others; False if a value can't be compared."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.constant is not None:
                    return False
                self.tensors.append(value)
                parts += (value.dtype, value.shape, value.stride(), value.storage_offset(), value.fake_device)
            elif kind in PLAIN:
                parts += (kind, value)
            elif isinstance(value, list | tuple):
                parts += (kind, len(value))
                if not self._add(parts, value):
                    return False
            else:
                return False
        return True


class KnownResults:
    """Outcomes of calls that have been made, instead of the cache of a mode of fake tensors."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.collectives: dict[Any, Sent] = {}
        """What collectives have returned."""
        self._outcomes: dict[tuple[Any, ...], Outcome | None] = {}
        mode.cache_enabled = False

    def find(self, call: Call) -> Outcome | None:
        """The outcome of an equal call before; None if there is none, or none that can be made again."""
        return None if call.key is None else self._outcomes.get(call.key)

    def learn(self, func: Any, call: Call, out: Any, flops: int) -> None:
        """Remember the outcome of a call."""
        if func.namespace == "c10d":
            self.collectives[func] = Sent(out[-1] if isinstance(out, tuple) else out, isinstance(out, tuple))
        if call.key is not None and call.key not in self._outcomes:
            self._outcomes[call.key] = _outcome(call, out, flops)


_MAY_BE_KNOWN: dict[Any, bool] = {}


def sliced(given: FakeTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Result:
    """What `slice` returns. ZeRO 3 cuts buffers at thousands of places, so equal calls are rare."""
    places = range(given.shape[dim])[start:end:step]
    shape, stride = list(given.shape), list(given.stride())
    offset = int(given.storage_offset()) + places.start * stride[dim]
    shape[dim], stride[dim] = len(places), stride[dim] * step
    return Result(0, False, tuple(shape), tuple(stride), offset, given.dtype, given.fake_device)


def _may_be_known(func: Any, args: Any) -> bool:
    if func is INDEX:  # by numbers, not by a mask, whose true entries are counted
        return not any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    known = _MAY_BE_KNOWN.get(func)
    if known is None:
        known = _MAY_BE_KNOWN[func] = (
            func.namespace in NAMESPACES
            and func not in NEVER
            and not any(tag in func.tags for tag in UNSURE)
            and func._schema.name.split("::")[-1] not in NAMES_OF_SHAPE_CHANGES
        )
    return known


def _outcome(call: Call, out: Any, flops: int) -> Outcome | None:
    kind = type(out) if isinstance(out, list | tuple) else None
    if kind not in (None, list, tuple):
        return None
    results: list[Result | None] = []
    stores = {id(tensor): tensor.untyped_storage()._cdata for tensor in call.tensors}
    new: set[int] = set()
    for one in out if kind else [out]:
        if one is None:
            results.append(None)
            continue
        if type(one) is not FakeTensor or one.constant is not None or one.is_complex():
            return None
        number = next((n for n, tensor in enumerate(call.tensors) if tensor is one), None)
        if number is not None:
            results.append(Result(number, is_source=True))
            continue
        store = one.untyped_storage()._cdata
        source = next((n for n, tensor in enumerate(call.tensors) if stores[id(tensor)] == store), -1)
        offset = int(one.storage_offset())
        result = Result(source, False, tuple(one.shape), one.stride(), offset, one.dtype, one.fake_device)
        if source < 0:
            if store in new or offset or one.untyped_storage().nbytes() != _extent_bytes(one):
                return None
            new.add(store)
        results.append(result)
    return Outcome(tuple(results), kind, flops)


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _fake(meta: torch.Tensor, device: torch.device, mode: Any) -> FakeTensor:
    """`FakeTensor(mode, meta, device)` without its checks, which take as long as the rest."""
    make: Any = torch.Tensor._make_subclass
    fake: Any = make(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
    torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)  # DeepSpeed looks at the alignment of its buffers
    fake.__dict__.update(_attributes(mode))
    fake.fake_device = device
    return fake  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=1)
def _attributes(mode: Any) -> dict[str, Any]:
    """Attributes that the constructor of fake tensors sets, but for the device: one by one they take half its time."""
    with torch._C._DisableTorchDispatch():
        made = FakeTensor(mode, torch.empty(0, device="meta"), torch.device("cpu"))
    return {name: value for name, value in vars(made).items() if "device" not in name}
