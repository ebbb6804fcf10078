"""The operators of one decoder layer, and what each costs on one device.

Matmuls run at a share of the best measured rate, attention at a share of the published kernel rates, everything
else at a share of the memory bandwidth over the bytes that it reads and writes, counted operator by operator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from toolkit.clusters.devices import Device
from toolkit.cost.calibration import Calibration
from toolkit.cost.elementwise import head_stream_bytes, kernels_per_layer, layer_stream_bytes, softmax_bytes
from toolkit.cost.software import Software

TILE = 128
"""Side of a matmul's output tile on one multiprocessor (cuBLAS' usual large tile)."""
FLASH_SHARE = {1: 0.35, 2: 0.60, 3: 0.55}
"""Share of a data-sheet peak that attention kernels reach on long causal sequences, forward and backward.

FlashAttention 1 and 2: arXiv 2307.08691, A100; generation 3 on Hopper: arXiv 2407.08608."""
AMPERE_KERNEL_ON_HOPPER = 0.55
"""FlashAttention 1 and 2 do not use Hopper's asynchronous matmuls: 35% of an H100 against 60-70% of an A100 (ibid.)."""
FLASH_HALF_SEQ = 800.0
"""Sequence length at which causal attention reaches half of its long-sequence rate (ibid., figures 4-6)."""
HOPPER_PEAK = 6e14
"""Peak above which a device is of Hopper's generation or later."""
H100_WATTS_PER_FLOP = 700 / 989e12
"""Watts behind a peak FLOP a second that let a matmul hold its measured rate in training."""
FP32_SHARE = 1 / 16
"""Rate of fp32 without TF32 relative to bf16 (A100: 19.5 of 312, H100: 67 of 989)."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What a layer's cost depends on."""

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
    """Whole sequence: what attention sees."""
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
    """Both passes."""

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
    """FLOPs a second that large matmuls hold in training."""
    rate = device.fp8_matmul_flops if part.fp8 and device.fp8_matmul_flops else device.matmul_flops
    if part.element_bytes == 4 and device.backend != "cpu":
        rate *= FP32_SHARE
    return rate * cal.matmul * power_share(device, cal)


@lru_cache(maxsize=256)
def power_share(device: Device, cal: Calibration) -> float:
    """What is left of short-run rates when the power limit is low for the peak (B200, capped H100)."""
    if not device.watts:
        return 1.0
    return float(min(1.0, device.watts / device.peak_flops / H100_WATTS_PER_FLOP) ** cal.power)


def gemm_seconds(m: float, n: float, k: float, part: Slice, device: Device, cal: Calibration) -> float:
    """A matmul of m×k by k×n: half a wave of tiles is lost on average, and more where sides don't fit the tiles."""
    tiles = max(1.0, m / TILE) * max(1.0, n / TILE)
    waves = 1.0 + 0.5 * device.multiprocessors / tiles if device.backend != "cpu" else 1.0
    aligned = 1.0 if n % 64 == 0 and k % 64 == 0 else cal.misaligned
    return 2.0 * m * n * k * waves / (matmul_rate(device, part, cal) * aligned)


def _linear(m: float, n: float, k: float, part: Slice, device: Device, cal: Calibration) -> tuple[float, float]:
    """Forward and backward of a linear layer; frozen weights have no weight gradient."""
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
    """(forward, backward) of the MLP's matmuls: the dense or shared one, then the routed experts on this device."""
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
    """Up (with the gate, if there is one) and down."""
    inner = ffn / part.tp
    up = _linear(tokens, (2 if shape.gated else 1) * inner, shape.hidden, part, device, cal)
    return [up, _linear(tokens, shape.hidden, inner, part, device, cal)]


def _flash(shape: LayerShape, part: Slice, device: Device, software: Software, cal: Calibration) -> tuple[float, float]:
    """Causal attention that stores no scores: half of the square, and 2.5 times as much backward."""
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
    """Attention that stores its scores: batched matmuls over the full square, and passes over the scores."""
    scores = part.tokens * part.seq_len * shape.heads / part.tp
    byte = scores / _stream_rate(device, cal)
    aligned = 1.0 if shape.head_dim % 8 == 0 else 0.5  # tensor cores want 16-byte rows
    flop = 2.0 * scores * shape.head_dim / (matmul_rate(device, part, cal) * aligned)
    gemm = max(flop, part.element_bytes * byte)
    softmax = softmax_bytes(software)
    return 2 * gemm + softmax[0] * byte, 4 * gemm + softmax[1] * byte


def _stream_rate(device: Device, cal: Calibration) -> float:
    return device.memory_bytes_per_second * cal.stream
