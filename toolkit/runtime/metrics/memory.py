"""Peak memory of a step: the allocator's peak on an accelerator, the bytes of live tensors on a CPU."""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from deepspeed.accelerator import get_accelerator
from torch.profiler import ProfilerActivity, profile

from toolkit.runtime.metrics.step_clock import Clock, NoClock

SAMPLED_STEP = 2
"""The step that is measured on a CPU: optimizer states are created in step 1, so step 2 is typical."""


@dataclass(frozen=True)
class MemoryPeak:
    """Peak of one step on this rank."""

    bytes: int
    reserved_bytes: int
    """What the accelerator's allocator held at that peak, fragments included; 0 on a CPU."""


class MemoryMeter:
    """Peak bytes of this process's tensors, and their purpose."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.peak_bytes = 0
        """Of the last step on an accelerator; of the measured step on a CPU."""
        self.largest_bytes = 0
        """Largest peak of all steps."""
        self.reserved_bytes = 0
        """What the accelerator's allocator held at the peak of the last step, fragments included; 0 on a CPU."""
        self._clock = clock or NoClock()
        """Reports when the optimizer starts, which is the end of the backward pass."""
        self._standing: Standing | None = None
        self._after_backward = 0
        self._process = psutil.Process()  # made once: that reads three files

    def last(self) -> MemoryPeak:
        """Peak of the last step."""
        return MemoryPeak(self.peak_bytes, self.reserved_bytes)

    def parts(self) -> dict[str, int]:
        """Bytes of the peak by part; empty without a clock, or before the measured step."""
        if self._standing is None or not self._after_backward:
            return {}
        return parts(self._standing, self._after_backward, self.peak_bytes)

    def now_bytes(self) -> int:
        """Bytes allocated on the accelerator now; on a CPU, the resident memory of the process."""
        accelerator = get_accelerator()
        if accelerator.device_name() == "cpu":
            return int(self._process.memory_info().rss)
        return int(accelerator.memory_allocated())

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Measure a step, counted from 1."""
        accelerator = get_accelerator()
        sampled = number == SAMPLED_STEP
        with self._moments() if sampled else contextlib.nullcontext():
            if accelerator.device_name() != "cpu":
                accelerator.reset_peak_memory_stats()  # else the peak of building the model stays for ever
                yield
                self.peak_bytes = int(accelerator.max_memory_allocated())
                self.reserved_bytes = int(accelerator.max_memory_reserved())
            elif sampled:
                storages = _live_storages()
                before = sum(storage.nbytes() for storage in storages)
                with (
                    _Frees(storages) as frees,
                    profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch,
                ):
                    del storages
                    yield
                self.peak_bytes = before + _largest_growth(watch, frees.events)
            else:
                yield
                self.peak_bytes = self.peak_bytes or live_tensor_bytes()
            self.largest_bytes = max(self.largest_bytes, self.peak_bytes)

    @contextlib.contextmanager
    def _moments(self) -> Iterator[None]:
        """Count the bytes before a step, and at the end of its last backward pass."""
        self._standing = standing(_held_bytes(), get_accelerator().device_name())
        self._clock.watcher = self._look
        try:
            yield
        finally:
            self._clock.watcher = None

    def _look(self, part: str) -> None:
        if part == "optimizer":
            self._after_backward = _held_bytes()


def _held_bytes() -> int:
    """Bytes of live tensors now."""
    accelerator = get_accelerator()
    return live_tensor_bytes() if accelerator.device_name() == "cpu" else int(accelerator.memory_allocated())


def live_tensor_bytes() -> int:
    """Bytes of the storages of all live tensors; each storage is counted once."""
    return sum(storage.nbytes() for storage in _live_storages())


def _live_storages() -> list[torch.UntypedStorage]:
    storages: dict[int, torch.UntypedStorage] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading the class of some objects warns of deprecations
        for item in gc.get_objects():
            if isinstance(item, torch.Tensor):
                _add(storages, item)
                if item.is_leaf and item.grad is not None:
                    _add(storages, item.grad)
    return list(storages.values())


def _add(storages: dict[int, torch.UntypedStorage], tensor: torch.Tensor) -> None:
    if tensor.is_meta:  # has a size, but no bytes
        return
    with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse tensors have no storage
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage


class _Frees:
    """When storages that exist already are freed: torch 2.13's profiler reports frees of what it saw allocated only."""

    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self.events: list[tuple[int, int]] = []
        """Moments in nanoseconds, on the profiler's clock, and bytes as negative numbers."""
        self._finalizers = [weakref.finalize(storage, self._note, storage.nbytes()) for storage in storages]

    def _note(self, size: int) -> None:
        self.events.append((time.time_ns(), -size))

    def __enter__(self) -> _Frees:
        return self

    def __exit__(self, *_: object) -> None:
        for finalizer in self._finalizers:
            finalizer.detach()


def _largest_growth(watch: profile, frees: Sequence[tuple[int, int]] = ()) -> int:
    """Largest sum of allocations minus frees in a profile; `frees`: those of what was allocated before it.

    torch 2.13 has no peak counter for the CPU; its profiler's `[memory]` events, a private attribute, are the source.
    """
    results: Any = watch.profiler.kineto_results  # type: ignore[union-attr]
    events = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    total, peak = 0, 0
    for _, size in sorted([*events, *frees], key=lambda event: event[0]):
        total += size
        peak = max(peak, total)
    return peak


@dataclass(frozen=True)
class Standing:
    """Bytes that are allocated between steps."""

    weights: int
    optimizer: int
    """Masters and moments, without those that are weights themselves."""
    all: int


def parts(standing: Standing, after_backward: int, peak: int) -> dict[str, int]:
    """Bytes of the peak by part; they sum to the peak."""
    gradients = max(0, min(after_backward, peak) - standing.all)
    return {
        "weights": standing.weights,
        "optimizer": standing.optimizer,
        "gradients": gradients,
        "buffers": max(0, standing.all - standing.weights - standing.optimizer),
        "activations": max(0, peak - standing.all - gradients),
    }


def standing(all_bytes: int, kind: str) -> Standing:
    """Bytes allocated now on this kind of device. Finds all live models and optimizers of the process."""
    weights: dict[int, int] = {}
    optimizer: dict[int, int] = {}
    models, optimizers = _living()
    for model in models:
        for parameter in model._parameters.values():
            # Under ZeRO 3 `ds_tensor` is the shard; the parameter itself holds only what is gathered now.
            _add_on(weights, getattr(parameter, "ds_tensor", parameter), kind)
    for one in optimizers:
        for tensor in _tensors(one):
            _add_on(optimizer, tensor, kind)
    own = sum(size for place, size in optimizer.items() if place not in weights)
    return Standing(sum(weights.values()), own, all_bytes)


def _living() -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading the class of some objects warns of deprecations
        objects = gc.get_objects()
        models = [item for item in objects if isinstance(item, torch.nn.Module)]
        return models, [item for item in objects if isinstance(item, torch.optim.Optimizer)]


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for master, state in optimizer.state.items():  # ZeRO 3 has its masters only here
        yield from (value for value in (master, *state.values()) if isinstance(value, torch.Tensor))


def _add_on(storages: dict[int, int], tensor: torch.Tensor | None, kind: str) -> None:
    if tensor is None or tensor.device.type != kind:
        return
    storage = tensor.untyped_storage()
    if storage.nbytes():
        storages[storage.data_ptr()] = storage.nbytes()
