"""The clocks, and the counters of a device, where no device is needed to see that the arithmetic is right."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.runtime.machine.counters import Counters, host_reader, nvidia_reader
from toolkit.runtime.metrics.step_clock import DeviceClock, HostClock, part


class Stopwatch:
    """A device whose time is moved by hand, with events on streams as accelerators have them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stream = "main"
        self.waits = 0

    def current_stream(self) -> str:
        return self.stream

    def Event(self, *, enable_timing: bool) -> Any:  # noqa: N802 - as accelerators call it
        assert enable_timing
        event = SimpleNamespace(at=None)

        def synchronize() -> None:
            self.waits += 1

        event.record = lambda: setattr(event, "at", self.now)
        event.synchronize = synchronize
        event.elapsed_time = lambda later: (later.at - event.at) * 1000
        return event

    def run(self, clock: DeviceClock, name: str, seconds: float) -> None:
        with part(clock, name):
            self.now += seconds


def step(device: Stopwatch, clock: DeviceClock) -> None:
    device.run(clock, "forward", 1.0)
    with part(clock, "backward"):
        device.now += 2.0
        device.stream = "side"  # a reduction beside the backward pass
        with part(clock, "grad_sync"):
            device.now += 0.25
        device.stream = "main"
        device.run(clock, "grad_sync", 0.5)
    device.run(clock, "receive", 0.125)
    device.run(clock, "optimizer", 0.75)


def test_events_on_a_device_are_read_in_sampled_steps_only() -> None:
    device = Stopwatch()
    clock = DeviceClock(device)
    step(device, clock)
    unseen = clock.lap(sample_next=True)
    assert unseen.parts == {}
    assert device.waits == 0
    step(device, clock)
    lap = clock.lap(sample_next=False)
    seen = {name: seconds for name, seconds in lap.parts.items() if seconds}
    assert seen == pytest.approx(
        {"forward": 1.0, "backward": 2.25, "grad_sync": 0.5, "receive": 0.125, "optimizer": 0.75}
    )
    assert lap.hidden == pytest.approx({"grad_sync": 0.25})
    assert lap.receives == pytest.approx([0.125])
    assert device.waits == 2  # the last event, and that of the other stream: never one a collective
    step(device, clock)
    assert clock.lap(sample_next=False).parts == {}


def test_the_innermost_part_counts_and_saving_swallows_all() -> None:
    clock = HostClock()
    clock.lap(sample_next=False)
    with part(clock, "forward"), part(clock, "tp_comm"):
        time.sleep(0.02)
    with part(clock, "checkpoint"), part(clock, "grad_sync"):
        time.sleep(0.02)
    lap = clock.lap(sample_next=False)
    assert lap.parts["tp_comm"] >= 0.02
    assert lap.parts["checkpoint"] >= 0.02
    assert "grad_sync" not in lap.parts
    assert sum(lap.parts.values()) == pytest.approx(lap.wall_seconds, rel=1e-6)


def test_counters_of_the_host_are_sampled_beside_the_run() -> None:
    counters = Counters([host_reader()], interval_seconds=0.01)
    counters.start()
    time.sleep(0.1)
    taken = counters.take()
    counters.stop()
    assert taken.keys() == {"cpu_percent", "host_memory_bytes"}
    assert taken["host_memory_bytes"] > 2**20
    assert counters.take().keys() == taken.keys(), "the newest is kept where no sample fell in between"


class NvmlError(Exception):
    pass


def test_counters_of_a_device_leave_out_what_it_does_not_support() -> None:
    def unsupported(*_: Any) -> Any:
        raise NvmlError

    kib = iter([(100, 50), (1124, 50)])
    stamps = iter([0, 1_000_000])  # microseconds

    def links(handle: Any, fields: list[tuple[int, int]]) -> list[Any]:
        assert [scope for _, scope in fields] == [0xFFFFFFFF] * 2
        sent, stamp = next(kib), next(stamps)
        return [SimpleNamespace(nvmlReturn=0, timestamp=stamp, value=SimpleNamespace(ullVal=n)) for n in sent]

    nvml = SimpleNamespace(
        NVMLError=NvmlError, NVML_SUCCESS=0, NVML_TEMPERATURE_GPU=0, NVML_PCIE_UTIL_TX_BYTES=0,
        NVML_PCIE_UTIL_RX_BYTES=1, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX=1, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX=2,
        nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=90, memory=40),
        nvmlDeviceGetPowerUsage=lambda handle: 350_000, nvmlDeviceGetTemperature=unsupported,
        nvmlDeviceGetPcieThroughput=lambda handle, way: 1000 * (1 + way), nvmlDeviceGetFieldValues=links,
    )  # fmt: skip
    read = nvidia_reader(nvml, "GPU-0")
    usual = {"device_percent": 90.0, "device_bandwidth_percent": 40.0, "power_watts": 350.0}
    assert read() == usual | {"pcie_bytes_per_second": 3000 * 1024.0}
    assert read() == usual | {"pcie_bytes_per_second": 3000 * 1024.0, "nvlink_bytes_per_second": 1024 * 1024.0}


def test_names_are_those_of_the_real_library() -> None:
    """What the reader asks of NVIDIA's library is there; calling it needs a device."""
    nvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed (the extra `gpu`)")
    for name in (
        "NVMLError", "NVML_SUCCESS", "NVML_TEMPERATURE_GPU", "NVML_PCIE_UTIL_TX_BYTES", "NVML_PCIE_UTIL_RX_BYTES",
        "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", "nvmlInit",
        "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetTemperature", "nvmlDeviceGetPcieThroughput", "nvmlDeviceGetFieldValues",
    ):  # fmt: skip
        assert hasattr(nvml, name), name
