"""Seconds per step by part: closed formulas over plan, model, cluster and workload."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.cost import communication
from toolkit.cost.activations import layer_input_bytes
from toolkit.cost.calibration import CALIBRATION, Calibration
from toolkit.cost.estimate import Time
from toolkit.cost.execution import Execution, layer_shape, lora_params, of_plan, routed_expert_params
from toolkit.cost.operators import LayerCost, Pass, Slice, head_cost, layer_cost, seen_tokens
from toolkit.cost.optimizer_step import optimizer_seconds
from toolkit.cost.software import RECOMPUTE
from toolkit.models.spec import ModelSpec
from toolkit.plans.pipeline_bounds import layer_flops
from toolkit.plans.plan import Job, Plan
from toolkit.plans.router_balance import exchange_parts


def model_flops(job: Job) -> float:
    """FLOPs per step that the model needs: 6 per parameter and token, and attention to the tokens before each one.

    Half of the square, that is, as kernels compute it: with the full square, as many publications count, MFU would
    exceed what the device does at long sequences. Frozen weights count 4: their gradients are never computed.
    """
    model, work = job.model, job.workload
    matmul_params = model.active_params - (0 if model.tied_embeddings else model.embedding_params)
    each = 6.0 * matmul_params
    if work.lora_rank:
        each = 4.0 * matmul_params + 6.0 * lora_params(model, work.lora_rank, work.lora_targets)
    return work.tokens * (each + 12 * _attention_flops(model, work.seq_len))


def _attention_flops(model: ModelSpec, seq_len: int) -> float:
    """Products of heads, head size and tokens that a query is compared with, summed over layers."""
    whole, windowed = (
        seen_tokens(Slice(micro_batch=1, seq_len=seq_len, window=window)) for window in (0, model.window)
    )
    layers = model.layers - model.window_layers
    return model.heads * model.head_dim * (layers * whole + model.window_layers * windowed)


def hardware_flops(plan: Plan, job: Job) -> float:
    """FLOPs per step including recompute, which adds up to one more forward pass of the layers."""
    model, work, again = job.model, job.workload, of_plan(plan, job).recompute
    attention = 4 * _attention_flops(model, work.seq_len)
    outside = model.head_params if model.tied_embeddings else model.embedding_params + model.head_params
    layers = 2.0 * max(0, model.active_params - outside)
    return model_flops(job) + work.tokens * (again.matmul * layers + again.attention * attention)


def step_time(plan: Plan, job: Job) -> Time:
    """Predicted seconds per step of a plan, by part."""
    return seconds(of_plan(plan, job))


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds per layer and micro-batch, averaged over dense and mixture layers; communication is exposed time."""

    forward: float
    backward: float
    repeat: float
    tp: float
    sp: float
    zero: float
    """Gathers and reductions of ZeRO 3."""

    @property
    def compute(self) -> float:
        """Forward, backward and recompute."""
        return self.forward + self.backward + self.repeat

    @property
    def total(self) -> float:
        """Compute and exposed communication."""
        return self.compute + self.tp + self.sp + self.zero


@dataclass(frozen=True)
class Stages:
    """Seconds of the slowest pipeline stage for one micro-batch, and the mean over stages."""

    slowest: float
    mean: float
    layers: float
    """Layers of the slowest stage."""
    head: float
    """Seconds of the output head on the slowest stage."""


def seconds(e: Execution, cal: Calibration = CALIBRATION) -> Time:
    """Predicted seconds per step of an execution, by part."""
    head = head_cost(e.model.hidden, e.model.vocab, e.slice, e.cluster.device, e.software, cal)
    head_seconds = host_bound(head, e, cal)
    layer = layer_seconds(e, cal)
    stages = _stages(e, layer, head_seconds)
    each = e.grad_accum * stages.layers
    window = communication.Window(stages.layers * layer.forward, stages.layers * layer.backward + head_seconds / 2)
    step = Time(
        compute=each * (layer.forward + layer.backward) + e.grad_accum * stages.head,
        recompute=each * layer.repeat,
        tp_comm=each * layer.tp,
        sp_comm=each * layer.sp,
        pp_bubble=_bubble_seconds(e, stages),
        pp_comm=communication.pipeline_seconds(e, cal),
        dp_comm=each * layer.zero + communication.step_seconds(e, window, cal),
        optimizer=optimizer_seconds(e, cal),
        fixed=cal.fixed_seconds + _step_hooks(e, cal),
    )
    if e.first_passes:
        step = step.plus(_forward_time(e, layer, stages, step), e.first_passes)
    return step if e.teacher is None else step.plus(_teacher_time(e, e.teacher, cal))


