"""What each DeepSpeed version can run: a table of rules, each with the reason that refusals quote.

A limit of a newer DeepSpeed is a new row; a limit that it lifts is a row's `until`.
"""

from __future__ import annotations

import functools

from toolkit.errors import Problem
from toolkit.plans.deepspeed_config import accumulates_apart
from toolkit.plans.optimizer_rules import OPTIMIZER_RULES, Rule, only_replicas
from toolkit.plans.plan import Job, Plan
from toolkit.plans.versions import Version, deepspeed_version, is_within
from toolkit.recipe.batch_sections import Reduce

NCCL = ("ring", "tree")
"""All-reduce algorithms that NCCL offers."""


RULES: tuple[Rule, ...] = (
    Rule(
        forbids=lambda plan, job: plan.pp > 1 and plan.zero_stage > 1,
        reason="a pipeline runs with ZeRO 0 or 1 only (DeepSpeed's PipelineEngine asserts it); use zero_stage 0 or 1",
        limits="pipeline with ZeRO 2 or 3",
    ),
    Rule(
        forbids=lambda plan, job: plan.schedule == "zero_bubble" and plan.recompute != "none",
        reason="zero_bubble keeps the inputs of linear layers until their weight gradients are computed, which is what "
        "recomputation frees; use recompute none, or schedule interleaved",
        limits="zero bubble with recompute",
    ),
    Rule(
        forbids=lambda plan, job: plan.schedule == "zero_bubble" and job.workload.compiled,
        reason="zero_bubble takes the backward pass of linear layers apart, which compiled layers do not have; use "
        "schedule interleaved, or model.compile: none",
        limits="zero bubble with compiled layers",
    ),
    Rule(
        forbids=lambda plan, job: (
            plan.token_parts > 1 and plan.pp > 1 and (plan.ep > 1 or job.workload.balance.is_active)
        ),
        reason="distributed experts and train.router are not proven in a pipeline whose ranks share sequences; use "
        "pp 1, or sp 1 and cp 1",
        limits="sequence or ring axis with a pipeline, with an expert axis or train.router",
    ),
    Rule(
        forbids=lambda plan, job: plan.tp > 1 and job.model.heads // plan.tp % plan.sp > 0,
        reason="sp must divide the attention heads of a tensor rank; use a smaller sp or tp, or cp",
        limits="sequence ranks that do not divide a tensor rank's heads",
    ),
    Rule(
        forbids=lambda plan, job: plan.cp > 1 and plan.precision == "fp32" and job.cluster.device.backend != "cpu",
        reason="ring attention uses torch's flash kernels, which on accelerators take bf16 and fp16 only; use sp",
        limits="ring attention in fp32 on an accelerator",
    ),
    Rule(
        forbids=lambda plan, job: plan.schedule == "zero_bubble" and (plan.ep > 1 or job.workload.balance.is_active),
        reason="distributed experts and train.router are not proven where gradients of weights are put off; use "
        "schedule interleaved or 1f1b",
        limits="zero-bubble schedule with an expert axis or train.router",
    ),
    Rule(
        forbids=lambda plan, job: plan.ep > 1 and job.model.experts % plan.ep > 0,
        reason="ep must divide the number of experts, so that every rank holds equally many",
    ),
    Rule(
        forbids=lambda plan, job: plan.ep > 1 and plan.dp % plan.ep > 0,
        reason="experts are distributed over data-parallel ranks: ep must divide dp",
    ),
    Rule(
        forbids=lambda plan, job: plan.ep > 1 and plan.tensor_by == "autotp",
        reason="AutoTP replaces the modules of experts; leave tensor_by out: the toolkit's own shards leave them",
        limits="expert axis with AutoTP",
    ),
    Rule(
        forbids=lambda plan, job: plan.ep > 1 and plan.offload != "none",
        reason="offload with expert parallel is not proven: DeepSpeed's norm on the host averages that of experts",
        limits="expert axis with offload",
    ),
    Rule(
        forbids=lambda plan, job: plan.ep > 1 and (plan.zero_variant != "plain" or plan.zero_quantized != "none"),
        reason="hpZ, MiCS and ZeRO++ have one sharding group for all weights, and experts have their own; use plain",
        limits="expert axis with hpZ, MiCS or ZeRO++",
    ),
    Rule(
        forbids=lambda plan, job: plan.ep > 1 and job.workload.quantized_base,
        reason="4-bit weights (model.lora.quantize) can't be cut into experts; use data_parallel or zero",
        limits="expert axis with QLoRA",
    ),
    Rule(
        forbids=lambda plan, job: plan.ep > 1 and plan.islands > 1,
        reason="islands are data-parallel inside; use ep 1 with local_sgd",
        limits="expert axis with islands",
    ),
    Rule(
        forbids=lambda plan, job: plan.pp > 1 and job.workload.balance.loss == "micro_batch",
        reason="train.router.loss micro_batch multiplies statistics of all layers, and a stage knows only its own; "
        "use sequence",
        limits="train.router.loss micro_batch with a pipeline",
    ),
    Rule(
        forbids=lambda plan, job: plan.tensor_by == "autotp" and job.workload.balance.is_active,
        reason="train.router is not proven with AutoTP; leave tensor_by out",
        limits="train.router with AutoTP",
    ),
    Rule(
        forbids=lambda plan, job: plan.islands > 1 and job.workload.balance.bias_update > 0,
        reason="train.router.bias_update follows the load of the global batch, and islands see only their own; "
        "use loss: sequence",
        limits="train.router.bias_update with islands",
    ),
    Rule(
        forbids=lambda plan, job: job.workload.compiled and job.workload.balance.is_active,
        reason="train.router works by hooks on routers, at which compiled layers break; use model.compile: none",
        limits="train.router with compiled layers",
    ),
    Rule(
        forbids=lambda plan, job: plan.ep > 1 and plan.zero_stage == 0 and plan.precision != "fp32",
        reason="without ZeRO, DeepSpeed's 16-bit optimizers leave experts out of the gradient norm and so clip "
        "wrongly; use zero_stage 1",
        limits="expert axis in 16 bits without ZeRO",
    ),
    Rule(
        forbids=lambda plan, job: plan.tp * plan.pp > 1 and plan.offload not in ("none", "cpu"),
        reason="with tensor or pipeline axes only optimizer states are offloaded, and only to the host: parity of "
        "offloaded parameters and NVMe is not proven there; use offload: cpu",
        limits="offload of parameters, or to NVMe, with tensor or pipeline axes",
    ),
    Rule(
        forbids=lambda plan, job: plan.tp * plan.pp > 1 and job.workload.quantized_base,
        reason="4-bit weights (model.lora.quantize) can't be cut into shards or stages; use data_parallel or zero",
        limits="QLoRA with tensor or pipeline axes",
    ),
    Rule(
        forbids=lambda plan, job: plan.tensor_by == "autotp" and job.workload.lora_rank > 0,
        reason="AutoTP does not cut adapters; leave tensor_by out: the toolkit's own shards do",
        limits="AutoTP with LoRA",
    ),
    Rule(
        forbids=lambda plan, job: plan.islands > 1 and plan.precision == "fp16",
        reason="under fp16 each island would find its own loss scale; use precision bf16 or fp32",
    ),
    Rule(
        forbids=lambda plan, job: plan.islands > 1 and job.workload.lora_rank > 0,
        reason="LoRA under local_sgd is not offered: parity of the exchange is not proven for adapters",
    ),
    Rule(
        forbids=lambda plan, job: plan.tensor_by == "autotp" and plan.tp == 1,
        reason="AutoTP is a form of tensor parallelism; use tp above 1",
    ),
    Rule(
        forbids=lambda plan, job: plan.tensor_by == "autotp" and plan.zero_stage == 0,
        reason="AutoTP without ZeRO reports no gradient norm; use zero_stage 1, 2 or 3",
        limits="AutoTP without ZeRO",
    ),
    Rule(
        forbids=lambda plan, job: plan.offload != "none" and plan.zero_stage == 0,
        reason="offload needs ZeRO: DeepSpeed moves only sharded optimizer states; use zero_stage 1, 2 or 3",
    ),
    Rule(
        forbids=lambda plan, job: plan.offload.endswith("_params") and plan.zero_stage != 3,
        reason="parameters can be offloaded under ZeRO 3 only; use zero_stage 3 or offload: cpu",
    ),
    Rule(
        forbids=lambda plan, job: plan.offload.startswith("nvme") and plan.zero_stage != 3,
        reason="DeepSpeed offloads to NVMe under ZeRO 3 only; use zero_stage 3 or offload: cpu",
    ),
    Rule(
        forbids=lambda plan, job: plan.offload.startswith("nvme") and job.cluster.nvme_bytes == 0,
        reason="NVMe offload needs a cluster with nvme_gib above 0",
    ),
    Rule(
        forbids=lambda plan, job: plan.offload.startswith("nvme") and job.cluster.device.backend == "cpu",
        reason="NVMe offload needs an accelerator: DeepSpeed's asynchronous I/O stages through pinned device memory",
    ),
    Rule(
        forbids=lambda plan, job: plan.offload != "none" and job.workload.optimizer != "adamw",
        reason="offload is offered with adamw only: parity of the host update is measured for it alone; use adamw",
    ),
    Rule(
        forbids=lambda plan, job: plan.zero_variant == "mics",
        reason="MiCS was removed in DeepSpeed 0.19.7; zero_variant hpz keeps parameter traffic inside a node instead",
        since="0.19.7",
    ),
    Rule(
        forbids=lambda plan, job: plan.zero_variant == "mics" and plan.offload != "none",
        reason="MiCS does not run with offload",
    ),
    Rule(
        forbids=lambda plan, job: plan.zero_variant != "plain" and plan.zero_stage != 3,
        reason="hpZ and MiCS are variants of ZeRO 3; use zero_stage 3",
    ),
    Rule(
        forbids=lambda plan, job: plan.zero_variant == "plain" and plan.zero_stage > 0 and plan.zero_group != plan.dp,
        reason="a zero_group smaller than dp needs zero_variant hpz (or mics, before DeepSpeed 0.19.7)",
    ),
    Rule(
        forbids=lambda plan, job: plan.zero_variant == "hpz" and not _splits(plan),
        reason="hpZ needs a zero_group above 1 and below dp that divides dp; use that, or zero_variant plain",
    ),
    Rule(
        forbids=lambda plan, job: plan.zero_variant == "hpz" and plan.zero_group > job.cluster.devices_per_node,
        reason="hpZ keeps a second copy of the parameters inside a node; use a zero_group of at most devices_per_node",
    ),
    Rule(
        forbids=lambda plan, job: plan.zero_quantized != "none" and plan.zero_stage != 3,
        reason="ZeRO++ quantised traffic needs ZeRO 3; use zero_stage 3",
    ),
    Rule(
        forbids=lambda plan, job: plan.zero_quantized != "none" and job.cluster.device.backend != "cuda",
        reason="ZeRO++ quantises with CUDA kernels; it needs NVIDIA devices",
    ),
    Rule(
        forbids=lambda plan, job: plan.zero_quantized != "none" and plan.precision == "fp32",
        reason="ZeRO++ quantises 16-bit tensors; use precision bf16 or fp16",
    ),
    Rule(
        forbids=lambda plan, job: job.workload.compiled and plan.zero_stage == 3,
        reason="ZeRO 3 gathers parameters by hooks inside layers, at which compiled code breaks into pieces without "
        "gain; use ZeRO 0 to 2, or model.compile: none",
    ),
    Rule(
        forbids=lambda plan, job: (
            job.workload.compiled and (plan.token_parts * plan.ep > 1 or plan.tensor_by == "autotp")
        ),
        reason="torch.compile has not been tried around the exchanges of sequence and expert parallel and of AutoTP; "
        "use data, ZeRO, tensor or pipeline parallel, or model.compile: none",
    ),
    Rule(
        forbids=lambda plan, job: job.workload.compiled and plan.recompute == "selective",
        reason="selective recompute chooses single operators, which compiled layers no longer have; use recompute "
        "none, full or offload",
    ),
    Rule(
        forbids=lambda plan, job: plan.precision == "fp16" and job.cluster.device.backend == "cpu",
        reason="DeepSpeed has no fp16 on CPU; use precision bf16 or fp32",
    ),
    Rule(
        forbids=lambda plan, job: plan.precision == "bf16" and job.cluster.device.name.startswith("V100"),
        reason="V100 has no bf16; use precision fp16 or fp32",
    ),
    Rule(
        forbids=lambda plan, job: bool(job.workload.ramp_start) and (plan.chunks > 1 or plan.offload != "none"),
        reason="train.batch_ramp changes the number of micro-batches per step, which interleaved and zero-bubble "
        "schedules need in fixed rounds and offload fixes at the start; use schedule 1f1b and no offload",
        limits="batch ramp with several chunks per rank, or offload",
    ),
    Rule(
        forbids=lambda plan, job: job.workload.ramp_start % (plan.dp * plan.islands * plan.micro_batch) > 0,
        reason="train.batch_ramp.start must be a multiple of micro_batch × dp; use a smaller micro_batch or a larger "
        "start",
    ),
    Rule(
        forbids=lambda plan, job: plan.zero_stage > 0 and _divides(job.workload.reduce),
        reason="train.reduce.scaling and predivide are for ZeRO 0: DeepSpeed's sharded reductions always divide before "
        "the sum; leave them out",
    ),
    Rule(
        forbids=lambda plan, job: bool(job.workload.reduce.overlap) and job.cluster.device.backend == "cpu",
        reason="train.reduce.overlap needs device streams, which a CPU does not have; leave it out",
        key="train.reduce.overlap",
    ),
    Rule(
        forbids=lambda plan, job: bool(job.workload.reduce.overlap) and not _can_overlap(plan),
        reason="train.reduce.overlap needs ZeRO 2 or 3, or ZeRO 1 in fp16, in fp32 or with one micro-batch per step, "
        "and no pipeline: DeepSpeed reduces after the backward pass otherwise; leave it out",
    ),
    Rule(
        forbids=lambda plan, job: job.workload.reduce.algorithm in NCCL and job.cluster.device.backend != "cuda",
        reason="train.reduce.algorithm ring and tree are NCCL algorithms, for NVIDIA devices; use auto",
        key="train.reduce.algorithm",
    ),
    Rule(
        forbids=lambda plan, job: job.workload.reduce.algorithm == "hierarchical" and not only_replicas(plan),
        reason="train.reduce.algorithm hierarchical replaces DeepSpeed's all-reduce, which only ZeRO 0 without other "
        "axes uses; use data_parallel, or algorithm auto",
    ),
    Rule(
        forbids=lambda plan, job: job.workload.reduce.algorithm == "hierarchical" and job.cluster.nodes == 1,
        reason="train.reduce.algorithm hierarchical needs several hosts; it gains nothing on one host: use auto",
        key="train.reduce.algorithm",
    ),
    *OPTIMIZER_RULES,
)


