"""Seconds per step by part: closed formulas over plan, model, cluster and workload."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.cost import communication
from toolkit.cost.calibration import CALIBRATION, Calibration
from toolkit.cost.estimate import Time
from toolkit.cost.execution import Execution, layer_shape, of_plan
from toolkit.cost.operators import Pass, head_cost, layer_cost
from toolkit.cost.optimizer_step import optimizer_seconds
from toolkit.plans.plan import Job, Plan


def model_flops(job: Job) -> float:
    """FLOPs per step by convention: 6 per parameter and token, and attention over the full square."""
    model, work = job.model, job.workload
    attention = 12 * model.layers * model.heads * model.head_dim * work.seq_len
    matmul_params = model.active_params - (0 if model.tied_embeddings else model.embedding_params)
    return work.tokens * (6.0 * matmul_params + attention)


def hardware_flops(plan: Plan, job: Job) -> float:
    """FLOPs per step including recompute, which adds up to one more forward pass of the layers."""
    model, work, again = job.model, job.workload, of_plan(plan, job).recompute
    attention = 4 * model.layers * model.heads * model.head_dim * work.seq_len
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
    layers: int
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
    return Time(
        compute=each * (layer.forward + layer.backward) + e.grad_accum * stages.head,
        recompute=each * layer.repeat,
        tp_comm=each * layer.tp,
        sp_comm=each * layer.sp,
        pp_bubble=_bubble_seconds(e, stages),
        pp_comm=communication.pipeline_seconds(e, cal),
        dp_comm=each * layer.zero + communication.step_seconds(e, window, cal),
        optimizer=optimizer_seconds(e, cal),
        fixed=cal.fixed_seconds,
    )


def _bubble_seconds(e: Execution, stages: Stages) -> float:
    """Seconds per step that pipeline stages wait.

    Processes that share cores lose less: while one waits, the others run faster. A step then takes the work of all
    stages divided by the cores, or its longest path with one core per busy stage, whichever is longer.
    """
    if e.pp == 1:
        return 0.0
    bubble = (e.pp * stages.mean - stages.slowest) / e.chunks * e.bubble_share
    if e.cluster.sharers == 1:
        return bubble
    busy = e.grad_accum * stages.slowest
    alone = min(e.cluster.sharers, e.pp)  # how much faster a stage is while the others of its replica wait
    return max(e.grad_accum * stages.mean, (busy + bubble) / alone, busy) - busy


def layer_seconds(e: Execution, cal: Calibration) -> LayerSeconds:
    """Seconds of one layer, averaged over dense and mixture layers."""
    experts = e.model.moe_layers / e.model.layers
    dense = _one_layer(e, cal, experts=False) if experts < 1 else None
    mixed = _one_layer(e, cal, experts=True) if experts > 0 else None
    if dense is None or mixed is None:
        only = dense or mixed
        assert only is not None
        return only
    both = zip(vars(dense).values(), vars(mixed).values(), strict=True)
    return LayerSeconds(*(d * (1 - experts) + m * experts for d, m in both))


def _one_layer(e: Execution, cal: Calibration, *, experts: bool) -> LayerSeconds:
    cost = layer_cost(layer_shape(e.model, experts=experts), e.slice, e.cluster.device, e.software, cal)
    forward, backward = host_bound(cost.forward, e, cal), host_bound(cost.backward, e, cal)
    repeat = _repeat(e, cost.forward, forward, cal)
    tp_forward, tp_backward = communication.tensor_seconds(e, cal)
    tp_repeat = e.recompute.traffic * tp_forward
    sp = communication.sequence_seconds(e, cost, cal) + (communication.expert_seconds(e, cal) if experts else 0.0)
    zero = communication.layer_seconds(e, forward + tp_forward, backward + repeat + tp_backward + tp_repeat, cal)
    return LayerSeconds(forward, backward, repeat, tp_forward + tp_backward + tp_repeat, sp, zero)


def _repeat(e: Execution, cost: Pass, forward: float, cal: Calibration) -> float:
    """Seconds of recompute in the backward pass of one layer."""
    share = e.recompute
    if share.matmul == share.attention == share.stream == 1:
        return forward
    on_device = share.matmul * cost.matmul + share.attention * cost.attention + share.stream * cost.stream
    on_device += share.mlp_up * cost.mlp_up
    return max(on_device, cost.kernels * cal.launch_seconds * max(share.matmul, share.stream))


def host_bound(cost: Pass, e: Execution, cal: Calibration) -> float:
    """Device time, but at least the time that the host needs to launch the operators; a CPU does both in turn."""
    if e.cluster.device.backend == "cpu":
        return cost.device + cost.kernels * CPU_LAUNCH_SECONDS
    return max(cost.device, cost.kernels * cal.launch_seconds)


CPU_LAUNCH_SECONDS = 15e-6
"""Dispatch time per operator on a CPU, where the host is the device (torch with autograd, measured: 5-20 µs)."""


def _stages(e: Execution, layer: LayerSeconds, head: float) -> Stages:
    """The slowest stage: the last one, which has the output head and maybe fewer layers, or any other."""
    layers, longest = e.model.layers, e.layers_per_stage
    mean = (layers * layer.total + head) / e.pp
    if e.pp == 1:
        return Stages(mean, mean, layers, head)
    last = layers - longest * (e.pp - 1)
    last = last if last > 0 else layers // e.pp
    if last * layer.total + head > longest * layer.total:
        return Stages(last * layer.total + head, mean, last, head)
    return Stages(longest * layer.total, mean, longest, 0.0)
