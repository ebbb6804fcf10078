"""What the training software does with the hardware, as explicit flags; a framework's name only chooses the flags."""

from __future__ import annotations

import re
from dataclasses import dataclass

FUSIONS = ("eager", "kernels", "compiled")


@dataclass(frozen=True, kw_only=True)
class Software:
    """How a training framework runs a layer and hides its communication."""

    fusion: str = "eager"
    """`eager`: each operator is one pass over memory; `kernels`: hand-fused norms and activations; `compiled`."""
    flash: int = 2
    """Generation of the attention kernel: 0 stores the scores, 2 FlashAttention-2, 3 Hopper kernels (FA 3, cuDNN)."""
    tp_overlap: bool = False
    """Whether tensor-parallel collectives run in slices beside their matmul (userbuffers, asynchronous TP)."""
    dp_overlap: bool = True
    """Whether gradient and parameter traffic runs beside compute."""
    pp_overlap: bool = False
    """Whether sends between pipeline stages run beside compute."""
    grad_bytes: int = 2
    """Bytes of a gradient element as it is reduced."""
    dropout: bool = False
    """Whether hidden and attention dropout are applied (GPT-2 era recipes)."""


DEEPSPEED_HF = Software(fusion="eager", flash=2, tp_overlap=False, dp_overlap=True, grad_bytes=2)
"""DeepSpeed's engine around a Hugging Face model: what this toolkit runs."""

_COMPILED = re.compile(r"compil|thunder|xla|jax|maxtext|inductor")
_MODERN_MEGATRON = re.compile(r"nemo|bridge|megatron[- ]core|mcore|transformer ?engine|\bte\b|primus|megascale")
_FUSED_KERNELS = re.compile(r"megatron|nemo|apex|liger|fused|transformer ?engine|\bte\b|primus|megascale|mcore")
_TP_OVERLAP = re.compile(r"async ?tp|userbuffer|tp overlap")
_PLAIN_REDUCTION = re.compile(r"megatron-lm|megatron-deepspeed|megatron\+deepspeed|local ddp|alpa")
_FIRST_FLASH = re.compile(r"fsdp1|composer")
_YEAR = re.compile(r"\b(20[12]\d)\b")
_HOPPER = re.compile(r"H\d00|GH|B\d00|GB|MI3")


def software_of(framework: str, *, device: str, flash: bool, precision: str, tensor_only: bool = False) -> Software:
    """The flags that a framework's description stands for; general rules on words, no framework is special-cased."""
    name = framework.lower()
    year = int(match.group(1)) if (match := _YEAR.search(name)) else 0
    modern = bool(_MODERN_MEGATRON.search(name)) and flash
    compiled = bool(_COMPILED.search(name)) or ("torchtitan" in name and "eager" not in name)
    kernels = bool(_FUSED_KERNELS.search(name))
    hopper_kernels = bool(_HOPPER.match(device)) and (modern or bool(re.search(r"xla|jax|maxtext|fa3|cudnn", name)))
    return Software(
        fusion="compiled" if compiled or modern else "kernels" if kernels or "fp8" in precision else "eager",
        flash=(3 if hopper_kernels else 1 if _FIRST_FLASH.search(name) else 2) if flash else 0,
        tp_overlap=modern or bool(_TP_OVERLAP.search(name)),
        dp_overlap=not (_PLAIN_REDUCTION.search(name) and not tensor_only) or year >= 2023,
        pp_overlap=modern,
        grad_bytes=4 if precision != "fp16" and not modern and "internevo" not in name else 2,
        dropout=kernels and not modern and not flash,
    )
