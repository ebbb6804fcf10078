"""Bytes that a device and its host hold while a run starts, and that a host holds for its devices afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.cost.activations import inputs_on_host, layer_input_bytes
from toolkit.cost.estimate import Memory
from toolkit.cost.execution import Execution
from toolkit.cost.optimizer_step import state_shards
from toolkit.units import GIB

QUANTIZED_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes per weight in bitsandbytes' nf4 with double quantisation: 4 bits, an 8-bit constant per block of 64 weights,
and a 32-bit constant per 256 of those."""
PINNED_BUFFERS = 1.1
"""Host memory for offload relative to the tensors themselves: pinned staging buffers come on top."""


@dataclass(frozen=True)
class StartBytes:
    """Peaks until the engine exists."""

    device: float
    """Bytes of tensors on a device."""
    host: float
    """Bytes of tensors in the host memory of one node, for all of its devices."""


def start_bytes(e: Execution, params: float, buckets: float) -> StartBytes:
    """Peaks of a rank that holds `params` parameters before ZeRO shards them.

    Weights go to their place one tensor at a time, so a host holds a unit of new weights in fp32 per rank at most: a
    layer or a table. On a CPU the device is the host, and both are counted there.
    """
    ranks = min(e.cluster.devices_per_node, e.cluster.devices)
    device = _sharded(e, params, buckets) if e.zero_stage == 3 and e.pp == 1 else _complete(e, params)
    filling = max(4.0 * _largest_unit(e), _defragmented(e, params))
    if e.quantized_base:  # bitsandbytes quantises the complete model on its way to the device
        filling = max(filling, e.element_bytes * params)
    if e.cluster.device.backend == "cpu":
        weights = e.element_bytes * params / (state_shards(e) if e.zero_stage == 3 and e.pp == 1 else 1)
        return StartBytes(max(device, weights + filling) + _offloaded(e, params), 0.0)
    return StartBytes(device, (filling + _offloaded(e, params)) * ranks)


def _complete(e: Execution, params: float) -> float:
    """Bytes where every rank holds complete weights: ZeRO 0 to 2, and pipelines.

    DeepSpeed 0.19.8 copies all trained weights into one flat buffer before it frees them, then makes fp32 masters, and
    gradients of zeros for them.
    Without ZeRO it takes a step with zero gradients: masters, gradients and two moments of all trained weights.
    """
    weights, trained = (quantized_width(e) if e.quantized_base else e.element_bytes) * params, params * e.trained_share
    if e.zero_stage == 0 and not e.sums_in_bf16:
        return weights + (16.0 * trained if e.element_bytes == 2 and e.master_weights else 0.0)
    masters = 4.0 * trained / state_shards(e)
    states = 0.0 if e.offload != "none" else 2 * masters
    if e.accumulates_apart:
        states = masters + 4.0 * trained
    if e.sums_in_bf16:
        states = masters + e.element_bytes * trained
    return weights + max(e.element_bytes * trained, states)


def _sharded(e: Execution, params: float, buckets: float) -> float:
    """Bytes under ZeRO 3: shards, fp32 masters, a gradient buffer for them and the reduction buckets."""
    shards, trained = state_shards(e), params * e.trained_share
    weights = 0.0 if e.offload.endswith("_params") else e.element_bytes * params / shards
    masters = 0.0 if e.offload != "none" else 8.0 * trained / shards
    # hpZ and quantised weights need a complete parameter, from which DeepSpeed cuts both shards.
    whole = e.element_bytes * _largest_tensor(e) if e.zero_variant == "hpz" or e.weight_wire < 1 else 0.0
    return weights + max(masters + buckets, whole)


def _defragmented(e: Execution, params: float) -> float:
    """Host bytes in which ZeRO 3 puts its shards in a row before they return to the device as one tensor."""
    return e.element_bytes * params / state_shards(e) if e.zero_stage == 3 and e.pp == 1 else 0.0


def _offloaded(e: Execution, params: float) -> float:
    """Host bytes of offloaded fp32 masters, their gradients, and parameters."""
    if not e.offload.startswith("cpu"):
        return 0.0
    shard = params * e.trained_share / state_shards(e)
    return 8.0 * shard + (e.element_bytes * params / state_shards(e) if e.offload == "cpu_params" else 0.0)


def host_bytes(e: Execution, params: float, states: float) -> float:
    """Bytes on the host of one node for what its devices offload: `states` of each, gradients, weights, buffers."""
    ranks = min(e.cluster.devices_per_node, e.cluster.devices)
    outer = 0.0 if e.cluster.device.backend == "cpu" else exchange_bytes(e, params) * ranks
    outer += PINNED_BUFFERS * _inputs_on_host_bytes(e, min(e.grad_accum, e.pp)) * ranks
    if not e.offload.startswith("cpu"):
        return outer
    total = states + 4 * params * e.trained_share / state_shards(e)
    if e.offload == "cpu_params":
        total += e.element_bytes * params / state_shards(e)
    return outer + PINNED_BUFFERS * total * ranks


def exchange_bytes(e: Execution, params: float) -> float:
    """Bytes per rank for the exchange between islands: its part of the weights, and the outer optimizer states."""
    return 4 * e.exchange.states * params * e.trained_share / e.dp if e.islands > 1 else 0.0


def _largest_unit(e: Execution) -> float:
    """Parameters of the largest layer or table, which new weights are drawn for at once."""
    return max(*e.model.layer_params, e.model.embedding_params, e.model.head_params)


def _largest_tensor(e: Execution) -> float:
    """Parameters of the largest tensor: a table, a matrix of the MLP, or all experts of a layer in one."""
    model = e.model
    experts = 2 * model.experts * model.hidden * model.expert_ffn if model.experts else 0
    return max(model.vocab * model.hidden, model.hidden * model.ffn, experts)


def start_reason(used: Memory, limit_bytes: int, host_limit_bytes: int) -> str:
    """Why a plan that would run can't start; empty if it can."""
    if used.start > limit_bytes:
        return (
            f"needs {used.start / GIB:.1f} of {limit_bytes / GIB:.1f} GiB per device while it starts: DeepSpeed copies "
            "all weights of a rank into one buffer"
        )
    if used.host_start > host_limit_bytes:
        return (
            f"needs {used.host_start / GIB:.1f} GiB of host memory while it starts; "
            f"{host_limit_bytes / GIB:.1f} may be used"
        )
    return ""


def quantized_width(e: Execution) -> float:
    """Mean bytes per parameter: linear layers are in 4 bits; embeddings, heads and fused experts are not."""
    model = e.model
    routed = model.experts * (3 if model.gated_mlp else 2) * model.hidden * model.expert_ffn
    linear = sum(model.layer_params) - model.moe_layers * routed
    return e.element_bytes + (QUANTIZED_BYTES - e.element_bytes) * linear / e.model_params


def _inputs_on_host_bytes(e: Execution, in_flight: float) -> float:
    """Bytes per device of layer inputs in host memory."""
    return e.layers_per_stage * layer_input_bytes(e) * in_flight if inputs_on_host(e) else 0.0
