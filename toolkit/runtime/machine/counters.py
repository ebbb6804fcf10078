"""Hardware counters, sampled by a thread during training: the host's, and NVIDIA's if there is a device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch
from deepspeed.accelerator import get_accelerator

INTERVAL_SECONDS = 1.0
ALL_LINKS = 0xFFFFFFFF
"""Scope of an NVML field: the sum over all links of a device."""
Read = Callable[[], Mapping[str, float]]


class Counters:
    """Means of all counters since the last `take`."""

    def __init__(self, reads: list[Read], interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._reads, self._interval = reads, interval_seconds
        self._lock = threading.Lock()
        self._sums: dict[str, tuple[float, int]] = {}
        self._last: dict[str, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="counters", daemon=True)

    def start(self) -> None:
        """Start sampling."""
        self._sample()
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling."""
        self._ended.set()

    def take(self) -> dict[str, float]:
        """Means since the last call, or the previous means if there was no sample in between."""
        with self._lock:
            self._last |= {name: total / count for name, (total, count) in self._sums.items()}
            self._sums = {}
            return dict(self._last)

    def _watch(self) -> None:
        while not self._ended.wait(self._interval):
            self._sample()

    def _sample(self) -> None:
        values = {name: value for read in self._reads for name, value in read().items()}
        with self._lock:
            for name, value in values.items():
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = (total + value, count + 1)


def host_reader() -> Read:
    """CPU and memory of this process."""
    process = psutil.Process()
    process.cpu_percent()  # the first call only sets the reference

    def read() -> Mapping[str, float]:
        return {"cpu_percent": process.cpu_percent(), "host_memory_bytes": float(process.memory_info().rss)}

    return read


def nvidia_reader(nvml: Any, uuid: str) -> Read:
    """Utilisation, memory bandwidth, power, temperature and link traffic of one NVIDIA device.

    Counters that the device does not support are left out.
    """
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)

    def utilisation() -> Mapping[str, float]:
        rates = nvml.nvmlDeviceGetUtilizationRates(handle)
        return {"device_percent": float(rates.gpu), "device_bandwidth_percent": float(rates.memory)}

    def power() -> Mapping[str, float]:
        return {"power_watts": nvml.nvmlDeviceGetPowerUsage(handle) / 1000}

    def temperature() -> Mapping[str, float]:
        degrees = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        return {"temperature_celsius": float(degrees)}

    def pcie() -> Mapping[str, float]:
        ways = (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
        return {"pcie_bytes_per_second": 1024.0 * sum(nvml.nvmlDeviceGetPcieThroughput(handle, way) for way in ways)}

    nvlink = _nvlink(nvml, handle)

    def read() -> Mapping[str, float]:
        found: dict[str, float] = {}
        for one in (utilisation, power, temperature, pcie, nvlink):
            with contextlib.suppress(nvml.NVMLError):
                found |= one()
        return found

    return read


def _nvlink(nvml: Any, handle: Any) -> Read:
    """Bytes per second over all NVLinks, from cumulative counters in KiB."""
    ways = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
    fields = [(way, ALL_LINKS) for way in ways]
    before: list[tuple[int, int]] = []

    def read() -> Mapping[str, float]:
        values = nvml.nvmlDeviceGetFieldValues(handle, fields)
        if any(value.nvmlReturn != nvml.NVML_SUCCESS for value in values):
            return {}
        now = (sum(int(value.value.ullVal) for value in values), int(values[0].timestamp))
        last, before[:] = list(before), [now]
        if not last or now[1] <= last[0][1]:
            return {}
        return {"nvlink_bytes_per_second": 1024.0 * (now[0] - last[0][0]) / ((now[1] - last[0][1]) / 1e6)}

    return read


def make_counters() -> tuple[Counters, str]:
    """(counters for this process's device, message about missing ones or an empty string)."""
    reads, missing = [host_reader()], ""
    if get_accelerator().device_name() == "cuda":
        try:
            import pynvml

            # By UUID: NVML numbers all devices of the host, CUDA only those that are visible to the process.
            device = torch.cuda.get_device_properties(get_accelerator().current_device())
            reads.append(nvidia_reader(pynvml, f"GPU-{device.uuid}"))
        except ImportError:
            missing = "device counters need nvidia-ml-py: pip install 'zero-toolkit[gpu]'"
        except pynvml.NVMLError as error:
            missing = f"device counters are left out: {error}"
    return Counters(reads), missing
