"""Bytes on the fullest device, by part: closed formulas over plan, model and workload."""

from __future__ import annotations

from toolkit.estimate import Memory
from toolkit.plan import Job, Plan

GIB = 2**30
MOMENTS = {"adamw": 2, "lamb": 2, "lion": 1, "sgd": 0, "onebit_adam": 3, "onebit_lamb": 3, "zero_one_adam": 3}
"""fp32 tensors an optimizer keeps for each parameter, master weights not counted."""


def memory(plan: Plan, job: Job) -> Memory:
    """What each part of the plan needs on one device."""
    params = -(-job.model.params // (plan.tp * plan.pp))
    width = 4 if plan.precision == "fp32" else 2
    shard = plan.zero_group if plan.zero_stage else 1
    host_params = plan.offload.endswith("_params")
    param_bytes = 0 if host_params else params * width // (plan.zero_group if plan.zero_stage == 3 else 1)
    grad_bytes = params * width // (shard if plan.zero_stage >= 2 else 1)
    master = 0 if plan.precision == "fp32" and plan.zero_stage == 0 else 4
    states = params * (master + 4 * MOMENTS[job.workload.optimizer]) // shard
    on_host = plan.offload != "none"
    return Memory(
        params=param_bytes,
        grads=0 if on_host and plan.zero_stage == 3 else grad_bytes,
        optimizer=0 if on_host else states,
        activations=_activations(plan, job, width),
        logits=_logits(plan, job),
        gathered=_gathered(plan, job, width),
        buffers=0 if plan.zero_stage == 0 else min(params * width, 2 * 10**9),
        overhead=0 if job.cluster.device.backend == "cpu" else int(2.3 * GIB),
        host=_host(plan, job, states, params * width),
    )


def _activations(plan: Plan, job: Job, width: int) -> int:
    tokens = plan.micro_batch * job.workload.seq_len // plan.sp
    model = job.model
    kept = 2 * tokens * model.hidden * width
    mlp = (3 if model.gated_mlp else 2) * max(model.ffn, model.experts_per_token * model.expert_ffn)
    whole = tokens * width * (8 * model.hidden + 2 * model.kv_heads * model.head_dim + mlp) // plan.tp
    if not job.workload.flash_attention:
        whole += 2 * plan.micro_batch * model.heads * job.workload.seq_len**2 * width // plan.tp // plan.sp
    layers = -(-model.layers // plan.pp)
    in_flight = min(plan.grad_accum, plan.pp)
    return (kept // 2 * layers + whole if plan.recompute == "full" else whole * layers) * in_flight


def _logits(plan: Plan, job: Job) -> int:
    return plan.micro_batch * job.workload.seq_len // plan.sp * job.model.vocab * 10 // plan.tp


def _gathered(plan: Plan, job: Job, width: int) -> int:
    if plan.zero_stage < 3:
        return 0
    return 2 * max(job.model.layer_params) * width


def _host(plan: Plan, job: Job, states: int, whole_params: int) -> int:
    if plan.offload not in ("cpu", "cpu_params"):
        return 0
    params = whole_params // plan.zero_group if plan.offload == "cpu_params" else 0
    return (states + params) * min(job.cluster.devices_per_node, plan.devices)
