"""The operators of one decoder layer, and the time of each on one device.

Matmuls run at a share of the best measured rate, and attention at a share of the published kernel rates. Everything
else is limited by memory bandwidth: the bytes that it reads and writes are counted operator by operator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from toolkit.clusters.devices import Device
from toolkit.cost.calibration import Calibration
from toolkit.cost.software import Software

TILE = 128
"""Side of a matmul's output tile on one multiprocessor (cuBLAS' usual large tile)."""
FLASH_SHARE = {1: 0.35, 2: 0.60, 3: 0.55}
"""Share of the data-sheet peak that attention kernels reach on long causal sequences, forward and backward.

FlashAttention 1 and 2: arXiv 2307.08691, A100; generation 3 on Hopper: arXiv 2407.08608."""
AMPERE_KERNEL_ON_HOPPER = 0.55
"""FlashAttention 1 and 2 do not use Hopper's asynchronous matmuls: 35% of an H100, 60-70% of an A100 (ibid.)."""
FLASH_HALF_SEQ = 800.0
"""Sequence length at which causal attention reaches half of its long-sequence rate (ibid., figures 4-6)."""
HOPPER_PEAK = 6e14
"""Peak above which a device is of Hopper's generation or later."""
H100_WATTS_PER_FLOP = 700 / 989e12
"""Watts per peak FLOP/s with which a matmul sustains its measured rate in training."""
FP32_SHARE = 1 / 16
"""Rate of fp32 without TF32 relative to bf16 (A100: 19.5 of 312, H100: 67 of 989)."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Sizes of a layer that its cost depends on."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The share of a layer's work that one device does for one micro-batch."""

    micro_batch: int
    seq_len: int
    """Tokens of the full sequence, which attention sees."""
    parts: int = 1
    """Devices that share one sequence (context or sequence parallel)."""
    tp: int = 1
    residual_parts: int = 1
    """Tensor-parallel ranks that share norms and residuals (Megatron sequence parallel)."""
    ep: int = 1
    fp8: bool = False
    element_bytes: int = 2
    frozen: bool = False
    """Whether the weights need no gradient (LoRA)."""

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on this device."""
        return self.micro_batch * self.seq_len / self.parts


@dataclass(frozen=True)
class Pass:
    """Seconds of one pass (forward or backward) through one layer, by kind of operator."""

    matmul: float
    attention: float
    stream: float
    kernels: int
    mlp_up: float = 0.0
    """The MLP's first matmul, a part of `matmul`."""

    @property
    def device(self) -> float:
        """Seconds on the device."""
        return self.matmul + self.attention + self.stream


@dataclass(frozen=True)
class LayerCost:
    """Cost of the forward and the backward pass of a layer."""

    forward: Pass
    backward: Pass


@lru_cache(maxsize=65536)
def layer_cost(shape: LayerShape, part: Slice, device: Device, software: Software, cal: Calibration) -> LayerCost:
    """Seconds of one layer for one micro-batch."""
    attention = [_linear(part.tokens, n, k, part, device, cal) for n, k in _attention_sides(shape, part.tp)]
    mlp = _mlp(shape, part, device, cal)
    core = _flash(shape, part, device, software, cal) if software.flash else _scores(shape, part, device, software, cal)
    stream = layer_stream_bytes(shape, part, software)
    second = part.tokens / _stream_rate(device, cal)
    kernels = kernels_per_layer(shape, part, software)
    linears = [*attention, *mlp]
    return LayerCost(
        Pass(sum(f for f, _ in linears), core[0], stream[0] * second, kernels, mlp[0][0]),
        Pass(sum(b for _, b in linears), core[1], stream[1] * second, 2 * kernels),
    )


@lru_cache(maxsize=65536)
def head_cost(hidden: int, vocab: int, part: Slice, device: Device, software: Software, cal: Calibration) -> Pass:
    """Seconds of the output head and the loss, forward and backward together; always in 16 bits."""
    rows = math.ceil(vocab / part.tp / 64) * 64  # every framework pads the table
    wide = Slice(micro_batch=part.micro_batch, seq_len=part.seq_len, parts=part.parts, element_bytes=part.element_bytes)
    forward, backward = _linear(part.tokens, rows, hidden, wide, device, cal)
    stream = sum(head_stream_bytes(software)) * part.tokens * vocab / part.tp / _stream_rate(device, cal)
    return Pass(forward + backward, 0.0, stream, 10)


