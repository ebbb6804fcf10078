"""Memory of the fullest device by part: closed formulas over plan, model and workload."""

from __future__ import annotations

from toolkit.cost.activations import (
    ARRIVED,
    LAST_NORM_KEPT,
    LAST_NORM_LIVE,
    head_gradient_bytes,
    kept_bytes,
    last_norm_bytes,
    layer_input_bytes,
    live_bytes,
    logit_bytes,
    loss_in_blocks,
)
from toolkit.cost.calibration import CALIBRATION, Calibration
from toolkit.cost.estimate import Memory
from toolkit.cost.execution import Execution, of_plan, quantized_width
from toolkit.cost.optimizer_step import MOMENTS, state_shards
from toolkit.cost.start import exchange_bytes, host_bytes, start_bytes
from toolkit.plans.deepspeed_config import UPDATE_ELEMENTS, bucket_elements
from toolkit.plans.plan import Job, Plan

BUCKET_ELEMENTS = 5e8
"""DeepSpeed's default `reduce_bucket_size`, as in published figures; the toolkit uses smaller buckets."""
LIVE_ELEMENTS = 1e9
"""Gathered parameters that DeepSpeed's ZeRO 3 does not release (`stage3_max_live_parameters`)."""
IN_USE_LAYERS = 1.5
"""Further layers that ZeRO 3 has gathered: the one in use, and on average half of the next."""


def memory(plan: Plan, job: Job) -> Memory:
    """Memory of a plan on its fullest device, by part."""
    return device_bytes(of_plan(plan, job))


def device_bytes(e: Execution, cal: Calibration = CALIBRATION) -> Memory:
    """Memory of the first or the last pipeline stage, whichever needs more; the stages between need less."""
    stages = [_stage(e, 0, cal)] if e.pp == 1 else [_stage(e, 0, cal), _stage(e, e.pp - 1, cal)]
    return max(stages, key=lambda stage: stage.total)


def _stage(e: Execution, index: int, cal: Calibration) -> Memory:
    """Memory of one pipeline stage."""
    params = _stage_params(e, index)
    layers = e.layers_per_stage if index < e.pp - 1 or e.pp == 1 else _last_layers(e)
    logits = logit_bytes(e) if index == e.pp - 1 else 0.0  # freed before layers go backward
    parts = {
        "params": _param_bytes(e, params),
        "grads": _grad_bytes(e, params),
        "optimizer": 0.0 if e.offload != "none" else _state_bytes(e, params) / state_shards(e),
        "activations": 0.0,
        "logits": logits,
        "gathered": _gathered(e),
        "buffers": _buffers(e, params),
    }
    if e.cluster.device.backend == "cpu":  # on accelerators this state is in host memory
        parts["optimizer"] += exchange_bytes(e, params)
    kept = kept_bytes(e, layers, _in_flight(e, index))
    parts["activations"], parts["logits"] = _peak(e, kept, parts, last=index == e.pp - 1)
    if _without_buckets(e, parts):
        parts["buffers"] = 0.0
    _count_update(e, params, parts)
    live = sum(parts.values())
    parts["overhead"] = _overhead(e, live, cal)
    parts["host"] = host_bytes(e, params, _state_bytes(e, params) / state_shards(e))
    start = start_bytes(e, params, _buffers(e, params))
    parts["start"], parts["host_start"] = start.device + _overhead(e, start.device, cal), start.host
    return Memory(**{name: int(size) for name, size in parts.items()})


def _peak(e: Execution, kept: float, parts: dict[str, float], *, last: bool) -> tuple[float, float]:
    """Activation bytes at the peak, not counting gradients, and the bytes of head and loss there.

    The peak is in the head and the loss, in the backward pass of the final norm, or in that of a layer. DeepSpeed frees
    gradients after the update, so with one micro-batch they grow only as activations are freed. A stage that receives
    gradients from the next one also holds these.
    """
    live, logits, grads = live_bytes(e), parts["logits"], parts["grads"]
    at_head, at_norm = logits, 0.0
    if e.drops_gradients and logits:  # the toolkit's own runs: the final norm is between logits and layers
        at_head, at_norm = _tails(e)
        if _makes_buckets_late(e) and not _without_buckets(e, parts):
            at_head = 0.0
    tail = max(at_head, at_norm)
    if e.drops_gradients and loss_in_blocks(e) and logits and e.pp == 1 and (at_head < tail or tail < live):
        logits = head_gradient_bytes(e) if tail > live else 0.0
    if e.drops_gradients and not last:
        kept += ARRIVED * layer_input_bytes(e)
    stand = e.zero_stage == 3 and e.pp == 1  # its buffer for gradients stays between steps
    if not e.drops_gradients or e.grad_accum > 1 or not last or stand:
        return kept + max(tail, live) - logits, logits
    return max(0.0, max(kept + tail, live + max(kept, grads)) - logits - grads), logits


