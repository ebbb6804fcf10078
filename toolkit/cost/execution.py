"""Everything that the memory and time of a training step depend on, for any training framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from toolkit.clusters.cluster import Cluster
from toolkit.cost.operators import LayerShape, Slice
from toolkit.cost.software import DEEPSPEED_HF, RECOMPUTE, Recompute, Software, planned
from toolkit.models.spec import ModelSpec
from toolkit.plans.deepspeed_config import accumulates_apart
from toolkit.plans.exchange import Exchange, with_steps
from toolkit.plans.optimizer_rules import COMPRESSING
from toolkit.plans.pipeline_bounds import crossing
from toolkit.plans.pipeline_orders import layers_by_rank
from toolkit.plans.plan import ONE_BIT_BYTES, Job, Plan
from toolkit.recipe.batch_sections import Reduce


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One training step: model, machines, software and layout."""

    model: ModelSpec
    cluster: Cluster
    software: Software
    seq_len: int
    micro_batch: int
    grad_accum: int
    dp: int = 1
    tp: int = 1
    pp: int = 1
    stage_layers: tuple[int, ...] = ()
    """Layers of each pipeline rank; empty: as even as possible."""
    crosses: float = 0.0
    """Share of the layers that attend to an encoder's output."""
    crossing: float = 1.0
    """What crosses the boundaries of stages, relative to the hidden states of a micro-batch."""
    chunks: int = 1
    """Interleaved model chunks of one pipeline stage."""
    folded: bool = False
    """Whether stages are folded into a V, so that the first rank has both the embedding and the output head."""
    bubble_share: float = 1.0
    """Share of the bubble that the schedule leaves (zero-bubble schedules: below 1)."""
    cp: int = 1
    """Ring context parallel: ranks that pass on keys and values in a ring."""
    sp: int = 1
    """Ulysses sequence parallel: ranks that exchange heads for tokens."""
    ep: int = 1
    expert_tp: int = 0
    """Ranks that share the matrices of an expert; 0: as many as `tp`."""
    expert_load: float = 1.0
    """Tokens of the busiest expert-parallel rank relative to the mean."""
    expert_slots: float = 1.0
    """Rows that experts on several ranks get, full or empty, relative to the visits of tokens."""
    experts_whole: bool = False
    """Whether every tensor-parallel rank holds the matrices of its experts whole, and computes all their tokens."""
    zero_stage: int = 0
    zero_group: int = 1
    zero_variant: str = "mics"
    """What a group smaller than `dp` means: `mics` shards and reduces inside it; `hpz` keeps a second copy."""
    weight_wire: float = 1.0
    """Size of a parameter on the wire relative to its data type (ZeRO++: one half)."""
    grad_wire: float = 1.0
    """Size of a gradient on the wire relative to the precision of the model (ZeRO++: one quarter)."""
    residual_shards: bool = False
    """Whether norms and residuals are sharded over tensor-parallel ranks (Megatron sequence parallel)."""
    recompute: Recompute = RECOMPUTE["none"]
    scores_dropped: bool = False
    """Whether attention scores are recomputed (selective recompute without flash attention)."""
    fp8: bool = False
    element_bytes: int = 2
    emulated: bool = False
    """Whether the tensor cores lack the number format: bf16 on V100 and T4."""
    gathers_every_micro_batch: bool = True
    """Whether ZeRO 3 gathers for every micro-batch; with a pipeline it keeps the parameters for the step."""
    reduces_every_micro_batch: bool = False
    """Whether gradients are reduced after every micro-batch (DeepSpeed's ZeRO 2) instead of once per step."""
    offload: str = "none"
    optimizer: str = "adamw"
    whole_logits: bool = False
    """Whether the loss compares complete logits with a teacher's."""
    complete_texts: bool = False
    """Whether the head reads complete texts."""
    texts: int = 1
    """Rows of a sample, which padding keeps apart."""
    shared_prompt: float = 0.0
    """Share of the tokens that two documents of a row have in common; attention sees them in both."""
    first_passes: int = 0
    """Forward passes over the global batch in each step before the one that is trained on."""
    live_reference: bool = False
    """Whether a copy of the first weights is kept."""
    teacher: ModelSpec | None = None
    """A second model that runs a forward pass in every step."""
    states: str = "fp32"
    """How moments are stored."""
    averaged: bool = False
    """Whether an fp32 average of the weights is kept."""
    lora_rank: int = 0
    lora_targets: str = "all"
    """Layers with adapters: `all` linear ones, those of `attention`, or queries and values (`qv`)."""
    fp32_params: bool = False
    """Whether parameters and gradients are fp32 although the passes run in 16 bits (FSDP mixed precision)."""
    quantized_base: bool = False
    """Whether the frozen weights under the adapters are stored in 4 bits."""
    islands: int = 1
    exchange: Exchange = field(default_factory=Exchange)
    bucket_elements: int | None = None
    """Elements per reduction bucket, if the recipe sets it."""
    hierarchical: bool = False
    """Whether gradients are reduced inside hosts first, then in shards between them."""
    drops_gradients: bool = False
    """Whether gradients are freed after each update (DeepSpeed) instead of staying in buffers (Megatron)."""
    accumulates_apart: bool = False
    """Whether fp32 gradients of all parameters stay allocated between steps (DeepSpeed's `BF16_Optimizer`)."""
    sums_in_bf16: bool = False
    """A pipeline in bf16 without ZeRO: DeepSpeed's `BF16_Optimizer` shards states over replicas all the same, and holds
    gradients and their sums, in bf16 both."""
    frees_gradients: bool = False
    """Whether ZeRO 1 frees gradients outside a rank's shard in the backward pass, as ZeRO 2 does: with one micro-batch
    and a reduction that overlaps (rehearsed: 33.8 GiB for Llama 8B on 8 devices, 47 with all gradients)."""
    master_weights: bool = True
    """Whether 16-bit training keeps fp32 weights and states."""

    @cached_property
    def slice(self) -> Slice:
        """The share of a layer's work that one device does for one micro-batch."""
        return Slice(
            micro_batch=self.micro_batch, seq_len=self.seq_len, parts=self.cp * self.sp, tp=self.tp,
            residual_parts=self.tp if self.residual_shards else 1, ep=self.ep, fp8=self.fp8,
            element_bytes=self.element_bytes, frozen=self.lora_rank > 0, quantized=self.quantized_base,
            adapters={"qv": 2, "attention": 4}.get(self.lora_targets, 7) if self.lora_rank else 0,
            expert_tp=self.expert_tp, emulated=self.emulated, document_share=self.software.document_share,
            expert_load=self.expert_load if self.ep > 1 else 1.0, experts_whole=self.experts_whole,
        )  # fmt: skip

    @property
    def expert_cut(self) -> int:
        """Tensor-parallel ranks that an expert's matrices are cut over."""
        return 1 if self.experts_whole else self.tp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights before ZeRO."""
        return self.dp * self.cp * self.sp

    @cached_property
    def mean_layer_params(self) -> float:
        """Parameters of a layer, averaged over layers."""
        return sum(self.model.layer_params) / self.model.layers

    @cached_property
    def model_params(self) -> int:
        """All parameters of the model."""
        return self.model.params

    @cached_property
    def trained_share(self) -> float:
        """Trained parameters over all parameters: 1, or the share of the adapters under LoRA."""
        return (
            1.0
            if not self.lora_rank
            else lora_params(self.model, self.lora_rank, self.lora_targets) / self.model_params
        )

    @property
    def head_rank(self) -> int:
        """The pipeline rank with the output head."""
        return 0 if self.folded else self.pp - 1

    @property
    def layers_per_stage(self) -> int:
        """Layers of the longest pipeline stage."""
        return max(self.stage_layers, default=-(-self.model.layers // self.pp))


V_BUBBLE = 1 / 3
"""Share of the bubble of two interleaved chunks that a V leaves if forward pass, input gradients and weight gradients
take the same time: (pp − 1) / 6 of a stage's time on a micro-batch (`pipeline_orders.seconds`)."""
LATENT = 0.8
"""Attention with fewer parameters than this share of plain attention is latent (DeepSeek)."""