def matmul_rate(device: Device, part: Slice, cal: Calibration) -> float:
    """FLOPs per second that large matmuls sustain in training."""
    rate = device.fp8_matmul_flops if part.fp8 and device.fp8_matmul_flops else device.matmul_flops
    if part.element_bytes == 4 and device.backend != "cpu":
        rate *= FP32_SHARE
    return rate * cal.matmul * power_share(device, cal)


@lru_cache(maxsize=256)
def power_share(device: Device, cal: Calibration) -> float:
    """Share of the short-run rate that remains if the power limit is low for the peak (B200, capped H100)."""
    if not device.watts:
        return 1.0
    return float(min(1.0, device.watts / device.peak_flops / H100_WATTS_PER_FLOP) ** cal.power)


def gemm_seconds(m: float, n: float, k: float, part: Slice, device: Device, cal: Calibration) -> float:
    """Seconds of a matmul of m×k by k×n: half a wave of tiles is lost on average, more if sides do not fit."""
    tiles = max(1.0, m / TILE) * max(1.0, n / TILE)
    waves = 1.0 + 0.5 * device.multiprocessors / tiles if device.backend != "cpu" else 1.0
    aligned = 1.0 if n % 64 == 0 and k % 64 == 0 else cal.misaligned
    return 2.0 * m * n * k * waves / (matmul_rate(device, part, cal) * aligned)


def _linear(m: float, n: float, k: float, part: Slice, device: Device, cal: Calibration) -> tuple[float, float]:
    """Seconds of the forward and backward pass of a linear layer; frozen weights have no weight gradient."""
    forward = gemm_seconds(m, n, k, part, device, cal)
    inputs = gemm_seconds(m, k, n, part, device, cal)
    weights = 0.0 if part.frozen else gemm_seconds(n, k, m, part, device, cal)
    return forward, inputs + weights


def _attention_sides(shape: LayerShape, tp: int) -> list[tuple[float, float]]:
    """(outputs, inputs) of the fused query-key-value and of the output projection on one tensor-parallel rank."""
    q = shape.heads * shape.head_dim / tp
    kv = max(shape.kv_heads / tp, 1) * shape.head_dim
    return [(q + 2 * kv, shape.hidden), (shape.hidden, q)]


def _mlp(shape: LayerShape, part: Slice, device: Device, cal: Calibration) -> list[tuple[float, float]]:
    """(forward, backward) seconds of each MLP matmul: the dense or shared MLP, then the experts on this device."""
    costs = _mlp_pair(part.tokens, shape.ffn, shape, part, device, cal) if shape.ffn else []
    if shape.experts:
        local = shape.experts / part.ep
        tokens = part.tokens * shape.experts_per_token / local
        pair = _mlp_pair(tokens, shape.expert_ffn, shape, part, device, cal)
        costs += [(local * forward, local * backward) for forward, backward in pair]
    return costs


def _mlp_pair(
    tokens: float, ffn: int, shape: LayerShape, part: Slice, device: Device, cal: Calibration
) -> list[tuple[float, float]]:
    """Seconds of the up projection (with the gate, if there is one) and of the down projection."""
    inner = ffn / part.tp
    up = _linear(tokens, (2 if shape.gated else 1) * inner, shape.hidden, part, device, cal)
    return [up, _linear(tokens, shape.hidden, inner, part, device, cal)]


def _flash(shape: LayerShape, part: Slice, device: Device, software: Software, cal: Calibration) -> tuple[float, float]:
    """Seconds of causal attention without stored scores: half of the square, and 2.5 times as much backward."""
    flops = 2.0 * part.tokens * part.seq_len * shape.heads * shape.head_dim / part.tp
    share = FLASH_SHARE[software.flash] * cal.attention * power_share(device, cal)
    if software.flash < 3 and device.peak_flops > HOPPER_PEAK:
        share *= AMPERE_KERNEL_ON_HOPPER
    share *= part.seq_len / (part.seq_len + FLASH_HALF_SEQ)
    seconds = flops / (device.peak_flops * share)
    return seconds, 2.5 * seconds


