"""The fitted constants of the cost model: all of them, in one place.

`benchmarks/fit_cost_model.py` fits those marked "step" to the `calib` rows of `benchmarks/data/published.csv` (in log
step time, every source with equal weight) and those marked "NCCL" to `benchmarks/data/nccl_allreduce.csv`, and prints
the errors, also leaving one source out. What is measured elsewhere or follows from counting stands where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Calibration:
    """How far real training stays behind the hardware's best rates."""

    matmul: float = 0.947
    """Step. Share of a device's best measured matmul rate that a layer's large matmuls reach in training."""
    attention: float = 0.89
    """Step. Share of the published attention-kernel rates that is reached in training."""
    stream: float = 0.61
    """Step. Share of the memory bandwidth that element-wise operators reach."""
    launch_seconds: float = 3.2e-5
    """Step. Host time of one operator: Python, autograd and launch; it shows where operators are small."""
    tp_exposed: float = 0.46
    """Step. Share of tensor-parallel traffic that slicing it beside its matmul leaves visible."""
    interference: float = 0.49
    """Step. Share of hidden traffic that comes back as slower compute: both use memory and multiprocessors."""
    fixed_seconds: float = 3.5e-3
    """Step. Data loading, logging and synchronisation of one step."""
    power: float = 0.6
    """Dev rows. Exponent by which a sustained rate falls with watts per FLOP below an H100's 700 W for 989 TFLOP/s."""
    misaligned: float = 0.7
    """Dev rows. Rate of a matmul with a side that is no multiple of 64 (BigScience: 14400 against 14336)."""
    intra: float = 0.76
    """NCCL. Share of the links inside a node that a large collective reaches."""
    inter: float = 0.70
    """NCCL and step. The same for the network between nodes."""
    rank_latency: float = 0.2
    """NCCL. Start-up of a collective inside a node, for each rank, in units of `Cluster.latency_seconds`."""
    node_latency: float = 0.9
    """NCCL. Growth of the start-up with each doubling of the nodes, in units of `Cluster.inter_latency_seconds`."""
    ring_hop: float = 0.15
    """Step. One hop of a ring that leaves the node, for each rank, in units of `Cluster.inter_latency_seconds`."""
    ramp_seconds: float = 45e-6
    """NCCL. Time constant by which a collective comes up to full bandwidth as messages grow."""
    fragmentation: float = 0.14
    """Memory. Share of what the allocator reserves beyond live tensors."""
    context_bytes: float = 1.4 * 2**30
    """Memory. Device context, libraries and workspaces of one process."""
    collective_bytes: float = 0.9 * 2**30
    """Memory. Buffers of the collectives library, if there is more than one device."""


CALIBRATION = Calibration()
CONSTANTS = tuple(f.name for f in fields(Calibration))
"""Names of all fitted constants; a test holds their number at 20 or less."""
