"""Device kinds: memory, rates and links of one device. One row per kind; no number here is fitted."""

from __future__ import annotations

import difflib
import re
from dataclasses import KW_ONLY, dataclass

from toolkit.units import GB, GIB, TERA


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or one process's share of the CPU."""

    name: str
    """Name as in recipes and cluster files, e.g. `H100-SXM5-80GB`."""
    backend: str
    """`cuda`, `rocm`, `hpu` or `cpu`."""
    memory_bytes: int
    """Memory of one device."""
    peak_flops: float
    """Data-sheet peak of dense bf16 (fp32 on a CPU): the base of MFU."""
    matmul_flops: float
    """Best sustained matmul rate in the same type, not the data-sheet peak."""
    memory_bytes_per_second: float
    """Bandwidth of the device's own memory."""
    link_bytes_per_second: float
    """Bandwidth to other devices of the same node, in one direction."""
    host_bytes_per_second: float
    """Bandwidth to host memory, in one direction."""
    inter_gbps: float = 100.0
    """Usual network bandwidth to other nodes per device of this kind, Gbit/s."""
    fp8_matmul_flops: float = 0.0
    """Best sustained fp8 matmul rate; 0: no fp8."""
    multiprocessors: int = 108
    """Units that a matmul's tiles are spread over."""
    watts: float = 0.0
    """Power limit; 0: unknown, so the measured rate is used as it is."""
    board_watts: float = 0.0
    """Power of the board under load, for energy; 0: unknown."""
    power_cap: float = 1.0
    """Power limit set by the operator, relative to `watts`."""
    in_switch_reduction: bool = False
    """Whether the switch inside a node performs reductions (NVLS)."""
    flash_attention: bool = True
    """Whether FlashAttention 2 and bf16 tensor cores exist for it: since Ampere, not on V100 and T4."""
    link_domain: int = 8
    """Number of devices connected by the fast links: a node, or a rack (NVL72)."""


@dataclass(frozen=True)
class _DataSheet:
    """A row of the table below, in the units that vendors use."""

    name: str
    peak_tflops: float
    matmul_tflops: float
    memory_gib: float
    memory_tb_per_second: float
    link_gb_per_second: float
    host_gb_per_second: float
    inter_gbps: float
    fp8_matmul_tflops: float = 0.0
    _: KW_ONLY
    units: int
    watts: float = 0.0
    board_watts: float = 0.0
    backend: str = "cuda"
    nvls: bool = False
    bf16: bool = True
    domain: int = 8

    def device(self) -> Device:
        """This row in bytes, FLOPs and seconds."""
        return Device(
            name=self.name,
            backend=self.backend,
            memory_bytes=int(self.memory_gib * GIB),
            peak_flops=self.peak_tflops * TERA,
            matmul_flops=self.matmul_tflops * TERA,
            memory_bytes_per_second=self.memory_tb_per_second * TERA,
            link_bytes_per_second=self.link_gb_per_second * GB,
            host_bytes_per_second=self.host_gb_per_second * GB,
            inter_gbps=self.inter_gbps,
            fp8_matmul_flops=self.fp8_matmul_tflops * TERA,
            multiprocessors=self.units,
            watts=self.watts,
            board_watts=self.board_watts or self.watts,
            in_switch_reduction=self.nvls,
            flash_attention=self.bf16,
            link_domain=self.domain,
        )