def _tails(e: Execution) -> tuple[float, float]:
    """Bytes beyond what layers keep, in the toolkit's own runs: in head and loss, and in the final norm after them.

    The last stage of a pipeline has freed the gradients of the logits when the norm goes backward.
    """
    at_norm = last_norm_bytes(e, LAST_NORM_LIVE) + (head_gradient_bytes(e) if loss_in_blocks(e) else 0.0)
    return logit_bytes(e) + last_norm_bytes(e, LAST_NORM_KEPT), at_norm if e.pp == 1 else 0.0


def _makes_buckets_late(e: Execution) -> bool:
    """Whether buckets are made when the first gradient arrives: the head's, so the loss has none yet (rehearsed)."""
    return e.drops_gradients and e.zero_stage in (1, 2) and e.cluster.device.backend != "cpu" and e.pp == 1


def _without_buckets(e: Execution, parts: dict[str, float]) -> bool:
    """Whether the peak is in the loss, before there are buckets."""
    at_head, at_norm = _tails(e)
    return _makes_buckets_late(e) and at_head > max(at_norm, live_bytes(e)) + parts["buffers"]


def _last_layers(e: Execution) -> int:
    rest = e.model.layers - e.layers_per_stage * (e.pp - 1)
    return rest if rest > 0 else max(1, e.model.layers // e.pp)


def _stage_params(e: Execution, index: int) -> float:
    """Parameters of a stage on one tensor-parallel rank; experts are distributed over `ep` ranks."""
    model = e.model
    layers = e.layers_per_stage if index < e.pp - 1 or e.pp == 1 else _last_layers(e)
    total = layers * e.mean_layer_params
    if index == 0:
        total += model.embedding_params
    if index == e.pp - 1:
        total += model.head_params
        if e.pp > 1 and model.tied_embeddings:
            total += model.vocab * model.hidden  # the tied table is on the first and on the last stage
    return (total - _remote_experts(e) * layers / model.layers) / e.tp


def _remote_experts(e: Execution) -> float:
    """Parameters of routed experts that other expert-parallel ranks hold."""
    return e.model.moe_layers * _routed_params(e) * (1 - 1 / e.ep)


def _routed_params(e: Execution) -> int:
    """Parameters of the routed experts of one mixture layer."""
    return e.model.experts * (3 if e.model.gated_mlp else 2) * e.model.hidden * e.model.expert_ffn


def _param_bytes(e: Execution, params: float) -> float:
    """Bytes of the weights in the training precision; hpZ keeps a second copy inside its group."""
    second = e.element_bytes * params / e.zero_group if _has_second_copy(e, params) else 0.0
    if e.offload.endswith("_params"):
        return second
    if e.quantized_base:
        return params * quantized_width(e) + e.element_bytes * params * e.trained_share
    if e.zero_stage < 3 or e.pp > 1:  # in a pipeline, gathered parameters stay for the step
        return e.element_bytes * params
    return e.element_bytes * params / state_shards(e) + second


def _has_second_copy(e: Execution, params: float) -> bool:
    """Whether hpZ makes its second copy: only when a parameter is first released, so not while all stay gathered."""
    return e.zero_stage == 3 and e.zero_variant == "hpz" and params > LIVE_ELEMENTS


def _grad_bytes(e: Execution, params: float) -> float:
    """Bytes of gradients of trained weights; ZeRO 2 and 3 keep one shard, which offload moves to the host."""
    trained = params * e.trained_share
    width = 4 if e.accumulates_apart or e.element_bytes == 4 else e.software.grad_bytes
    if (e.zero_stage < 2 and not e.frees_gradients) or e.pp > 1:
        return width * trained
    if e.drops_gradients and (e.zero_stage == 3 or e.grad_accum > 1):
        width = 4  # shards are summed in fp32; ZeRO 3 keeps a buffer for them between steps, too
    return 0.0 if e.offload != "none" else width * trained / state_shards(e)


def _state_bytes(e: Execution, params: float) -> float:
    """Bytes of fp32 master weights and moments before sharding; fp32 training without ZeRO needs no second copy."""
    if not e.master_weights:
        return e.element_bytes * MOMENTS[e.optimizer] * params * e.trained_share
    master = 0 if e.element_bytes == 4 and e.zero_stage == 0 else 4
    return (master + 4 * MOMENTS[e.optimizer]) * params * e.trained_share


def _in_flight(e: Execution, index: int) -> float:
    """Micro-batches whose activations a stage holds under 1F1B; interleaving holds a few more."""
    if e.pp == 1:
        return 1.0
    held = min(e.grad_accum, e.pp - index)
    return held * (1 + (e.pp - 1) / (e.pp * e.chunks)) if e.chunks > 1 and index == 0 else held


def _gathered(e: Execution) -> float:
    """Bytes of gathered weights. ZeRO 3: the layer in use and the next one; DeepSpeed keeps more for early reuse.

    QLoRA: a 4-bit matrix is dequantised for its matmul.
    """
    if e.quantized_base:
        return e.element_bytes * e.model.hidden * max(e.model.ffn, e.model.hidden)
    if e.zero_stage < 3 or e.replicas == 1:
        return 0.0
    layer = (max(e.model.layer_params) - _remote_experts(e) / e.model.layers) / e.tp
    table = max(e.model.embedding_params, e.model.head_params) / e.tp
    if not e.drops_gradients:
        return e.element_bytes * max((IN_USE_LAYERS + 0.5) * layer, table)
    kept = min(LIVE_ELEMENTS, e.model_params / e.tp)
    if e.cluster.device.backend != "cpu" and logit_bytes(e) > live_bytes(e):  # at the peak the head is in use
        return e.element_bytes * max(kept, table)
    return e.element_bytes * max(kept + IN_USE_LAYERS * layer, table)


def _buffers(e: Execution, params: float) -> float:
    """Bytes of the reduction buckets, allocated in full; two of them if reduction overlaps with the backward pass."""
    if e.zero_stage == 0 or e.accumulates_apart or (e.replicas == 1 and not e.drops_gradients):
        return 0.0
    width = 4 if e.element_bytes == 4 else e.software.grad_bytes
    buckets = 2 if e.software.dp_overlap and not (e.drops_gradients and e.zero_stage == 3) else 1
    if e.drops_gradients:  # DeepSpeed 0.19.8 allocates them even if there is nothing to reduce
        return buckets * width * _own_bucket(e)
    return buckets * width * min(BUCKET_ELEMENTS, _largest_bucket(e), params * e.trained_share)


def _own_bucket(e: Execution) -> float:
    return bucket_elements(e.model_params * e.trained_share, e.tp * e.pp, e.bucket_elements)


def _count_update(e: Execution, params: float, parts: dict[str, float]) -> None:
    """Let the update own the peak if it needs more than the passes: activations and buckets have been freed then.

    ZeRO 1 and 2 in 16 bits copy the gradients of a shard, and before that each tensor's in float64, for its norm.
    """
    stage = e.zero_stage in (1, 2) and e.pp == 1 and e.drops_gradients and not e.accumulates_apart
    if not stage or e.cluster.device.backend == "cpu" or e.element_bytes == 4 or e.offload != "none":
        parts["buffers"] += _step_peak(e, params, parts)
        return
    shard = params * e.trained_share / state_shards(e)
    need = max(4 * shard, 8 * min(shard, e.model.hidden * max(e.model.vocab, e.model.ffn) / e.tp))
    if need > parts["activations"] + parts["logits"] + parts["buffers"]:
        parts |= {"activations": 0.0, "logits": 0.0, "buffers": need}


def _step_peak(e: Execution, params: float, parts: dict[str, float]) -> float:
    """Bytes that the update needs beyond what the backward pass has freed: fp32 gradients and a flat send buffer."""
    if e.offload != "none" or not e.master_weights:
        return 0.0
    trained = params * e.trained_share
    if e.accumulates_apart:  # fp32 gradients are updated in place; a copy in 16 bits is sent
        return max(0.0, e.element_bytes * trained - parts["activations"] - parts["logits"])
    need = 4 * _updated_at_once(e, trained / state_shards(e)) if e.element_bytes == 2 else 0.0
    if e.drops_gradients and e.replicas > 1:
        flat = e.element_bytes * min(_own_bucket(e) if e.zero_stage else e.bucket_elements or BUCKET_ELEMENTS, trained)
        need += flat * (2 if e.zero_stage == 3 and e.cluster.device.backend == "cpu" else 1)  # gloo sums in a copy
    return max(0.0, need - _freed(e, parts))


def _updated_at_once(e: Execution, shard: float) -> float:
    """Elements of a rank's shard whose gradients are copied for one update: under ZeRO 3 a group of tensors."""
    return min(shard, UPDATE_ELEMENTS) if e.drops_gradients and e.zero_stage == 3 and e.pp == 1 else shard


def _freed(e: Execution, parts: dict[str, float]) -> float:
    """Bytes that the backward pass has freed when the update begins; ZeRO 3 still holds gathered parameters."""
    freed = parts["activations"] + parts["logits"]
    if not e.drops_gradients:
        return freed + parts["gathered"]
    in_use = IN_USE_LAYERS * e.element_bytes * max(e.model.layer_params) / e.tp if e.zero_stage == 3 else 0.0
    return (
        freed + in_use + (parts["grads"] if e.zero_stage == 1 and not e.frees_gradients else 0.0)
    )  # ZeRO 1 has moved gradients into shards


def _largest_bucket(e: Execution) -> float:
    """Largest bucket in use: ZeRO 3 reduces layer by layer, so a bucket never holds more than two layers."""
    return 2 * max(e.model.layer_params) / e.tp if e.zero_stage == 3 else BUCKET_ELEMENTS


def _overhead(e: Execution, live: float, cal: Calibration) -> float:
    """Bytes of context, communication buffers and fragmentation; on a CPU only live tensor bytes count."""
    if e.cluster.device.backend == "cpu":
        return 0.0
    fixed = cal.context_bytes + (cal.collective_bytes if e.cluster.devices > 1 else 0.0)
    return fixed + cal.fragmentation * live
