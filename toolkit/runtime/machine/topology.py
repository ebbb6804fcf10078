"""Names, memory and links of this host's accelerators, in words; through nvidia-ml-py where it is installed."""

from __future__ import annotations

import torch


def device_count() -> int:
    """Accelerators that torch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def describe() -> list[str]:
    """One line a fact."""
    if not device_count():
        return ["no accelerator: processes on the CPU are measured"]
    try:
        import pynvml
    except ImportError:
        return ["nvidia-ml-py is not installed, so links and topology are not read: pip install 'zero-toolkit[gpu]'"]
    try:
        pynvml.nvmlInit()
        return [_line(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        return [f"the NVIDIA driver does not answer ({error}); links and topology are not read"]


def _line(nvml: object, index: int) -> str:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)  # type: ignore[attr-defined]
    memory = nvml.nvmlDeviceGetMemoryInfo(handle).total  # type: ignore[attr-defined]
    links = sum(_active(nvml, handle, link) for link in range(18))
    name = nvml.nvmlDeviceGetName(handle)  # type: ignore[attr-defined]
    return f"device {index}: {name}, {memory / 2**30:.1f} GiB, {links} NVLinks up"


def _active(nvml: object, handle: object, link: int) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, link))  # type: ignore[attr-defined]
    except nvml.NVMLError:  # type: ignore[attr-defined]
        return False
