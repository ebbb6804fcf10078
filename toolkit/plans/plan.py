"""The plan: frozen data between planning and running, one point in the product of all axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.clusters.cluster import Cluster
from toolkit.models.spec import ModelSpec
from toolkit.plans.exchange import Exchange
from toolkit.plans.router_balance import Balance
from toolkit.recipe.batch_sections import Reduce


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one step has to compute, independent of the strategy."""

    global_batch: int
    """Sequences per step, over all devices."""
    seq_len: int
    """Tokens per sequence."""
    precision: str
    """`bf16`, `fp16` or `fp32`."""
    optimizer: str = "adamw"
    """Name of the optimizer, as in the recipe."""
    states: str = "fp32"
    """How moments are stored: `fp32`, `bf16` or `8bit`."""
    averaged: bool = False
    """Whether a moving average of the weights is kept."""
    flash_attention: bool = True
    """Whether attention runs without storing its scores (sdpa or flash kernels)."""
    flash_generation: int = 2
    """Generation of the attention kernel: 3 where the recipe asks for flash-attn 3, which is written for Hopper."""
    fused_kernels: bool = False
    """Whether the recipe asks for Liger's norms, rotary embeddings and gated MLPs."""
    compiled: bool = False
    """Whether decoder layers run as code of torch.compile."""
    lora_targets: str = "all"
    """Layers with adapters: `all` linear ones, those of `attention`, or queries and values (`qv`)."""
    lora_rank: int = 0
    """Rank of LoRA adapters; 0: all weights are trained."""
    quantized_base: bool = False
    """Whether the frozen weights under the adapters are held in 4 bits (QLoRA)."""
    grad_clip: float = 1.0
    """Global gradient norm to clip to; 0: no clipping."""
    exchange: Exchange = field(default_factory=Exchange)
    """How islands exchange weights; a plan's `local_steps` replace those in it, unless the run chooses them."""
    reduce: Reduce = field(default_factory=Reduce)
    """How gradients are reduced across replicas."""
    steps: int = 0
    """Steps of the whole run; 0: the recipe gives epochs, so it depends on the data."""
    ramp_start: int = 0
    """Sequences per step at the start of a batch ramp; 0: no ramp."""
    whole_logits: bool = False
    """Whether the loss compares complete logits with a teacher's."""
    complete_texts: bool = False
    """Whether the head reads complete texts: classes, scores and embeddings."""
    texts: int = 1
    """Rows of a sample, which padding keeps apart; `seq_len` counts the tokens of all."""
    shared_prompt: float = 0.0
    """Share of the tokens that two documents of a row have in common; attention sees them in both."""
    first_passes: int = 0
    """Forward passes over the global batch in each step before the one that is trained on: of a live reference, for
    KTO's divergence, for embeddings."""
    live_reference: bool = False
    """Whether a copy of the first weights is kept, for a live reference."""
    teacher: ModelSpec | None = None
    """The teacher that predicts in every step, if there is one."""
    balance: Balance = field(default_factory=Balance)
    """How the routers of a mixture are balanced."""

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.global_batch * self.seq_len


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that planning may depend on."""

    model: ModelSpec
    cluster: Cluster
    workload: Workload
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Axes that the recipe fixes: plan field → value."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to run a job: `dp·tp·pp·sp·cp = devices`, `micro_batch·grad_accum·dp = global_batch`."""

    strategy: str
    """Name in the registry."""
    dp: int = 1
    """Data-parallel replicas."""
    tp: int = 1
    """Tensor-parallel ranks of one replica."""
    pp: int = 1
    """Pipeline ranks of one replica."""
    sp: int = 1
    """Sequence-parallel ranks of one replica."""
    cp: int = 1
    """Ring-attention ranks of one replica: each holds the tokens of `sp` sequence-parallel ranks."""
    sequence_sharded: bool = False
    """Whether tensor ranks hold their share of the tokens between sharded matrices, instead of all tokens."""
    ep: int = 1
    """Ranks that experts are distributed over, a subset of the data-parallel ranks."""
    zero_stage: int = 0
    """What is sharded over data-parallel ranks: 0 nothing, 1 optimizer states, 2 + gradients, 3 + parameters."""
    zero_group: int = 1
    """Ranks that together hold one full set of sharded states; `dp` unless a variant keeps copies."""
    zero_variant: str = "plain"
    """How a `zero_group` smaller than `dp` works: `hpz` (second copy of parameters inside a node) or `mics`."""
    zero_quantized: str = "none"
    """ZeRO++ traffic in 8 or 4 bits: `none`, `weights`, `gradients` or `both`."""
    offload: str = "none"
    """Optimizer states on `cpu` or `nvme`; `*_params`: parameters too."""
    micro_batch: int = 1
    """Sequences that one replica processes at a time."""
    grad_accum: int = 1
    """Micro-batches per step."""
    recompute: str = "none"
    """Keep all activations (`none`), drop those of attention (`selective`), or keep layer inputs only (`full`)."""
    precision: str = "bf16"
    """Data type of the forward and backward pass."""
    tensor_by: str = "slices"
    """What shards matrices for tensor parallelism: the toolkit (`slices`) or DeepSpeed's AutoTP (`autotp`)."""
    islands: int = 1
    """Groups of devices that synchronise only every `local_steps` steps."""
    local_steps: int = 1
    """Steps between two exchanges between islands."""
    pipeline_bounds: tuple[int, ...] = ()
    """First layer of each pipeline stage, and the number of layers; empty without a pipeline."""
    schedule: str = "1f1b"
    """Order of a pipeline's forward and backward passes: `1f1b`, `interleaved` or `zero_bubble`."""
    chunks: int = 1
    """Stages per pipeline rank: the model is cut into `pp · chunks` stages."""

    @property
    def token_parts(self) -> int:
        """Ranks that share the tokens of a sequence and hold complete models (before tensor and pipeline axes)."""
        return self.sp * self.cp

    @property
    def devices(self) -> int:
        """All devices that the plan uses."""
        return self.islands * self.dp * self.tp * self.pp * self.token_parts

    @property
    def global_batch(self) -> int:
        """Sequences per step."""
        return self.islands * self.dp * self.micro_batch * self.grad_accum

    def describe(self) -> str:
        """A short name for tables, e.g. `zero 3 · dp 8 · micro 2 × 4`."""
        name = f"{self.strategy} {self.zero_stage}" if self.strategy == "zero" else self.strategy
        axes = [
            f"{axis} {getattr(self, axis)}" for axis in ("dp", "tp", "pp", "cp", "sp", "ep") if getattr(self, axis) > 1
        ]
        if self.strategy != "zero" and self.zero_stage:
            axes.append(f"ZeRO {self.zero_stage}")
        if self.schedule != "1f1b":
            axes.append(f"{self.schedule.replace('_', ' ')} {self.chunks} chunks")
        if self.pipeline_bounds:
            axes.append(f"layers {_shortened(self.pipeline_bounds)}")
        if self.sequence_sharded:
            axes.append("token shares")
        if self.tensor_by != "slices":
            axes.append("AutoTP")
        if self.zero_variant != "plain":
            axes.append(f"{self.zero_variant} {self.zero_group}")
        if self.zero_quantized != "none":
            axes.append(f"quantized {self.zero_quantized}")
        if self.offload != "none":
            axes.append(f"offload {self.offload}")
        if self.islands > 1:
            axes.append(f"{self.islands} islands, every {self.local_steps} steps")
        axes.append(f"micro {self.micro_batch} × {self.grad_accum}")
        if self.recompute != "none":
            axes.append(f"recompute {self.recompute}")
        return " · ".join([name, *axes])


def _shortened(bounds: tuple[int, ...]) -> str:
    """Stage bounds for tables; of many, the first and the last."""
    shown = [str(bound) for bound in bounds]
    return "-".join(shown if len(shown) <= MOST_SHOWN else [*shown[:4], "…", *shown[-2:]])


@dataclass(frozen=True)
class Refusal:
    """Why a plan, or all plans of a strategy, can't be used."""

    strategy: str
    reason: str
    plan: Plan | None = None


MOST_SHOWN = 17
"""Stage bounds that a description lists in full."""
BLOCK = 2048
"""Elements that share one scale in 1-bit compression: few enough that large values do not swamp small ones."""
ONE_BIT_BYTES = 1 / 8 + 4 / BLOCK
"""Bytes per element in 1-bit compression: its sign, and its part of an fp32 scale."""

UNKEEPABLE = "AutoTP does not report which slice of a parameter a rank holds, so checkpoints can't be written"
"""Why a plan with AutoTP can't be saved."""


def unkeepable(plan: Plan) -> str:
    """Why checkpoints of a plan can't be written; empty if they can."""
    return UNKEEPABLE if plan.tensor_by == "autotp" else ""
