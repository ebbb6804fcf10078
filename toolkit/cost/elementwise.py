"""Bytes that element-wise operators read and write: counted from the operators, nothing here is fitted.

A pass over a tensor in 16 bits moves 2 bytes an element, in fp32 4. A gated MLP stands for the Llama family here
(RMSNorm, rotary embedding), a plain one for the GPT family (LayerNorm, learned positions).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.cost.software import Software

if TYPE_CHECKING:
    from toolkit.cost.operators import LayerShape, Slice

NORM_FUSED = (4.0, 10.0)
"""Read and write; backward: input, gradient and output, then both again for the weight's gradient."""
NORM_RMS_EAGER = (34.0, 50.0)
"""to fp32 (2+4), square (4+4), mean (4), scale (4+4), to 16 bits (4+2), weight (2+2), and the chain back."""
RESIDUAL = {"eager": (6.0, 6.0), "kernels": (6.0, 6.0), "compiled": (4.0, 4.0)}
"""Add: two reads, a write; back: the sum of two gradients. Compiled code joins it to the norm."""
RESIDUAL_DROPOUT = (7.0, 9.0)
"""With bias, dropout and its 1-byte mask in one kernel (Megatron)."""
ROPE = {"eager": 18.0, "kernels": 4.0, "compiled": 4.0}
"""rotate_half (2+2), two products (8), sum (4+2); fused: read and write. The same backward."""
PLAIN_ACTIVATION = (4.0, 6.0)
GATED_ACTIVATION = {"eager": (10.0, 16.0), "kernels": (10.0, 16.0), "compiled": (6.0, 10.0)}
"""silu (2+2) and product (4+2); backward 3 and 5 passes; fused: gate and up in, one out."""
FP8_CAST = 3.0
"""Read 16 bits and write 8 for each side of an 8-bit matmul."""
SOFTMAX = {"eager": (12.0, 12.0), "kernels": (4.0, 6.0), "compiled": (4.0, 6.0)}
"""Scale, mask and softmax over the scores: one fused kernel, or four passes."""
DROPOUT = 5.0
"""Read, write and a 1-byte mask."""
HEAD = {"eager": (20.0, 18.0), "kernels": (36.0, 18.0), "compiled": (6.0, 6.0)}
"""Loss over the logits: to fp32 and log-softmax in torch; Megatron's vocabulary-parallel loss takes nine passes."""
KERNELS = {"eager": 30, "kernels": 25, "compiled": 15}
"""Launches of a forward layer of the GPT family; eager RMSNorm and rotary add 20."""
EAGER_LLAMA_KERNELS = 20
EXPERT_KERNELS = 6
"""Launches for each expert where experts run one after the other."""


def layer_stream_bytes(shape: LayerShape, part: Slice, software: Software) -> tuple[float, float]:
    """Bytes for one token, forward and backward."""
    residual = _residual_bytes(shape, software)
    inner = _inner_bytes(shape, part, software)
    scale = part.element_bytes / 2
    forward, backward = (residual[i] * shape.hidden / part.residual_parts + inner[i] for i in (0, 1))
    return forward * scale, backward * scale


def head_stream_bytes(software: Software) -> tuple[float, float]:
    """Bytes for one logit, forward and backward."""
    return HEAD[software.fusion]


def softmax_bytes(software: Software) -> tuple[float, float]:
    """Bytes for one attention score, forward and backward, where scores are stored."""
    forward, backward = SOFTMAX[software.fusion]
    extra = DROPOUT if software.dropout else 0.0
    return forward + extra, backward + extra


def kernels_per_layer(shape: LayerShape, part: Slice, software: Software) -> int:
    """Launches of one forward pass."""
    llama = EAGER_LLAMA_KERNELS if software.fusion == "eager" and shape.gated else 0
    experts = EXPERT_KERNELS * shape.experts // part.ep if software.fusion == "eager" else 0
    return KERNELS[software.fusion] + llama + experts


def _residual_bytes(shape: LayerShape, software: Software) -> tuple[float, float]:
    """Two norms and two residual sums, for one element of the residual stream."""
    norm = NORM_RMS_EAGER if software.fusion == "eager" and shape.gated else NORM_FUSED
    residual = RESIDUAL_DROPOUT if software.dropout else RESIDUAL[software.fusion]
    return 2 * (norm[0] + residual[0]), 2 * (norm[1] + residual[1])


def _inner_bytes(shape: LayerShape, part: Slice, software: Software) -> tuple[float, float]:
    """Rotary embedding, attention's inputs and outputs, activation, casts: what tensor parallelism divides."""
    q = shape.heads * shape.head_dim / part.tp
    kv = max(shape.kv_heads / part.tp, 1) * shape.head_dim
    rope = ROPE[software.fusion] if shape.gated else 0.0
    inner = (shape.ffn + shape.experts_per_token * shape.expert_ffn) / part.tp
    activation = GATED_ACTIVATION[software.fusion] if shape.gated else PLAIN_ACTIVATION
    forward = (rope + 4.0) * (q + kv) + activation[0] * inner
    backward = (rope + 8.0) * (q + kv) + activation[1] * inner
    if part.fp8:
        forward += FP8_CAST * (2 * shape.hidden + q + inner)
        backward += FP8_CAST * (2 * shape.hidden + q + 2 * kv + inner * (2 if shape.gated else 1))
    return forward, backward