@lru_cache(maxsize=1024)
def layer_shape(model: ModelSpec, *, experts: bool, crosses: float = 0.0) -> LayerShape:
    """The dense layer of a model, or its mixture-of-experts layer."""
    mlp = (3 if model.gated_mlp else 2) * model.hidden
    dense = max(model.layer_active_params) if not model.moe_layers else model.layer_active_params[-1]
    inner = model.shared_ffn + model.experts_per_token * model.expert_ffn if model.moe_layers else model.ffn
    plain = 2 * model.hidden * model.head_dim * (model.heads + model.kv_heads)
    latent = (dense - mlp * inner) / plain
    return LayerShape(
        attention_share=(latent if 0 < latent < LATENT else 1.0) * (1 + crosses), crosses=crosses,
        hidden=model.hidden, heads=model.heads, kv_heads=model.kv_heads, head_dim=model.head_dim,
        ffn=model.shared_ffn if experts else model.ffn, gated=model.gated_mlp,
        experts=model.experts if experts else 0, experts_per_token=model.experts_per_token if experts else 0,
        expert_ffn=model.expert_ffn if experts else 0,
    )  # fmt: skip


def routed_expert_params(e: Execution) -> int:
    """Parameters of the routed experts of one mixture layer."""
    return e.model.experts * (3 if e.model.gated_mlp else 2) * e.model.hidden * e.model.expert_ffn