# Columns: name, peak and best measured matmul (TFLOP/s), memory (GiB), memory bandwidth (TB/s), links to peers (GB/s),
# link to the host (GB/s), network (Gbit/s), best measured fp8 matmul (TFLOP/s).
# Sources: vendors' data sheets (peaks, memory, links, watts, multiprocessors); stas00/ml-engineering (measured matmul
# rates "MAMF" and network tables). Where no measured matmul rate is published, 0.8 of the peak is used, and 0.95 for
# GeForce cards, whose clocks exceed their data sheets (cuBLAS on an RTX 5060 Ti: 47 of 47). AMD's measured
# rates already include the effect of the power limit, so these rows give no watts: it would count twice. GeForce cards
# have no direct access to each other over PCIe: their traffic goes through host memory, at half the rate.
DEVICES: dict[str, Device] = {
    row.name: row.device()
    for row in (
        _DataSheet("T4", 65, 40, 16, 0.32, 12, 12, 25, units=40, watts=70, bf16=False),
        _DataSheet("V100-SXM2-16GB", 125, 100, 16, 0.9, 150, 12, 100, units=80, watts=300, bf16=False),
        _DataSheet("V100-SXM2-32GB", 125, 100, 32, 0.9, 150, 12, 100, units=80, watts=300, bf16=False),
        _DataSheet("RTX-2080-Ti", 54, 43, 11, 0.616, 6, 12, 25, units=68, watts=250, bf16=False),
        _DataSheet("A100-PCIe-40GB", 312, 252.9, 40, 1.555, 31, 25, 100, units=108, watts=250),
        _DataSheet("A100-SXM4-40GB", 312, 271.2, 40, 1.555, 300, 25, 200, units=108, watts=400),
        _DataSheet("A100-SXM4-80GB", 312, 271.2, 80, 2.0, 300, 25, 200, units=108, watts=400),
        _DataSheet("A100-PCIe-80GB", 312, 252.9, 80, 1.94, 31, 25, 100, units=108, watts=300),
        _DataSheet("A800-SXM4-80GB", 312, 271.2, 80, 2.0, 200, 25, 200, units=108, watts=400),
        _DataSheet("A10G", 70, 56, 24, 0.6, 25, 25, 25, units=80, watts=300),
        _DataSheet("A30", 165, 132, 24, 0.933, 31, 25, 50, units=56, watts=165),
        _DataSheet("A40", 150, 120, 48, 0.696, 31, 25, 50, units=84, watts=300),
        _DataSheet("A6000", 155, 124, 48, 0.768, 25, 25, 50, units=84, watts=300),
        _DataSheet("H100-SXM5-80GB", 989, 794.5, 80, 3.35, 450, 50, 400, 1402.6, units=132, watts=700, nvls=True),
        _DataSheet("H100-PCIe-80GB", 756, 600, 80, 2.0, 300, 50, 200, 1070, units=114, watts=350),
        _DataSheet("H800-SXM5-80GB", 989, 794.5, 80, 3.35, 200, 50, 400, 1402.6, units=132, watts=700, nvls=True),
        _DataSheet("H20-SXM", 148, 140, 96, 4.0, 450, 50, 400, 270, units=78, watts=400, nvls=True),
        _DataSheet("H200-SXM", 989, 794.5, 141, 4.8, 450, 50, 400, 1453.4, units=132, watts=700, nvls=True),
        _DataSheet("GH200-SXM", 989, 828.6, 141, 4.8, 450, 300, 400, 1535.0, units=132, watts=900, nvls=True),
        _DataSheet("B200-SXM", 2250, 1745.0, 180, 8.0, 900, 50, 400, 3432.5, units=148, watts=1000, nvls=True),
        _DataSheet("GB200", 2500, 1822.0, 186, 8.0, 900, 300, 400, 3615.6, units=148, watts=1200, nvls=True, domain=72),
        _DataSheet("B300-SXM", 2250, 1769.0, 288, 8.0, 900, 100, 800, 3353.3, units=148, watts=1100, nvls=True),
        _DataSheet("GB300", 2500, 1822.0, 288, 8.0, 900, 300, 800, 3615.6, units=148, watts=1400, nvls=True, domain=72),
        _DataSheet("L20", 119.5, 110, 48, 0.864, 31, 25, 100, 220, units=92, watts=275),
        _DataSheet("L40", 181, 145, 48, 0.864, 31, 25, 100, 290, units=142, watts=300),
        _DataSheet("L40S", 362, 290, 48, 0.86, 31, 25, 100, 580, units=142, watts=350),
        _DataSheet("L4", 121, 97, 24, 0.30, 31, 25, 50, 190, units=58, watts=72),
        _DataSheet("RTX-3090", 71, 67, 24, 0.936, 12, 25, 25, units=82, watts=350),
        _DataSheet("RTX-4080", 97, 92, 16, 0.717, 12, 25, 25, 156, units=76, watts=320),
        _DataSheet("RTX-4090", 165, 157, 24, 1.01, 12, 25, 25, 280, units=128, watts=450),
        _DataSheet("RTX-5090", 209, 198, 32, 1.79, 25, 50, 25, 350, units=170, watts=575),
        _DataSheet("RTX-6000-Ada", 364, 290, 48, 0.96, 25, 25, 50, 580, units=142, watts=300),
        _DataSheet("RTX-PRO-6000", 504, 400, 96, 1.79, 50, 50, 100, 800, units=188, watts=600),
        _DataSheet("MI210", 181, 145, 64, 1.6, 150, 25, 100, units=104, board_watts=300, backend="rocm"),
        _DataSheet("MI250", 362, 290, 128, 3.28, 350, 25, 100, units=208, board_watts=560, backend="rocm"),
        _DataSheet("MI250X", 383, 300, 128, 3.28, 350, 25, 100, units=220, board_watts=560, backend="rocm"),
        _DataSheet("MI300X", 1300, 668.4, 192, 5.3, 448, 50, 400, 1300, units=304, board_watts=750, backend="rocm"),
        _DataSheet("MI325X", 1300, 784.9, 256, 6.0, 448, 50, 400, 1500, units=304, board_watts=1000, backend="rocm"),
        _DataSheet("MI355X", 2500, 1565.0, 288, 8.0, 535.5, 50, 400, 3000, units=256, board_watts=1400, backend="rocm"),
        _DataSheet("Gaudi2", 432, 400, 96, 2.45, 262, 25, 37.5, 690, units=2, watts=600, backend="hpu"),
        _DataSheet("Gaudi3", 1835, 1468, 128, 3.7, 525, 50, 75, 1468, units=8, watts=900, backend="hpu"),
    )
}


