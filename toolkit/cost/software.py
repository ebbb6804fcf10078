"""How training software uses the hardware, as explicit flags; the name of a framework only selects flags."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Software:
    """How a training framework runs a layer and hides its communication."""

    fusion: str = "eager"
    """`eager`: one pass over memory per operator; `kernels`: hand-fused norms and softmax; `compiled`: all fused."""
    flash: int = 2
    """Generation of the attention kernel: 0 stores scores, 1 and 2 FlashAttention, 3 Hopper kernels (FA 3, cuDNN)."""
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
)
"""DeepSpeed with a Hugging Face model: what this toolkit runs."""

_COMPILED = re.compile(r"compil|thunder|xla|jax|maxtext|inductor")
_MODERN = re.compile(r"nemo|bridge|megatron[- ]core|mcore|transformer ?engine|\bte\b|primus|megascale")
_KERNELS = re.compile(r"megatron|nemo|apex|liger|fused|transformer ?engine|\bte\b|primus|megascale|mcore")
_TP_OVERLAP = re.compile(r"async ?tp|userbuffer|tp overlap")
_NO_DP_OVERLAP = re.compile(r"megatron-lm|megatron-deepspeed|megatron\+deepspeed|local ddp|alpa")
_REDUCES_16 = re.compile(r"internevo|fsdp1|(hf|swift).*deepspeed|^deepspeed")
_FIRST_FLASH = re.compile(r"composer")
_HUGGING_FACE = re.compile(r"\bhf\b|hugging|transformers|swift \+ hf")
_HOPPER_KERNELS = re.compile(r"xla|jax|maxtext|fa ?3|flash.?attention.?3|cudnn")
_HOPPER = re.compile(r"H\d00|GH|B\d00|GB|MI3")


def software_of(
    framework: str, *, device: str, flash: bool, precision: str, pipeline: bool, zero_stage: int = 0
) -> Software:
    """The flags for a framework, derived from the words of its description."""
    name = framework.lower()
    modern = flash and bool(_MODERN.search(name))  # Megatron's successors always run fused attention
    fp8 = "fp8" in precision
    return Software(
        fusion=_fusion(name, modern=modern, fp8=fp8),
        flash=_flash(name, modern=modern, hopper=bool(_HOPPER.match(device))) if flash else 0,
        tp_overlap=modern or bool(_TP_OVERLAP.search(name)),
        dp_overlap=not (pipeline and _NO_DP_OVERLAP.search(name)) and not ("deepspeed" in name and zero_stage == 3),
        pp_overlap=modern,
        grad_bytes=2 if (modern and "core" not in name) or precision == "fp16" or _REDUCES_16.search(name) else 4,
        dropout=bool(_KERNELS.search(name)) and not flash,
        zero_messages=ZERO_TENSORS_THEN if "deepspeed" in name else 1,
        zero_copies="deepspeed" in name,
        unpadded_vocab=bool(_HUGGING_FACE.search(name)),
        composed_gelu=bool(_HUGGING_FACE.search(name)),
        dispatch_once=modern,
        expert_loop=bool(_HUGGING_FACE.search(name)) and "scatter" not in name,
        fused_accumulation=modern or bool(re.search(r"megatron-lm.*202[2-9]", name)),
        scattered_sends=modern or "megatron-lm" in name,
        fused_loss="kernel" if "composer" in name else "",
        fp8_gather=fp8 and "fsdp2" in name,
    )


def _fusion(name: str, *, modern: bool, fp8: bool) -> str:
    """Degree of fusion: torchtitan compiles unless it says `eager`; fp8 training always has fused casts."""
    if modern or _COMPILED.search(name) or ("torchtitan" in name and "eager" not in name):
        return "compiled"
    return "kernels" if fp8 or _KERNELS.search(name) else "eager"


def _flash(name: str, *, modern: bool, hopper: bool) -> int:
    if hopper and (modern or _HOPPER_KERNELS.search(name)):
        return 3
    return 1 if _FIRST_FLASH.search(name) else 2
