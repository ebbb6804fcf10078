"""Time of the optimizer step, gradient accumulation and offload included; bytes of gradients and optimizer states."""

from __future__ import annotations

from toolkit.cost.calibration import Calibration
from toolkit.cost.communication import expert_params, stage_params
from toolkit.cost.execution import Execution

MOMENTS = {
    "adamw": 2, "muon": 1, "adopt": 2, "schedule_free": 3, "adafactor": 0, "lamb": 2, "lars": 1, "lion": 1, "sgd": 0,
    "onebit_adam": 3, "onebit_lamb": 3, "zero_one_adam": 3,
}  # fmt: skip
"""fp32 values that an optimizer keeps per parameter, without the master weight; of muon, those of matrices."""
STORED_BYTES = {"fp32": 4.0, "bf16": 2.0, "8bit": 1 + 4 / 256}
"""Bytes of one such value; in 8 bits, blocks of 256 have an fp32 scale each."""
NEWTON_SCHULZ_ITERATIONS = 5
"""Of muon, by default. Each multiplies a matrix with itself, the square with itself, and that with the matrix."""
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
    total += shard * (MOMENT_BYTES + 4 if e.averaged else 0.0) / rate
    total += orthogonal_flops(e) / state_shards(e) / (e.cluster.device.matmul_flops * cal.matmul)
    if e.grad_accum > 1 and e.zero_stage < 3 and not e.software.fused_accumulation:
        width = 4 if e.element_bytes == 4 else e.software.grad_bytes
        each = APART_BYTES if e.accumulates_apart else 3 * width
        total += (e.grad_accum - 1) * each * trained / rate
    return total


def update_bytes(optimizer: str) -> float:
    """Bytes that an update reads and writes per parameter; 30 for Adam."""
    return UPDATE_BYTES + MOMENT_BYTES * MOMENTS[optimizer]


def orthogonal_flops(e: Execution) -> float:
    """Operations of muon on the matrices of a tensor rank's stage; ranks divide the matrices among themselves."""
    if e.optimizer != "muon":
        return 0.0
    small = min(e.lora_rank or e.model.hidden, e.model.expert_ffn or e.model.hidden, e.model.hidden)
    return NEWTON_SCHULZ_ITERATIONS * 6 * small * matrix_params(e, stage_params(e)) * e.trained_share


def matrix_params(e: Execution, params: float) -> float:
    """Of a stage's parameters, those in the matrices of its layers; norms and biases, well below 1%, are among them."""
    return params if e.lora_rank else min(params, e.layers_per_stage * e.mean_layer_params / e.tp)


def moments(e: Execution, params: float) -> float:
    """fp32 values per parameter that the optimizer keeps: of muon one for matrices, and AdamW's two for the rest."""
    if e.optimizer != "muon":
        return MOMENTS[e.optimizer]
    return 2 - matrix_params(e, params) / params


def state_shards(e: Execution) -> float:
    """Ranks that optimizer states are sharded over; with hpZ, all replicas.

    Experts have only `ranks / ep` copies to be sharded over: then this is the mean over all parameters of a rank.
    """
    if e.zero_stage == 0 and not e.sums_in_bf16:
        return 1
    ranks = e.replicas if e.zero_variant == "hpz" or e.sums_in_bf16 else min(e.zero_group, e.replicas)
    if e.ep == 1 or ranks == 1:
        return ranks
    experts, own = expert_params(e) / (e.expert_cut * e.pp), stage_params(e)
    dense = own - experts / e.ep
    return own / (dense / ranks + experts / e.ep / max(1, ranks // e.ep))


def _offloaded(e: Execution, shard: float) -> float:
    """Seconds with offload: gradients to the host, weights back, the update on the host, and disk traffic."""
    link = e.cluster.device.host_bytes_per_second
    on_node = min(e.cluster.devices_per_node, e.cluster.devices)
    rounds = e.grad_accum if e.software.zero_copies else 1  # DeepSpeed moves the gradients of every micro-batch
    total = (rounds + 1) * e.element_bytes * shard / link
    total += shard * on_node * update_bytes(e.optimizer) / HOST_UPDATE_BYTES_PER_SECOND
    if e.offload.startswith("nvme"):
        states = 4 + 4 * MOMENTS[e.optimizer]
        total += 2 * states * shard * on_node / NVME_BYTES_PER_SECOND
    if e.offload.endswith("_params"):
        weights = e.element_bytes * stage_params(e) / state_shards(e)
        total += 2 * e.grad_accum * weights / link
    return total


def beside_bytes(e: Execution, params: float) -> float:
    """Bytes of weights that are kept beside the trained ones, in shards as those are: a live reference or teacher.

    A teacher in tensor shards is not sharded by ZeRO 3 as well.
    """
    found = 0.0
    if e.live_reference:
        found += e.element_bytes * params * e.trained_share / (state_shards(e) if e.zero_stage == 3 else 1)
    if e.teacher is not None:
        shards = e.tp if e.tp > 1 else e.replicas if e.zero_stage == 3 else 1
        found += e.element_bytes * e.teacher.params / shards
    return found


def grad_bytes(e: Execution, params: float) -> float:
    """Bytes of gradients of trained weights; ZeRO 2 and 3 keep one shard, which offload moves to the host."""
    trained = params * e.trained_share
    width = 4 if e.accumulates_apart or e.sums_in_bf16 or e.element_bytes == 4 else e.software.grad_bytes
    if (e.zero_stage < 2 and not e.frees_gradients) or e.pp > 1:
        return width * trained
    if e.drops_gradients and (e.zero_stage == 3 or e.grad_accum > 1):
        width = 4  # shards are summed in fp32; ZeRO 3 keeps a buffer for them between steps, too
    if e.offload == "none":
        return width * trained / state_shards(e)
    if e.zero_stage == 3 or not e.drops_gradients:
        return 0.0
    # DeepSpeed 0.19.8 sums shards of several micro-batches on the device, and has a buffer for the largest gradient.
    summed = 4 * trained / state_shards(e) if e.grad_accum > 1 else 0.0
    return summed + e.element_bytes * largest_tensor(e)


def largest_tensor(e: Execution) -> float:
    """Elements of the largest trained tensor on a rank."""
    if e.lora_rank:
        return e.lora_rank * max(e.model.hidden, e.model.ffn)
    return e.model.hidden * max(e.model.vocab, e.model.ffn) / e.tp


def state_bytes(e: Execution, params: float) -> float:
    """Bytes of fp32 master weights and moments before sharding; fp32 training without ZeRO needs no second copy."""
    if not e.master_weights:
        return e.element_bytes * moments(e, params) * params * e.trained_share
    master = 0 if e.element_bytes == 4 and e.zero_stage == 0 else 4
    average = 4 if e.averaged else 0
    return (master + STORED_BYTES[e.states] * moments(e, params) + average) * params * e.trained_share
