"""How training software uses the hardware and what it recomputes; the name of a framework only selects flags."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from toolkit.models.spec import ModelSpec
from toolkit.plans.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Software:
    """How a training framework runs a layer and hides its communication."""

    fusion: str = "eager"
    """`eager`: one pass over memory per operator; `kernels`: hand-fused norms and softmax; `compiled`: all fused."""
    flash: int = 2
    """Generation of the attention kernel: 0 stores scores, 1 and 2 FlashAttention, 3 kernels of Hopper, 4 of Blackwell
    (FlashAttention 3 and 4, cuDNN)."""
    tp_overlap: bool = False
    """Whether tensor-parallel collectives are sliced and overlap with their matmul (userbuffers, asynchronous TP)."""
    dp_overlap: bool = True
    """Whether gradient and parameter traffic overlaps with compute."""
    pp_overlap: bool = False
    """Whether sends between pipeline stages overlap with compute."""
    grad_bytes: int = 2
    """Bytes per gradient element in a reduction."""
    dropout: bool = False
    """Whether hidden and attention dropout are applied (GPT-2 era recipes)."""
    zero_messages: int = 1
    """Collectives per layer under ZeRO 3: 1 for a flat layer (FSDP), one per tensor in DeepSpeed."""
    zero_copies: bool = False
    """Whether ZeRO 3 copies gathered tensors from flat buffers and gradients into them (DeepSpeed)."""
    fused_accumulation: bool = False
    """Whether the matmul of a weight gradient adds it to the sum over micro-batches (Megatron since 2022)."""
    scattered_sends: bool = False
    """Whether each tensor-parallel rank sends only its part of the activations to the next stage (Megatron-LM)."""
    expert_loop: bool = False
    """Whether experts run one after the other (transformers before version 5) instead of as one grouped matmul."""
    dispatch_once: bool = False
    """Whether a token goes to each node once, however many experts it visits there (DeepEP)."""
    grouped_experts: bool = False
    """Whether all experts of a rank are one product, whose tiles a busy expert and its neighbours share."""
    ep_overlap: bool = False
    """Whether exchanges of experts overlap with compute of another micro-batch."""
    graphs: bool = False
    """Whether layers are launched as CUDA graphs, so that the device never waits for the host."""
    unpadded_vocab: bool = False
    """Whether the output matrix has exactly as many rows as the vocabulary (Hugging Face), which tiles may not fit."""
    composed_gelu: bool = False
    """Whether GELU is composed of eight operators (transformers' `gelu_new`)."""
    fused_loss: str = ""
    """`kernel`: the loss overwrites the logits; `linear`: logits are computed in chunks and never stored."""
    fp8_gather: bool = False
    """Whether sharded parameters are sent in 8 bits."""
    document_share: float = 1.0
    """Length of packed documents, which attention keeps apart, relative to the sequence."""
    fused_experts: bool = False
    """Whether casts and activations are parts of the experts' matmuls and permutations."""
    composed_glu: bool = False
    """Whether a gated activation with limits and biases is composed of ten operators (gpt-oss)."""
    step_hooks: int = 2
    """Times per step that DeepSpeed handles a tensor on the host: when its gradient is reduced, and in the update."""
    fp32_adapters: bool = False
    """Whether LoRA adapters, and copies of their inputs, are fp32 (peft in mixed precision)."""
    fp32_residual: bool = False
    """Whether norms, and so the residual stream, are fp32 (models that peft has prepared for 4-bit training)."""
    autocast: bool = False
    """Whether fp32 weights are cast operator by operator, and updated tensor by tensor (torch.autocast)."""


NORM_FUSED = (4.0, 10.0)
"""Bytes per element of a fused norm: read and write; backward three tensors, then two for the weight gradient."""
NORM_RMS_EAGER = (34.0, 50.0)
"""Bytes per element of eager RMSNorm: to fp32 (2+4), square (4+4), mean (4), scale (4+4), to 16 bits (4+2), weight
(2+2), and the same chain backward."""
RESIDUAL = {"eager": (6.0, 6.0), "kernels": (6.0, 6.0), "compiled": (4.0, 4.0)}
"""Bytes per element of a residual sum: two reads and a write; compiled code fuses it with the norm."""
RESIDUAL_DROPOUT = (7.0, 9.0)
"""Bytes per element with bias, dropout and its 1-byte mask in one kernel (Megatron)."""
ROPE = {"eager": 18.0, "kernels": 4.0, "compiled": 4.0}
"""Bytes per element of rotary embedding, in each pass: rotate_half (2+2), two products (8), sum (4+2); fused: read
and write."""
PLAIN_ACTIVATION = (4.0, 6.0)
COMPOSED_GELU = (34.0, 52.0)
"""Bytes per element of GPT-2's GELU as transformers writes it: power, two products, sum, tanh, sum, two products."""
GATED_ACTIVATION = {"eager": (10.0, 16.0), "kernels": (10.0, 16.0), "compiled": (6.0, 10.0)}
"""Bytes per element of a gated activation: silu (2+2) and product (4+2); backward 3 and 5 passes; fused: two reads, one
write."""
COMPOSED_GLU = (50.0, 85.0)
"""Bytes per element of gpt-oss' activation: two biases, two limits, scale, sigmoid, sum, two products."""
SOFTMAX = {"eager": (12.0, 12.0), "kernels": (3.0, 5.0), "compiled": (3.0, 5.0)}
"""Bytes per score of scale, mask and softmax: one fused kernel, which finds half of what it reads in the cache, or four
passes."""
DROPOUT = 5.0
"""Bytes per element of dropout: read, write and a 1-byte mask."""
HEAD = {"eager": (20.0, 18.0), "kernels": (36.0, 18.0), "compiled": (6.0, 6.0)}
"""Bytes per logit of the loss: fp32 cast and log-softmax in torch; nine passes in Megatron's parallel loss."""
FUSED_HEAD = (6.0, 4.0)
"""Bytes per logit of a fused loss: read the logits twice, write their gradient in place."""


def residual_stream_bytes(software: Software, *, gated: bool) -> tuple[float, float]:
    """Bytes per element of the residual stream for two norms and two residual sums, forward and backward."""
    norm = NORM_RMS_EAGER if software.fusion == "eager" and gated else NORM_FUSED
    residual = RESIDUAL_DROPOUT if software.dropout else RESIDUAL[software.fusion]
    wide = 2 if software.fp32_residual else 1
    return 2 * wide * (norm[0] + residual[0]), 2 * wide * (norm[1] + residual[1])


def activation_bytes(software: Software, *, gated: bool) -> tuple[float, float]:
    """Bytes per inner element of the MLP's activation, forward and backward."""
    if gated:
        return COMPOSED_GLU if software.composed_glu else GATED_ACTIVATION[software.fusion]
    return COMPOSED_GELU if software.composed_gelu else PLAIN_ACTIVATION


def head_stream_bytes(software: Software) -> tuple[float, float]:
    """Bytes per logit that the loss reads and writes, forward and backward."""
    return FUSED_HEAD if software.fused_loss else HEAD[software.fusion]


def softmax_bytes(software: Software) -> tuple[float, float]:
    """Bytes per stored attention score that softmax and dropout read and write, forward and backward."""
    forward, backward = SOFTMAX[software.fusion]
    extra = DROPOUT if software.dropout else 0.0
    return forward + extra, backward + extra


ZERO_TENSORS = 7
"""Weight matrices per layer, which DeepSpeed's ZeRO 3 fetches one by one; small tensors stay resident."""
ZERO_TENSORS_THEN = 12
"""Weights, biases and norms of a GPT layer, each sent separately by the DeepSpeed of published figures."""
DEEPSPEED_HF = Software(
    fusion="eager",
    flash=2,
    tp_overlap=False,
    dp_overlap=True,
    grad_bytes=2,
    zero_messages=ZERO_TENSORS,
    zero_copies=True,
    unpadded_vocab=True,
    grouped_experts=True,
)
"""DeepSpeed with a Hugging Face model: what this toolkit runs."""

_COMPILED = re.compile(r"compil|thunder|xla|jax|maxtext|levanter|easylm|inductor|habana")
_MODERN = re.compile(r"nemo|bridge|megatron[- ]core|mcore|transformer ?engine|\bte\b|primus|megascale")
_KERNELS = re.compile(
    r"megatron|nemo|neox|nanotron|apex|liger|unsloth|fused|transformer ?engine|\bte\b|primus|megascale|mcore"
)
_TP_OVERLAP = re.compile(r"async ?tp|userbuffer|tp overlap")
_NO_DP_OVERLAP = re.compile(r"megatron-lm|megatron-deepspeed|megatron\+deepspeed|local ddp|alpa")
_REDUCES_16 = re.compile(r"internevo|fsdp1|(hf|swift).*deepspeed|^deepspeed")
_FIRST_FLASH = re.compile(r"composer|llm-foundry")
_HUGGING_FACE = re.compile(
    r"\b(hf|trl|peft)\b|hugging|transformers|swift \+ hf|axolotl|llama-?factory|unsloth|accelerate|sfttrainer|habana"
)
_HOPPER_KERNELS = re.compile(r"xla|jax|maxtext|fa ?3|flash.?attention.?3|cudnn")
_HOPPER = re.compile(r"H\d00|GH|B\d00|GB|MI3")
_BLACKWELL = re.compile(r"B\d00|GB")


def software_of(
    framework: str, *, device: str, flash: bool, precision: str, pipeline: bool, zero_stage: int = 0
) -> Software:
    """The flags for a framework, derived from the words of its description."""
    name = framework.lower()
    modern = flash and bool(_MODERN.search(name))  # Megatron's successors always run fused attention
    fp8 = "fp8" in precision
    return Software(
        fusion=_fusion(name, modern=modern, fp8=fp8),
        flash=_flash(name, device, modern=modern) if flash else 0,
        tp_overlap=modern or bool(_TP_OVERLAP.search(name)),
        dp_overlap=not (pipeline and _NO_DP_OVERLAP.search(name)) and not ("deepspeed" in name and zero_stage == 3),
        pp_overlap=modern,
        grad_bytes=2 if (modern and "core" not in name) or precision == "fp16" or _REDUCES_16.search(name) else 4,
        dropout=bool(_KERNELS.search(name)) and not flash and not _HUGGING_FACE.search(name),
        zero_messages=ZERO_TENSORS_THEN if "deepspeed" in name else 1,
        zero_copies="deepspeed" in name,
        unpadded_vocab=bool(_HUGGING_FACE.search(name)),
        composed_gelu=bool(_HUGGING_FACE.search(name)),
        dispatch_once=modern,
        expert_loop=bool(_HUGGING_FACE.search(name)) and "scatter" not in name,
        fused_accumulation=modern or bool(re.search(r"megatron-lm.*202[2-9]", name)),
        scattered_sends=modern or "megatron-lm" in name,
        fused_loss="kernel" if re.search(r"composer|llm-foundry|unsloth", name) else "",
        fp8_gather=fp8 and "fsdp2" in name,
    )


def _fusion(name: str, *, modern: bool, fp8: bool) -> str:
    """Degree of fusion: torchtitan compiles unless it says `eager`; fp8 training always has fused casts."""
    if modern or _COMPILED.search(name) or ("torchtitan" in name and "eager" not in name):
        return "compiled"
    return "kernels" if fp8 or _KERNELS.search(name) else "eager"


def _flash(name: str, device: str, *, modern: bool) -> int:
    if _HOPPER.match(device) and (modern or _HOPPER_KERNELS.search(name)):
        return 4 if _BLACKWELL.match(device) else 3
    return 1 if _FIRST_FLASH.search(name) else 2


@dataclass(frozen=True)
class Recompute:
    """What the backward pass recomputes, as shares of a layer's forward pass."""

    matmul: float = 0.0
    attention: float = 0.0
    stream: float = 0.0
    traffic: float = 0.0
    """Share of tensor-parallel collectives that is repeated."""
    mlp_up: float = 0.0
    """Share of the first matmul of the MLP alone."""
    kept: float = 1.0
    """Share of a layer's activations that is kept for the backward pass, in addition to its input."""
    keeps_products: bool = False
    """Whether the outputs of matrix products and attention are kept, instead of a share of everything."""
    inputs_on_host: bool = False
    """Whether layer inputs are kept in host memory instead of on the device."""
    repeats_exchange: bool = False
    """Whether tokens are sent to experts and back again, even if tensor-parallel collectives are not repeated."""
    repeats_experts: bool = False
    """Whether the last product of experts is computed again: of `keeps_products` the last one of a layer is left out,
    but the gradient of a router's weights needs it."""

    @property
    def exchanged(self) -> float:
        """Share of the exchanges of experts that is repeated."""
        return 1.0 if self.repeats_exchange else self.traffic


RECOMPUTE = {
    "none": Recompute(),
    "full": Recompute(1, 1, 1, 1, kept=0.0),
    "selective": Recompute(stream=1, keeps_products=True),
    "offload": Recompute(1, 1, 1, 1, kept=0.0, inputs_on_host=True),
}
"""Values of a plan's `recompute`."""
CORE_ATTENTION = Recompute(attention=1, kept=1.0)
"""Megatron's selective recompute: the scores of attention only."""
REPEATED_TRAFFIC = 0.75
"""Two gathers and one reduce-scatter, of two each in a forward pass (rehearsed)."""


def planned(plan: Plan, model: ModelSpec) -> Recompute:
    """What a plan's backward pass recomputes.

    With shares of tokens, selective layers gather their inputs again, and repeat the product after attention: of its
    reduce-scatter only a share would be kept. With experts they repeat both exchanges, and the experts' last product
    where it is the layer's last one (rehearsed for Qwen3 30B): under ZeRO 3 that is kept, and experts that every token
    visits come after the routed ones.
    """
    found = RECOMPUTE[plan.recompute]
    if not found.keeps_products:
        return found
    active = max(model.layer_active_params)
    if plan.sequence_sharded:
        projection = model.heads * model.head_dim * model.hidden
        found = replace(found, traffic=REPEATED_TRAFFIC, matmul=projection / active)
    if model.experts:
        again = plan.zero_stage < 3 and not model.shared_ffn
        down = model.experts_per_token * model.expert_ffn * model.hidden if again else 0
        found = replace(found, repeats_exchange=True, repeats_experts=again, matmul=found.matmul + down / active)
    return replace(found, matmul=min(1.0, found.matmul))
