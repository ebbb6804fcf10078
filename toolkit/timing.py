"""Seconds a step, by part: closed formulas over plan, model, cluster and workload."""

from __future__ import annotations

from toolkit.estimate import Time
from toolkit.plan import Job, Plan


def model_flops(job: Job) -> float:
    """FLOPs of a step by convention: 6 a parameter and token, and attention over the full square."""
    model, work = job.model, job.workload
    attention = 12 * model.layers * model.heads * model.head_dim * work.seq_len
    matmul_params = model.active_params - (0 if model.tied_embeddings else model.embedding_params)
    return work.tokens * (6.0 * matmul_params + attention)


def step_time(plan: Plan, job: Job) -> Time:
    """What each part of the plan costs in one step."""
    device, width = job.cluster.device, 4 if plan.precision == "fp32" else 2
    rate = device.matmul_flops * (0.5 if width == 4 and device.backend != "cpu" else 1.0)
    efficiency = 0.6
    compute = model_flops(job) / plan.devices / (rate * efficiency)
    params = job.model.params / (plan.tp * plan.pp)
    return Time(
        compute=compute,
        recompute=compute / 3 if plan.recompute == "full" else 0.0,
        dp_comm=_data_parallel(plan, job, params * width, compute),
        optimizer=_optimizer(plan, job, params),
        fixed=0.01 + 0.002 * plan.grad_accum,
    )


def _data_parallel(plan: Plan, job: Job, param_bytes: float, compute: float) -> float:
    if plan.dp == 1:
        return 0.0
    inside = plan.devices <= job.cluster.devices_per_node
    speed = job.cluster.intra_bytes_per_second if inside else job.cluster.inter_bytes_per_second
    latency = job.cluster.latency_seconds if inside else job.cluster.inter_latency_seconds
    once = (plan.dp - 1) / plan.dp * param_bytes / speed
    rounds = {0: 2.0, 1: 2.0, 2: 1.0 + plan.grad_accum, 3: 3.0 * plan.grad_accum}[plan.zero_stage]
    collectives = job.model.layers * (3 * plan.grad_accum if plan.zero_stage == 3 else 1)
    exposed = 0.5 if job.cluster.device.backend != "cpu" else 1.0
    return max(0.0, rounds * once * exposed + collectives * latency)


def _optimizer(plan: Plan, job: Job, params: float) -> float:
    shard = plan.zero_group if plan.zero_stage else 1
    device = job.cluster.device
    if plan.offload == "none":
        return 30 * params / shard / device.memory_bytes_per_second
    host_rate = 2e9 / min(job.cluster.devices_per_node, plan.devices)
    return params / shard * (4 / device.host_bytes_per_second + 1 / host_rate)
