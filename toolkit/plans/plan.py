"""The plan: closed, frozen data between planning and running. A hybrid is a point in the product of its axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.clusters.cluster import Cluster
from toolkit.models.spec import ModelSpec
from toolkit.recipe.batch_sections import Reduce


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is to be computed in one step, whatever the strategy."""

    global_batch: int
    """Sequences a step, over all devices."""
    seq_len: int
    """Tokens of a sequence."""
    precision: str
    """`bf16`, `fp16` or `fp32`."""
    optimizer: str = "adamw"
    """Name of the optimizer, as in the recipe."""
    flash_attention: bool = True
    """Whether attention runs without storing its scores (sdpa or flash kernels)."""
    lora_rank: int = 0
    """Rank of LoRA adapters; 0: all weights are trained."""
    quantized_base: bool = False
    """Whether the frozen weights under the adapters are held in 4 bits (QLoRA)."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    exchange_bits: int = 32
    """Of a number that islands send one another."""
    exchange_hidden: bool = False
    """Whether islands train on while they exchange."""
    exchange_delay_steps: int | None = None
    """Steps behind which the exchange hides; None: those of a round."""
    exchange_states: int = 1
    """fp32 copies of the weights that the exchange keeps, shared out over the ranks of an island."""
    reduce: Reduce = field(default_factory=Reduce)
    """How gradients of replicas are added up."""
    ramp_start: int = 0
    """Sequences of the first steps where the batch grows; 0: it does not."""

    @property
    def tokens(self) -> int:
        """Tokens a step."""
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
    """One way to run a job: `dp·tp·pp·sp = devices`, `micro_batch·grad_accum·dp = global_batch`."""

    strategy: str
    """Name in the registry."""
    dp: int = 1
    """Data-parallel replicas."""
    tp: int = 1
    """Tensor-parallel ranks of one replica."""
    pp: int = 1
    """Pipeline stages of one replica."""
    sp: int = 1
    """Sequence-parallel ranks of one replica."""
    ep: int = 1
    """Ranks over which experts are spread, inside the data-parallel ranks."""
    zero_stage: int = 0
    """What is sharded over data-parallel ranks: 0 nothing, 1 optimizer states, 2 + gradients, 3 + parameters."""
    zero_group: int = 1
    """Ranks that hold one full set of sharded states; `dp` unless a variant keeps copies."""
    zero_variant: str = "plain"
    """How a `zero_group` smaller than `dp` is made: `hpz` (second copy of parameters inside a node) or `mics`."""
    zero_quantized: str = "none"
    """ZeRO++ traffic in 8 or 4 bits: `none`, `weights`, `gradients` or `both`."""
    offload: str = "none"
    """Optimizer states on `cpu` or `nvme`; `*_params`: parameters too."""
    micro_batch: int = 1
    """Sequences that one replica computes at a time."""
    grad_accum: int = 1
    """Micro-batches a step; in a pipeline, those in flight."""
    recompute: str = "none"
    """Activations kept (`none`), attention cores dropped (`selective`), only layer inputs kept (`full`)."""
    precision: str = "bf16"
    """Data type of the forward and backward pass."""
    tensor_by: str = "slices"
    """Who cuts matrices for tensor parallelism: the toolkit (`slices`) or DeepSpeed's AutoTP (`autotp`)."""
    islands: int = 1
    """Groups that synchronise only every `local_steps` steps."""
    local_steps: int = 1
    """Steps between two exchanges of islands."""
    pipeline_bounds: tuple[int, ...] = ()
    """First layer of each pipeline stage, and the number of layers; empty without a pipeline."""

    @property
    def devices(self) -> int:
        """All devices that the plan uses."""
        return self.islands * self.dp * self.tp * self.pp * self.sp

    @property
    def global_batch(self) -> int:
        """Sequences a step."""
        return self.islands * self.dp * self.micro_batch * self.grad_accum

    def describe(self) -> str:
        """A short name for tables, e.g. `zero 3 · dp 8 · micro 2 × 4`."""
        name = f"{self.strategy} {self.zero_stage}" if self.strategy == "zero" else self.strategy
        axes = [f"{axis} {getattr(self, axis)}" for axis in ("dp", "tp", "pp", "sp", "ep") if getattr(self, axis) > 1]
        if self.strategy != "zero" and self.zero_stage:
            axes.append(f"ZeRO {self.zero_stage}")
        if self.pipeline_bounds:
            axes.append(f"layers {'-'.join(map(str, self.pipeline_bounds))}")
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


@dataclass(frozen=True)
class Refusal:
    """A plan, or a whole strategy, that can't be used, and why."""

    strategy: str
    reason: str
    plan: Plan | None = None


BLOCK = 2048
"""Elements that share one scale: small enough that layers of different size do not drown each other."""
ONE_BIT_BYTES = 1 / 8 + 4 / BLOCK
"""Of an element: its sign, and its part of an fp32 scale."""
