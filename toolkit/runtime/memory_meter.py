"""Peak memory of a step: what the accelerator counts, or on a CPU the bytes of live tensors."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from deepspeed.accelerator import get_accelerator
from torch.profiler import ProfilerActivity, profile

SAMPLED_STEP = 2
"""On a CPU one step is watched: the first two differ, because optimizer states are made in the first."""


class MemoryMeter:
    """Largest number of bytes that tensors of this process held at one time."""

    def __init__(self) -> None:
        self.peak_bytes = 0

    def now_bytes(self) -> int:
        """Bytes that tensors hold on the accelerator now; on a CPU, what the process holds of the host's memory."""
        accelerator = get_accelerator()
        if accelerator.device_name() == "cpu":
            return int(psutil.Process().memory_info().rss)
        return int(accelerator.memory_allocated())

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Watch a step, counted from 1."""
        accelerator = get_accelerator()
        if accelerator.device_name() != "cpu":
            yield
            self.peak_bytes = int(accelerator.max_memory_allocated())
        elif number == SAMPLED_STEP:
            before = live_tensor_bytes()
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
                yield
            self.peak_bytes = before + _largest_growth(watch)
        else:
            yield
            self.peak_bytes = self.peak_bytes or live_tensor_bytes()


def live_tensor_bytes() -> int:
    """Bytes of all storages that live tensors have; each storage is counted once."""
    storages: dict[int, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at some objects' class warns of deprecations
        for item in gc.get_objects():
            if isinstance(item, torch.Tensor):
                _add(storages, item)
                if item.is_leaf and item.grad is not None:
                    _add(storages, item.grad)
    return sum(storages.values())


def _add(storages: dict[int, int], tensor: torch.Tensor) -> None:
    with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse and meta tensors have no storage
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()


def _largest_growth(watch: profile) -> int:
    """Highest sum of allocations minus frees since the watch began."""
    results: Any = watch.profiler.kineto_results  # type: ignore[union-attr]
    total, peak = 0, 0
    for event in results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
    return peak