def expert_params(e: Execution) -> int:
    """Parameters of all routed experts of the model."""
    return e.model.moe_layers * routed_expert_params(e)


def num_layers(e: Execution, index: int) -> int:
    """Layers of a stage."""
    if e.stage_layers:
        return e.stage_layers[index]
    rest = e.model.layers - e.layers_per_stage * (e.pp - 1)
    last = rest if rest > 0 else max(1, e.model.layers // e.pp)
    return e.layers_per_stage if index < e.pp - 1 or e.pp == 1 else last


def in_flight(e: Execution, index: int) -> float:
    """Micro-batches whose activations a rank holds; under interleaving, chunks in flight divided by chunks per rank."""
    if e.pp == 1:
        return 1.0
    if e.chunks == 1:
        return min(e.grad_accum, e.pp - index)
    if e.folded:
        return min(e.grad_accum, e.pp)
    return _passes_ahead(e, index) / e.chunks


def embedded_in_flight(e: Execution) -> float:
    """Micro-batches that the first rank holds in its first chunk, which come first in each round of an interleaving."""
    if e.chunks == 1 or e.folded:
        return in_flight(e, 0)
    rounds, rest = divmod(_passes_ahead(e, 0), e.chunks * _per_round(e))
    return rounds * _per_round(e) + min(rest, _per_round(e))


def _passes_ahead(e: Execution, index: int) -> int:
    """Forward passes of chunks that a rank of an interleaving does before its first backward pass."""
    ahead = (e.chunks - 1) * _per_round(e) + 2 * (e.pp - 1 - index) + 1
    return min(e.grad_accum * e.chunks, ahead)


def _per_round(e: Execution) -> int:
    """Micro-batches that pass a chunk before the next chunk's turn."""
    return e.grad_accum // max(1, e.grad_accum // e.pp)


def stage_layer_params(e: Execution, index: int) -> Sequence[float]:
    """Parameters of the layers of a pipeline rank. With several chunks only the first rank has first, dense layers."""
    layers = num_layers(e, index)
    if not e.model.moe_layers and (not e.model.encoder_layers or e.chunks > 1):
        return [e.mean_layer_params] * layers
    if e.chunks > 1:
        first = layers // e.chunks if index == 0 else 0
        return *e.model.layer_params[:first], *e.model.layer_params[first - layers :]
    start = sum(num_layers(e, before) for before in range(index))
    return e.model.layer_params[start : start + layers]


def stage_experts(e: Execution, index: int) -> float:
    """Parameters of the routed experts of a stage, on all ranks that share them."""
    routed = routed_expert_params(e)
    return sum(routed for params in stage_layer_params(e, index) if e.model.moe_layers and params > routed)


def lora_params(model: ModelSpec, rank: int, targets: str = "all") -> int:
    """Parameters of adapters, by default on every linear layer except the head: rank × (inputs + outputs) each.

    In transformers routed experts are two tensors over all of them; peft 0.21 gives each expert its own adapters.
    """
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    if targets == "qv":
        return rank * model.layers * (2 * model.hidden + q + kv)
    attention = model.layers * ((model.hidden + q) * 2 + (model.hidden + kv) * 2)
    if targets == "attention":
        return rank * attention
    matrices = 3 if model.gated_mlp else 2
    dense = (model.layers - model.moe_layers) * (model.hidden + model.ffn)
    shared = model.moe_layers * (model.hidden + model.shared_ffn) if model.shared_ffn else 0
    routed = model.moe_layers * model.experts * (2 * model.hidden + matrices * model.expert_ffn)
    return rank * (attention + matrices * (dense + shared) + routed)


def _expert_load(plan: Plan, job: Job, slots: float) -> float:
    """Load of the busiest rank; with a limit every rank gets and computes the same slots."""
    balance = job.workload.balance
    if balance.capacity_factor or plan.ep == 1:
        return slots
    return balance.busiest_rank(job.model.experts / plan.ep)


def of_plan(plan: Plan, job: Job) -> Execution:
    """The execution of a plan by DeepSpeed with a Hugging Face model."""
    work = job.workload
    reduces_early = plan.zero_stage > 0 and plan.pp == 1 and not accumulates_apart(plan)
    overlap = reduces_early and job.cluster.device.backend != "cpu" and work.reduce.overlap is not False
    slots = work.balance.expert_slots(job.model.experts, job.model.experts_per_token) if plan.ep > 1 else 1.0
    compiled = work.compiled and job.cluster.device.backend != "cpu"  # no gain was measured on CPUs
    own, inner = job.model.full_scores, plan.pipeline_bounds[1:-1]
    software = _deepspeed(
        flash=work.flash_generation if work.flash_attention and not own else 0,
        dp_overlap=overlap,
        fusion="compiled" if compiled else "kernels" if work.fused_kernels and not own else "eager",
        composed_glu=job.model.model_type == "gpt_oss",
        pp_overlap=plan.schedule != "1f1b" and job.cluster.device.backend != "cpu",
    )
    return Execution(
        model=job.model, cluster=job.cluster, software=software, seq_len=work.seq_len,
        micro_batch=plan.micro_batch, grad_accum=plan.grad_accum, dp=plan.dp, tp=plan.tp, pp=plan.pp, sp=plan.sp,
        cp=plan.cp, ep=plan.ep, experts_whole=plan.ep > 1 and plan.tp > 1, expert_tp=int(plan.ep > 1),
        expert_load=_expert_load(plan, job, slots), expert_slots=slots,
        stage_layers=_stage_layers(plan), crosses=_crosses(job.model, 0, job.model.layers),
        crossing=max((crossing(job.model, bound, plan.micro_batch, work.seq_len) for bound in inner), default=1.0),
        chunks=plan.chunks, folded=plan.schedule == "zero_bubble",
        bubble_share=V_BUBBLE if plan.schedule == "zero_bubble" else 1.0,
        zero_stage=plan.zero_stage, zero_variant=plan.zero_variant,
        zero_group=plan.zero_group * (plan.token_parts if plan.zero_stage else 1),  # DeepSpeed shards over dp × sp × cp
        weight_wire=0.5 if plan.zero_quantized in ("weights", "both") else 1.0,
        grad_wire=_grad_wire(plan, work.reduce, work.optimizer),
        bucket_elements=work.reduce.bucket_elements, hierarchical=work.reduce.algorithm == "hierarchical",
        residual_shards=plan.sequence_sharded,
        recompute=planned(plan, job.model), scores_dropped=plan.recompute == "selective",
        element_bytes=4 if plan.precision == "fp32" else 2,
        emulated=plan.precision == "bf16" and not job.cluster.device.flash_attention,
        reduces_every_micro_batch=plan.zero_stage >= 2,
        drops_gradients=True, accumulates_apart=accumulates_apart(plan),
        sums_in_bf16=plan.zero_stage == 0 and plan.pp > 1 and plan.precision == "bf16",
        frees_gradients=plan.zero_stage == 1 and plan.precision != "fp16" and plan.grad_accum == 1 and overlap,
        offload=plan.offload, optimizer=work.optimizer, states=work.states, averaged=work.averaged,
        lora_rank=work.lora_rank, lora_targets=work.lora_targets,
        islands=plan.islands, exchange=with_steps(work.exchange, plan.local_steps),
        quantized_base=work.quantized_base, whole_logits=work.whole_logits,
        complete_texts=work.complete_texts, texts=work.texts,
        shared_prompt=work.shared_prompt,
        first_passes=work.first_passes, live_reference=work.live_reference, teacher=work.teacher,
    )  # fmt: skip


def of_stage(e: Execution, index: int) -> Execution:
    """The execution as a pipeline rank sees it: of an encoder-decoder, with the layers and boundaries of the rank."""
    if not e.model.encoder_layers or not e.stage_layers or e.chunks > 1:
        return e
    bounds = sum(e.stage_layers[:index]), sum(e.stage_layers[: index + 1])
    inner = [bound for bound in bounds if 0 < bound < e.model.layers]
    most = max((crossing(e.model, bound, e.micro_batch, e.seq_len) for bound in inner), default=1.0)
    return replace(e, crosses=_crosses(e.model, *bounds), crossing=most)


def _crosses(model: ModelSpec, start: int, end: int) -> float:
    """Share of the layers from `start` to `end` that attend to an encoder's output."""
    return max(0, end - max(start, model.encoder_layers)) / (end - start) if model.encoder_layers else 0.0


def embeds_targets(e: Execution, index: int) -> bool:
    """Whether a rank holds a further table of tokens, for the first decoder layer after an encoder."""
    if not e.model.encoder_layers or not e.stage_layers or e.chunks > 1 or index == 0:
        return False
    start = sum(e.stage_layers[:index])
    here = start <= e.model.encoder_layers < start + e.stage_layers[index]
    return here and not (e.model.tied_embeddings and index == e.head_rank)


def _stage_layers(plan: Plan) -> tuple[int, ...]:
    return layers_by_rank(plan.pipeline_bounds, plan.schedule, plan.pp) if plan.pipeline_bounds else ()


def _grad_wire(plan: Plan, section: Reduce, optimizer: str) -> float:
    """Size of a gradient on the wire relative to the precision of the model."""
    if plan.zero_quantized in ("gradients", "both"):
        return 0.25
    if optimizer in COMPRESSING:
        return ONE_BIT_BYTES / (4 if plan.precision == "fp32" else 2)
    own, sent = plan.precision == "fp32", (section.dtype or plan.precision) == "fp32"
    return (2.0 if sent else 1.0) / (2.0 if own else 1.0)


@lru_cache(maxsize=32)
def _deepspeed(*, flash: int, dp_overlap: bool, fusion: str, composed_glu: bool, pp_overlap: bool) -> Software:
    return replace(
        DEEPSPEED_HF,
        flash=flash,
        dp_overlap=dp_overlap,
        fusion=fusion,
        composed_glu=composed_glu,
        pp_overlap=pp_overlap or DEEPSPEED_HF.pp_overlap,
    )
