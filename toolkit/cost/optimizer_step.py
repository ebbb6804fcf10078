"""Time of the optimizer step, including gradient accumulation and offload."""

from __future__ import annotations

from toolkit.cost.calibration import Calibration
from toolkit.cost.communication import expert_params, stage_params
from toolkit.cost.execution import Execution

MOMENTS = {
    "adamw": 2, "lamb": 2, "lars": 1, "lion": 1, "sgd": 0, "onebit_adam": 3, "onebit_lamb": 3, "zero_one_adam": 3,
}  # fmt: skip
"""fp32 values that an optimizer keeps per parameter, without the master weight."""
UPDATE_BYTES = 14.0
"""Bytes per parameter: read the gradient (2), read and write the master (8), write the 16-bit weight (2), norm (2)."""
APART_BYTES = 10.0
"""Bytes per parameter to add a 16-bit gradient to an fp32 sum: read 2 and 4, write 4."""
MOMENT_BYTES = 8.0
"""Bytes per fp32 moment: read and write."""
HOST_UPDATE_BYTES_PER_SECOND = 100e9
"""Memory bandwidth of one host during an update on a DDR4 server; DeepSpeed's CPU Adam is limited by it."""
NVME_BYTES_PER_SECOND = 6e9
"""Total rate of the local NVMe disks of one node, reading or writing."""


def optimizer_seconds(e: Execution, cal: Calibration) -> float:
    """Seconds per step to update this rank's shard and to sum the gradients of several micro-batches."""
    rate = e.cluster.device.memory_bytes_per_second * cal.stream
    trained = stage_params(e) * e.trained_share
    shard = trained / state_shards(e)
    total = _offloaded(e, shard) if e.offload != "none" else shard * update_bytes(e.optimizer) / rate
    if e.grad_accum > 1 and e.zero_stage < 3 and not e.software.fused_accumulation:
        grad_bytes = 4 if e.element_bytes == 4 else e.software.grad_bytes
        each = APART_BYTES if e.accumulates_apart else 3 * grad_bytes
        total += (e.grad_accum - 1) * each * trained / rate
    return total


def update_bytes(optimizer: str) -> float:
    """Bytes that an update reads and writes per parameter; 30 for Adam."""
    return UPDATE_BYTES + MOMENT_BYTES * MOMENTS[optimizer]


def state_shards(e: Execution) -> float:
    """Ranks that optimizer states are sharded over; with hpZ, all replicas.

    Experts have only `ranks / ep` copies to be sharded over: then this is the mean over all parameters of a rank.
    """
    if e.zero_stage == 0:
        return 1
    ranks = e.replicas if e.zero_variant == "hpz" else min(e.zero_group, e.replicas)
    if e.ep == 1 or ranks == 1:
        return ranks
    experts, own = expert_params(e) / (e.tp * e.pp), stage_params(e)
    dense = own - experts / e.ep
    return own / (dense / ranks + experts / e.ep / max(1, ranks // e.ep))


def _offloaded(e: Execution, shard: float) -> float:
    """Seconds with offload: gradients to the host, weights back, the update on the host, and disk traffic."""
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