def _scores(
    shape: LayerShape, part: Slice, device: Device, software: Software, cal: Calibration
) -> tuple[float, float]:
    """Seconds of attention with stored scores: batched matmuls over the full square, and passes over the scores."""
    scores = part.tokens * part.seq_len * shape.heads / part.tp
    byte = scores / _stream_rate(device, cal)
    aligned = 1.0 if shape.head_dim % 8 == 0 else 0.5  # tensor cores want 16-byte rows
    flop = 2.0 * scores * shape.head_dim / (matmul_rate(device, part, cal) * aligned)
    gemm = max(flop, part.element_bytes * byte)
    softmax = softmax_bytes(software)
    return 2 * gemm + softmax[0] * byte, 4 * gemm + softmax[1] * byte


def _stream_rate(device: Device, cal: Calibration) -> float:
    return device.memory_bytes_per_second * cal.stream


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
GATED_ACTIVATION = {"eager": (10.0, 16.0), "kernels": (10.0, 16.0), "compiled": (6.0, 10.0)}
"""Bytes per element of a gated activation: silu (2+2) and product (4+2); backward 3 and 5 passes; fused: two reads, one
write."""
FP8_CAST = 3.0
"""Bytes per element of a cast for an fp8 matmul: read 16 bits, write 8."""
SOFTMAX = {"eager": (12.0, 12.0), "kernels": (4.0, 6.0), "compiled": (4.0, 6.0)}
"""Bytes per score of scale, mask and softmax: one fused kernel, or four passes."""
DROPOUT = 5.0
"""Bytes per element of dropout: read, write and a 1-byte mask."""
HEAD = {"eager": (20.0, 18.0), "kernels": (36.0, 18.0), "compiled": (6.0, 6.0)}
"""Bytes per logit of the loss: fp32 cast and log-softmax in torch; nine passes in Megatron's parallel loss."""
KERNELS = {"eager": 30, "kernels": 25, "compiled": 15}
"""Kernel launches of the forward pass of a GPT layer."""
EAGER_LLAMA_KERNELS = 20
"""Further launches for eager RMSNorm and rotary embedding."""
EXPERT_KERNELS = 6
"""Launches per expert if experts run one after the other."""


def layer_stream_bytes(shape: LayerShape, part: Slice, software: Software) -> tuple[float, float]:
    """Bytes per token that element-wise operators of a layer read and write, forward and backward."""
    residual = _residual_bytes(shape, software)
    inner = _inner_bytes(shape, part, software)
    scale = part.element_bytes / 2
    forward, backward = (residual[i] * shape.hidden / part.residual_parts + inner[i] for i in (0, 1))
    return forward * scale, backward * scale


def head_stream_bytes(software: Software) -> tuple[float, float]:
    """Bytes per logit that the loss reads and writes, forward and backward."""
    return HEAD[software.fusion]


def softmax_bytes(software: Software) -> tuple[float, float]:
    """Bytes per stored attention score that softmax and dropout read and write, forward and backward."""
    forward, backward = SOFTMAX[software.fusion]
    extra = DROPOUT if software.dropout else 0.0
    return forward + extra, backward + extra


def kernels_per_layer(shape: LayerShape, part: Slice, software: Software) -> int:
    """Kernel launches of one forward pass through a layer."""
    llama = EAGER_LLAMA_KERNELS if software.fusion == "eager" and shape.gated else 0
    experts = EXPERT_KERNELS * shape.experts // part.ep if software.fusion == "eager" else 0
    return KERNELS[software.fusion] + llama + experts


def _residual_bytes(shape: LayerShape, software: Software) -> tuple[float, float]:
    """Bytes per element of the residual stream for two norms and two residual sums."""
    norm = NORM_RMS_EAGER if software.fusion == "eager" and shape.gated else NORM_FUSED
    residual = RESIDUAL_DROPOUT if software.dropout else RESIDUAL[software.fusion]
    return 2 * (norm[0] + residual[0]), 2 * (norm[1] + residual[1])


def _inner_bytes(shape: LayerShape, part: Slice, software: Software) -> tuple[float, float]:
    """Bytes per token that tensor parallelism divides: rotary embedding, attention tensors, activation, casts."""
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