def limits() -> list[tuple[str, str]]:
    """Combinations of model parallelism that are refused, with the reason: the table in the docs."""
    return [(rule.limits, rule.reason) for rule in RULES if rule.limits]


def refusal(plan: Plan, job: Job, version: Version | None = None) -> str | None:
    """Why this DeepSpeed can't run the plan; None if it can."""
    for rule in _rules_of(version or deepspeed_version()):
        if rule.forbids(plan, job):
            return rule.reason
    return None


@functools.cache
def _rules_of(version: Version) -> tuple[Rule, ...]:
    """The rules of one version; parsing the versions again for every plan would take most of the search."""
    return tuple(rule for rule in RULES if is_within(version, rule.since, rule.until))


def job_problems(job: Job, version: Version | None = None) -> list[Problem]:
    """Recipe keys that this DeepSpeed can run under no plan."""
    version, any_plan = version or deepspeed_version(), Plan(strategy="any", precision=job.workload.precision)
    found = [rule for rule in RULES if rule.key and is_within(version, rule.since, rule.until)]
    return [Problem(rule.key, rule.reason) for rule in found if rule.forbids(any_plan, job)]


def _splits(plan: Plan) -> bool:
    """Whether the sharding group is smaller than the data-parallel group and divides it."""
    return 1 < plan.zero_group < plan.dp and plan.dp % plan.zero_group == 0


def _divides(section: Reduce) -> bool:
    return section.scaling is not None or section.predivide is not None


def _can_overlap(plan: Plan) -> bool:
    """Whether reduction can overlap: DeepSpeed 0.19.8's `BF16_Optimizer` reduces at the end only."""
    return plan.pp == 1 and plan.zero_stage > 0 and not accumulates_apart(plan)