PRICES_DATE = "2025-06"
"""Month of the list prices below: prices change, so they are used only where a recipe asks for them."""
LIST_PRICES: dict[str, tuple[float, str]] = {
    "T4": (0.53, "AWS g4dn"), "V100-SXM2-16GB": (3.06, "AWS p3"), "V100-SXM2-32GB": (3.90, "AWS p3dn"),
    "A10G": (1.21, "AWS g5"), "L4": (0.80, "AWS g6"), "L40S": (1.86, "AWS g6e"), "A6000": (0.80, "Lambda"),
    "A100-SXM4-40GB": (2.75, "AWS p4d"), "A100-SXM4-80GB": (3.43, "AWS p4de"), "A100-PCIe-80GB": (3.67, "Azure NC"),
    "H100-PCIe-80GB": (2.49, "Lambda"), "H100-SXM5-80GB": (2.99, "Lambda"), "H200-SXM": (7.91, "AWS p5en"),
    "GH200-SXM": (1.49, "Lambda"), "B200-SXM": (14.24, "AWS p6-b200"), "MI300X": (6.00, "Azure ND MI300X"),
    "RTX-4090": (0.69, "RunPod"), "RTX-3090": (0.43, "RunPod"),
}  # fmt: skip
"""US dollars per device and hour on demand, with the provider, as of `PRICES_DATE`."""
TPU = "TPUs are left out: DeepSpeed does not run on them"
"""Why there is no row for a device that people ask for."""


def find_device(name: str, *, memory_gb: float | None = None, hint: str = "") -> Device | None:
    """The device kind that a name refers to, the one with the closest memory if several match; None if none does."""
    if name in DEVICES:
        return DEVICES[name]
    kinds = [device for device in DEVICES.values() if _stem(device.name) in _words(name)]
    if not kinds:
        return None
    pcie = "PCIE" in f"{name} {hint}".upper() and "NVLINK" not in hint.upper()
    fitting = [device for device in kinds if ("PCIe" in device.name) == pcie] or kinds
    stated = memory_gb or _memory_in(name)
    return min(fitting, key=lambda device: abs(device.memory_bytes / GIB - (stated or 1e9)))


def nearest_names(name: str, count: int = 3) -> list[str]:
    """Device kinds with similar names."""
    lowered = {kind.lower(): kind for kind in DEVICES}
    close = difflib.get_close_matches(name.lower(), lowered, n=count, cutoff=0.3)
    return [lowered[kind] for kind in close] or list(DEVICES)


def _stem(kind: str) -> str:
    """`A100-SXM4-80GB` → `A100`; `RTX-4090` → `4090`; `RTX-PRO-6000` → `PRO`."""
    parts = kind.upper().split("-")
    return parts[1] if parts[0] == "RTX" else parts[0]


def _words(name: str) -> set[str]:
    return set(re.split(r"[^A-Z0-9]+", name.upper()))


def _memory_in(name: str) -> float | None:
    match = re.search(r"(\d+) ?GB", name.upper())
    return float(match[1]) if match else None
