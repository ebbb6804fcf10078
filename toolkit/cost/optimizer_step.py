"""Seconds of the weight update, gradient accumulation and offload included."""

from __future__ import annotations

from toolkit.cost.calibration import Calibration
from toolkit.cost.communication import stage_params
from toolkit.cost.execution import Execution

MOMENTS = {
    "adamw": 2, "lamb": 2, "lars": 1, "lion": 1, "sgd": 0, "onebit_adam": 3, "onebit_lamb": 3, "zero_one_adam": 3,
}  # fmt: skip
"""fp32 tensors an optimizer keeps for each parameter, master weights not counted."""
UPDATE_BYTES = 14.0
"""Read the gradient (2), read and write the master (8), write the 16-bit weight (2), read it for the norm (2)."""
MOMENT_BYTES = 8.0
"""Read and write of one fp32 moment."""
HOST_UPDATE_BYTES_PER_SECOND = 60e9
"""What one node's host moves while its processes update (DDR4 server; DeepSpeed's CPU Adam is bound by memory)."""
NVME_BYTES_PER_SECOND = 6e9
"""One node's local disks together, reading or writing."""


def optimizer_seconds(e: Execution, cal: Calibration) -> float:
    """Update of this rank's shard, and summing the gradients of several micro-batches."""
    rate = e.cluster.device.memory_bytes_per_second * cal.stream
    trained = stage_params(e) * e.trained_share
    shard = trained / state_shards(e)
    total = _offloaded(e, shard) if e.offload != "none" else shard * update_bytes(e.optimizer) / rate
    if e.grad_accum > 1 and e.zero_stage < 3:
        grad_bytes = 4 if e.element_bytes == 4 else e.software.grad_bytes
        total += (e.grad_accum - 1) * 3 * grad_bytes * trained / rate
    return total


def update_bytes(optimizer: str) -> float:
    """Bytes that one update moves for a parameter; Adam: 30."""
    return UPDATE_BYTES + MOMENT_BYTES * MOMENTS[optimizer]


def state_shards(e: Execution) -> int:
    """Ranks over which optimizer states are spread; hpZ spreads them over all replicas."""
    if e.zero_stage == 0:
        return 1
    return e.replicas if e.zero_variant == "hpz" else min(e.zero_group, e.replicas)


def _offloaded(e: Execution, shard: float) -> float:
    """Gradients of every micro-batch to the host, weights back, the host's update, and the disk's for states there."""
    link = e.cluster.device.host_bytes_per_second
    on_node = min(e.cluster.devices_per_node, e.cluster.devices)
    total = (e.grad_accum + 1) * e.element_bytes * shard / link
    total += shard * on_node * update_bytes(e.optimizer) / HOST_UPDATE_BYTES_PER_SECOND
    if e.offload.startswith("nvme"):
        states = 4 + 4 * MOMENTS[e.optimizer]
        total += 2 * states * shard * on_node / NVME_BYTES_PER_SECOND
    if e.offload.endswith("_params"):
        weights = e.element_bytes * stage_params(e) / state_shards(e)
        total += 2 * e.grad_accum * weights / link
    return total