def forward_time(plan: Plan, job: Job) -> Time:
    """Predicted seconds of a pass without gradients over a global batch: of a reference that is kept, for example."""
    e = replace(of_plan(plan, job), first_passes=0, teacher=None)
    layer = layer_seconds(e, CALIBRATION)
    head = head_cost(e.model.hidden, e.model.vocab, e.slice, e.cluster.device, e.software, CALIBRATION)
    return _forward_time(e, layer, _stages(e, layer, host_bound(head, e, CALIBRATION)), seconds(e))


def teacher_pass_time(plan: Plan, job: Job, teacher: ModelSpec) -> Time:
    """Predicted seconds per global batch of a teacher's pass before training: complete on each rank, row by row."""
    rows = -(-job.workload.global_batch // plan.devices)
    alone = replace(
        of_plan(plan, job), dp=plan.devices, tp=1, sp=1, cp=1, ep=1, zero_stage=0, micro_batch=1, grad_accum=rows
    )
    return _teacher_time(alone, teacher, CALIBRATION)


def _forward_time(e: Execution, layer: LayerSeconds, stages: Stages, step: Time) -> Time:
    """Seconds of a pass without gradients. Of a step's three passes through head and ZeRO 3's traffic it is one."""
    each = e.grad_accum * stages.layers
    return Time(
        compute=each * layer.forward + e.grad_accum * stages.head / 3,
        tp_comm=each * layer.tp / (2 + e.recompute.traffic),
        sp_comm=each * layer.sp / 2,
        pp_bubble=step.pp_bubble * layer.forward / max(layer.compute, 1e-30),
        pp_comm=step.pp_comm / 2,
        dp_comm=each * layer.zero / 3,
    )


def _teacher_time(e: Execution, teacher: ModelSpec, cal: Calibration) -> Time:
    """Seconds of a forward pass of the teacher on the same tokens; it has no pipeline stages and no adapters."""
    alone = replace(
        e, model=teacher, teacher=None, first_passes=0, pp=1, chunks=1, stage_layers=(), lora_rank=0,
        quantized_base=False, residual_shards=False, recompute=RECOMPUTE["none"],
    )  # fmt: skip
    layer = layer_seconds(alone, cal)
    head = head_cost(teacher.hidden, teacher.vocab, alone.slice, e.cluster.device, e.software, cal)
    return _forward_time(alone, layer, _stages(alone, layer, host_bound(head, alone, cal)), Time())


def _bubble_seconds(e: Execution, stages: Stages) -> float:
    """Seconds per step that pipeline stages wait.

    Processes that share cores lose less: while one waits, the others run faster. A step then takes the work of all
    stages divided by the cores, or its longest path with one core per busy stage, whichever is longer.
    """
    if e.pp == 1:
        return 0.0
    bubble = (e.pp * stages.mean - stages.slowest) / e.chunks * e.bubble_share
    if e.chunks > 1 and e.drops_gradients:
        bubble += CHUNK_LOSS * e.grad_accum * stages.slowest
    if e.cluster.sharers == 1:
        return bubble
    busy = e.grad_accum * stages.slowest
    alone = min(e.cluster.sharers, e.pp)  # how much faster a stage is while the others of its replica wait
    return max(e.grad_accum * stages.mean, (busy + bubble) / alone, busy) - busy


def layer_seconds(e: Execution, cal: Calibration) -> LayerSeconds:
    """Seconds of one layer, averaged over dense and mixture layers."""
    mixed, windowed = e.model.moe_layers / e.model.layers, e.model.window_layers / e.model.layers
    kinds = [
        (share * part, experts, window)
        for share, experts in ((1 - mixed, False), (mixed, True))
        for part, window in ((1 - windowed, 0), (windowed, e.model.window))
        if share * part > 0
    ]
    found = [(share, vars(_one_layer(e, cal, experts=experts, window=w)).values()) for share, experts, w in kinds]
    if len(found) == 1:
        return LayerSeconds(*found[0][1])
    return LayerSeconds(*(sum(parts) for parts in zip(*([s * v for v in values] for s, values in found), strict=True)))


def _one_layer(e: Execution, cal: Calibration, *, experts: bool, window: int) -> LayerSeconds:
    part = replace(e.slice, window=window) if window else e.slice
    shape = layer_shape(e.model, experts=experts, crosses=e.crosses)
    cost = layer_cost(shape, part, e.cluster.device, e.software, cal)
    hooks = _hook_seconds(e, cal)
    forward, backward = host_bound(cost.forward, e, cal, hooks), host_bound(cost.backward, e, cal, 2 * hooks)
    repeat = _repeat(e, cost.forward, forward, cal)
    repeat += _host_copies(e, forward, backward + repeat)
    tp_forward, tp_backward = communication.tensor_seconds(e, cal)
    tp_forward = _behind_host(tp_forward, cost.forward, forward)
    tp_backward = _behind_host(tp_backward, cost.backward, backward)
    tp_repeat = e.recompute.traffic * tp_forward
    sp = communication.sequence_seconds(e, cost, cal) + (expert_seconds(e, cost, cal) if experts else 0.0)
    zero = communication.layer_seconds(e, forward + tp_forward, backward + repeat + tp_backward + tp_repeat, cal)
    return LayerSeconds(forward, backward, repeat, tp_forward + tp_backward + tp_repeat, sp, zero)


DISPATCH_SHARE = 0.95
"""Share of the network bandwidth that DeepEP's exchanges reach: 43 to 58 GB/s with 50 GB/s per device (its README)."""


def expert_seconds(e: Execution, cost: LayerCost, cal: Calibration) -> float:
    """Exposed seconds to send tokens to their experts and back, in both passes of a layer."""
    if e.ep == 1:
        return 0.0
    shared = e.expert_tp or e.tp
    where = communication.group(e.cluster, e.ep, shared)
    size = e.element_bytes * e.slice.tokens * e.model.experts_per_token * e.model.hidden
    size *= 1.0 if e.experts_whole else shared / e.tp
    size *= e.slice.expert_load
    once = copies_per_token(e.model.experts_per_token, where) if e.software.dispatch_once else 1.0
    if e.software.dispatch_once:
        once *= cal.inter / DISPATCH_SHARE
    one = communication.all_to_all(size, where, e.cluster, cal, outside_share=once)
    parts = exchange_parts(e.model.experts // e.ep) if e.drops_gradients and where.nodes > 1 else 1
    if parts > 1:
        return _in_turns(e, 2 * one, parts, cost, cal)
    return 2 * (2 + e.recompute.exchanged) * one * (cal.tp_exposed if e.software.ep_overlap else 1.0)


def _in_turns(e: Execution, both_ways: float, parts: int, cost: LayerCost, cal: Calibration) -> float:
    """Exposed seconds where parts of a rank's experts exchange and compute in turns: the first part has nothing to
    overlap with on its way there, the last on its way back. Gradients of the parts' weights are copied into one."""
    where = communication.group(e.cluster, e.ep, e.expert_tp or e.tp)
    routed = routed_expert_params(e) / e.model.experts * e.model.experts_per_token
    share = routed / max(e.model.layer_active_params)

    def one_pass(matmul: float) -> float:
        alone = both_ways / parts
        return alone + communication.exposed(share * matmul, both_ways - alone, cal, where)

    again = e.recompute.exchanged
    total = (1 + again) * one_pass(cost.forward.matmul) + one_pass(cost.backward.matmul)
    if e.lora_rank:
        return total
    copied = 2 * e.element_bytes * routed_expert_params(e) / e.ep / e.expert_cut
    return total + copied / (e.cluster.device.memory_bytes_per_second * cal.stream)


def copies_per_token(visited: int, where: communication.Group) -> float:
    """Copies of a token that leave the node if each node gets one, relative to one per visited expert elsewhere."""
    if where.nodes == 1:
        return 1.0
    reached = where.nodes * (1 - (1 - 1 / where.nodes) ** visited) * (1 - 1 / where.nodes)
    return reached / (visited * (1 - 1 / where.nodes))


def _repeat(e: Execution, cost: Pass, forward: float, cal: Calibration) -> float:
    """Seconds of recompute in the backward pass of one layer."""
    share = e.recompute
    if share.matmul == share.attention == share.stream == 1:
        return forward
    on_device = share.matmul * cost.matmul + share.attention * cost.attention + share.stream * cost.stream
    on_device += share.mlp_up * cost.mlp_up
    return max(on_device, cost.kernels * cal.launch_seconds * max(share.matmul, share.stream))


def _host_copies(e: Execution, forward: float, backward: float) -> float:
    """Seconds per layer that copies of its input to the host and back take longer than the passes beside them."""
    if not e.recompute.inputs_on_host:
        return 0.0
    copy = layer_input_bytes(e) / e.cluster.device.host_bytes_per_second
    return max(0.0, copy - forward) + max(0.0, copy - backward)


def host_bound(cost: Pass, e: Execution, cal: Calibration, hooks: float = 0.0) -> float:
    """Device time, but at least the time that the host needs to launch the operators; a CPU does both in turn.

    `hooks` are further seconds of host work in this pass.
    """
    if e.cluster.device.backend == "cpu":
        return cost.device + cost.kernels * CPU_LAUNCH_SECONDS
    launches = 0.0 if e.software.graphs else cost.kernels * cal.launch_seconds
    return max(cost.device, launches + hooks)


def _behind_host(traffic: float, cost: Pass, spent: float) -> float:
    """Traffic that adds to a pass: while the device waits for the host anyway, it costs nothing."""
    return max(0.0, traffic - max(0.0, spent - cost.device))


def _step_hooks(e: Execution, cal: Calibration) -> float:
    """Host seconds per step of work tensor by tensor: DeepSpeed's norms, copies and flags, or a plain torch update."""
    tensors = (TENSORS_GATED if e.model.gated_mlp else TENSORS_PLAIN) * e.layers_per_stage
    if e.software.autocast:
        return tensors * UPDATE_KERNELS * cal.launch_seconds
    if not e.software.zero_copies or not e.software.unpadded_vocab or e.cluster.device.backend == "cpu":
        return 0.0
    return e.software.step_hooks * cal.zero_host_seconds * (tensors * min(1.0, 100 * e.trained_share))


TENSORS_GATED, TENSORS_PLAIN = 9, 12
"""Parameters of a layer of a Llama (7 matrices, 2 norms), and of a GPT (4 matrices and 2 norms, all with biases)."""
FETCHED_ALONE = 5
"""Host time of a tensor that ZeRO 3 fetches by itself, not prefetched, relative to one of a layer (an estimate)."""
UPDATE_KERNELS = 22
"""Operators per tensor of AdamW, gradient norm, loss scale, zeroing and reduction buckets, tensor by tensor."""


def _hook_seconds(e: Execution, cal: Calibration) -> float:
    """Host seconds of ZeRO 3 for the tensors of one layer in the forward pass; twice as many in the backward pass."""
    if e.zero_stage < 3 or e.replicas == 1 or not e.software.zero_copies:
        return 0.0
    return cal.zero_host_seconds * (e.software.zero_messages + FETCHED_ALONE * communication.expert_tensors(e))


CHUNK_LOSS = 0.03
"""Share of a step that the toolkit's schedules of several chunks take beyond their ideal: stages of one turn are not
alike, and transfers start late. Assumed, not fitted: `benchmarks/pipeline_bubble.py --pause` gave 3 to 6.5% on a busy
machine; there is no figure from accelerators yet."""
CPU_LAUNCH_SECONDS = 15e-6
"""Dispatch time per operator on a CPU, where the host is the device (torch with autograd, measured: 5-20 µs)."""


def _stages(e: Execution, layer: LayerSeconds, head: float) -> Stages:
    """The slowest stage: the last one, which has the output head and maybe fewer layers, or any other."""
    layers, work = e.model.layers, _work(e)
    longest = max(work, default=e.layers_per_stage)
    mean = (layers * layer.total + head) / e.pp
    if e.pp == 1:
        return Stages(mean, mean, layers, head)
    last = work[e.head_rank] if work else layers - longest * (e.pp - 1)
    last = last if last > 0 else layers // e.pp
    if last * layer.total + head > longest * layer.total:
        return Stages(last * layer.total + head, mean, last, head)
    return Stages(longest * layer.total, mean, longest, 0.0)


def _work(e: Execution) -> Sequence[float]:
    """Layers of each stage in units of the mean one: decoder layers take longer than an encoder's."""
    if not e.model.encoder_layers or e.chunks > 1:
        return e.stage_layers
    flops = layer_flops(e.model, e.seq_len)
    bounds = itertools.accumulate(e.stage_layers, initial=0)
    return [sum(flops[start:end]) * len(flops) / sum(flops) for start, end in itertools.pairwise(bounds)]
