"""Which optimizers run under which plans: a part of the table of rules, each with the reason that refusals quote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toolkit.plans.plan import Job, Plan

LAYER_WISE = ("lamb", "lars", "adafactor")
"""Optimizers whose update depends on the norms of complete layers, or on their rows and columns."""
ONE_BIT = ("onebit_lamb", "zero_one_adam")
"""Optimizers of DeepSpeed before 0.19.7 that compress through NCCL."""
COMPRESSING = ("onebit_adam", *ONE_BIT)
"""Optimizers that exchange signs; their predicted traffic is that after `freeze_steps`."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A combination that DeepSpeed can't run."""

    forbids: Callable[[Plan, Job], bool]
    """Whether the rule refuses this plan."""
    reason: str
    """Why, and what to do instead."""
    since: str = "0"
    """First DeepSpeed version with the limit."""
    until: str = ""
    """First DeepSpeed version without it; empty: none yet."""
    key: str = ""
    """The recipe key that causes it, if it does for every plan: reported as bad input before planning."""
    limits: str = ""
    """What of model parallelism it limits: its row in the table of limits in docs/model_parallelism.md."""


def only_replicas(plan: Plan) -> bool:
    """Whether every rank holds a full replica, and nothing is sharded."""
    return plan.zero_stage == 0 and plan.tp * plan.pp * plan.token_parts * plan.ep * plan.islands == 1


OPTIMIZER_RULES: tuple[Rule, ...] = (
    Rule(
        forbids=lambda plan, job: job.workload.optimizer in LAYER_WISE and (plan.ep > 1 or plan.tensor_by == "autotp"),
        reason="lamb, lars and adafactor need norms of complete layers, but expert ranks and AutoTP do not tell "
        "which parts they hold; use another strategy, or optimizer adamw or lion",
        limits="LAMB and LARS with experts or AutoTP",
    ),
    Rule(
        forbids=lambda plan, job: job.workload.optimizer == "onebit_adam" and not only_replicas(plan),
        reason="onebit_adam averages compressed momentum between full replicas; use data_parallel (ZeRO 0)",
    ),
    Rule(
        forbids=lambda plan, job: job.workload.optimizer == "onebit_adam" and job.workload.precision == "fp16",
        reason="onebit_adam keeps compression errors, which a changing loss scale corrupts; use precision bf16 or fp32",
        key="model.precision",
    ),
    Rule(
        forbids=lambda plan, job: job.workload.optimizer in ONE_BIT,
        reason="0/1 Adam and 1-bit LAMB of DeepSpeed were removed in 0.19.7; use onebit_adam, "
        "strategy.zero_quantized on NVIDIA devices, or local_sgd for slow links",
        since="0.19.7",
        key="train.optimizer",
    ),
    Rule(
        forbids=lambda plan, job: job.workload.optimizer in ONE_BIT and job.cluster.device.backend != "cuda",
        reason="1-bit optimizers compress through NCCL; they need NVIDIA devices",
    ),
    Rule(
        forbids=lambda plan, job: job.workload.optimizer in ONE_BIT and (plan.zero_stage > 0 or plan.pp > 1),
        reason="1-bit optimizers do their own reduction; use ZeRO 0 without a pipeline",
    ),
    Rule(
        forbids=lambda plan, job: job.workload.optimizer in ONE_BIT and plan.precision != "fp16",
        reason="1-bit optimizers are built on DeepSpeed's fp16 optimizer; use precision fp16",
    ),
    Rule(
        forbids=lambda plan, job: job.workload.optimizer == "muon" and (plan.ep > 1 or plan.tensor_by == "autotp"),
        reason="muon computes on complete matrices, but expert ranks and AutoTP do not tell which parts they hold; use "
        "another strategy, or optimizer adamw",
        limits="Muon with expert ranks or AutoTP",
    ),
    Rule(
        forbids=lambda plan, job: job.workload.optimizer in ("muon", "adafactor") and plan.offload != "none",
        reason="muon and adafactor exchange parts of matrices between devices, and offload keeps them on the host; use "
        "offload none, or optimizer adamw",
    ),
    Rule(
        forbids=lambda plan, job: job.workload.optimizer in (*LAYER_WISE, "muon") and _shards_in_groups(plan),
        reason="lamb, lars, adafactor and muon need complete layers from all replicas, but MiCS shards them within "
        "smaller groups; use a zero_group of all replicas, zero_variant hpz, or optimizer adamw",
    ),
    Rule(
        forbids=lambda plan, job: job.workload.states != "fp32" and plan.offload != "none",
        reason="train.states saves device memory, and offload keeps the states on the host; use states fp32, or "
        "offload none",
    ),
    Rule(
        forbids=lambda plan, job: job.workload.states != "fp32" and plan.tensor_by == "autotp",
        reason="packed states depend on the place of each element in the full parameter, which AutoTP does not tell; "
        "use tensor_by toolkit, or states fp32",
    ),
    Rule(
        forbids=lambda plan, job: job.workload.states == "8bit" and (plan.ep > 1 or _shards_in_groups(plan)),
        reason="8-bit blocks that are cut between ranks need one scale, which expert ranks and MiCS groups do not "
        "share; use states bf16 or fp32",
    ),
    Rule(
        forbids=lambda plan, job: _averages(job) and plan.offload.startswith("nvme"),
        reason="an average is kept beside the weights, but nvme offload moves known states only; use offload "
        "cpu or none",
    ),
    Rule(
        forbids=lambda plan, job: _averages(job) and plan.islands > 1,
        reason="train.ema and schedule_free average the weights of one model, and islands train several; use another "
        "strategy",
    ),
)


def _shards_in_groups(plan: Plan) -> bool:
    return plan.zero_variant == "mics" and plan.zero_stage > 0 and 1 < plan.zero_group < plan.dp


def _averages(job: Job) -> bool:
    return job.workload.averaged or job.workload.optimizer == "schedule_free"
