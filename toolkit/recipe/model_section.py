"""Recipe section of the model and its adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from toolkit.recipe.schema import number

Precision = Literal["bf16", "fp16", "fp32"]
Task = Literal["causal-lm", "classification", "image-classification", "seq2seq", "embedding"]
ONE_RESULT = ("classification", "embedding")
"""Tasks with one result per text: a class, a score or an embedding."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Train low-rank adapters instead of all weights."""

    rank: int = number(16, least=1)
    """Rank of each adapter."""
    alpha: float = number(32.0, above=0)
    """Scale of the adapters; the effective scale is alpha / rank."""
    dropout: float = number(0.0, least=0, most=1)
    """Dropout before each adapter."""
    start: Literal["zero", "pissa"] = "zero"
    """First values of adapters. `zero`: the model is unchanged at first; `pissa`: the largest singular vectors of each
    weight, which is frozen without them (PiSSA). Export adds both up: a plain adapter of twice the rank."""
    rslora: bool = False
    """Scale adapters by alpha / √rank instead (rank-stabilised LoRA), which suits large ranks."""
    dora: bool = False
    """Train the length of each weight row apart from its direction (DoRA); needs complete weights in every layer."""
    lr_ratio: float = number(1.0, above=0)
    """Learning rate of each adapter's second matrix, which starts at zero, relative to the first's (LoRA+: 16)."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules that are trained completely, beside the adapters, such as `lm_head`."""
    targets: tuple[str, ...] | str = "auto"
    """Module names that get an adapter; `auto`: every linear layer except the head."""
    quantize: Literal["none", "4bit"] = "none"
    """`4bit`: frozen base weights in 4 bits (QLoRA); needs the extra `qlora`, pretrained weights and ZeRO 0 to 2."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The Hugging Face model."""

    path: str | None = None
    """Hub id, local directory, or a name in configs/models; or give `config` instead."""
    config: dict[str, Any] | None = None
    """A Hugging Face config, inline: the model is built from scratch."""
    init: Literal["pretrained", "scratch"] | None = None
    """Weights to start from; default: `pretrained` with `path`, `scratch` with `config`."""
    precision: Precision = "bf16"
    """Data type of the forward and backward pass; master weights and moments are fp32."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex"] = "auto"
    """Attention kernel. `auto`: torch's flash kernel of variable length on GPUs, SDPA per document elsewhere; `sdpa`:
    SDPA per document; `flash_attention_2`, `flash_attention_3`: of that package; `eager`, `flex`: transformers' own.
    Documents never attend to each other, whatever the kernel."""
    kernels: Literal["auto", "none", "liger"] = "auto"
    """Fused kernels for norms, rotary embeddings and gated MLPs. `liger`: those of liger-kernel that a trial on a tiny
    model shows to be exact; `auto`: the same on GPUs where it is installed, and on CPUs in fp32 norms and rotary
    embeddings in plain torch with fewer passes over memory, and oneDNN's matrix products on AMD processors with
    AVX-512."""
    compile: Literal["none", "layers"] = "none"
    """`layers`: torch.compile for each decoder layer, if a trial on a tiny model shows one graph per layer and the same
    results. Not under ZeRO 3. Slow to start: minutes on busy cores; no gain was measured on CPUs."""
    lora: Lora | None = None
    """Train adapters only."""
    freeze: tuple[str, ...] = ()
    """Patterns of names of parameters that are not trained, such as `*.embed_tokens.*`. The planner counts them as if
    they were."""
    task: Task | None = None
    """Task of the model, which decides its head; default: the task that `data.format` needs."""
    num_labels: int | None = number(None, least=1)
    """Classes of a classification head; default: from the config."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model; only for sources you trust."""
