"""The operators of one decoder layer, and what each costs on one device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from toolkit.calibration import Calibration
from toolkit.hardware import Device
from toolkit.software import Software


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0


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
    fp8: bool = False
    element_bytes: int = 2

    @property
    def tokens(self) -> float:
        return self.micro_batch * self.seq_len / self.parts


@dataclass(frozen=True)
class Pass:
    """Seconds of one pass (forward or backward) through one layer."""

    matmul: float
    attention: float
    stream: float
    kernels: int
    mlp_matmul: float = 0.0


@dataclass(frozen=True)
class LayerCost:
    forward: Pass
    backward: Pass


FLASH_SHARE = {1: 0.35, 2: 0.60, 3: 0.55}


def gemm_seconds(m: float, n: float, k: float, rate: float, device: Device, cal: Calibration) -> float:
    tiles = max(1.0, m / 128) * max(1.0, n / 128)
    waves = 1.0 + cal.wave * device.multiprocessors / tiles
    aligned = 1.0 if n % 64 == 0 and k % 64 == 0 else cal.misaligned
    return 2.0 * m * n * k * waves / (rate * cal.matmul * aligned)


def matmul_rate(device: Device, fp8: bool) -> float:
    return device.fp8_matmul_flops if fp8 and device.fp8_matmul_flops else device.matmul_flops


def _linears(shape: LayerShape, tp: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(N, K) of the attention's and of the MLP's matrices on one tensor-parallel rank."""
    q = shape.heads * shape.head_dim / tp
    kv = max(shape.kv_heads / tp, 1) * shape.head_dim
    up = 2 if shape.gated else 1
    attention = [(q + 2 * kv, shape.hidden), (shape.hidden, q)]
    mlp = [(up * shape.ffn / tp, shape.hidden), (shape.hidden, shape.ffn / tp)]
    return attention, mlp


def _three_gemms(m: float, n: float, k: float, rate: float, device: Device, cal: Calibration) -> tuple[float, float]:
    forward = gemm_seconds(m, n, k, rate, device, cal)
    backward = gemm_seconds(m, k, n, rate, device, cal) + gemm_seconds(n, k, m, rate, device, cal)
    return forward, backward


def _flash_seconds(shape: LayerShape, part: Slice, device: Device, software: Software, cal: Calibration) -> float:
    flops = 2.0 * part.tokens * part.seq_len * shape.heads * shape.head_dim / part.tp
    share = FLASH_SHARE[software.flash] * cal.attention
    if software.flash < 3 and device.peak_flops > 6e14:
        share *= 0.55
    share *= part.seq_len / (part.seq_len + cal.flash_half_seq)
    return flops / (device.peak_flops * share)


def _scores_seconds(shape: LayerShape, part: Slice, device: Device, software: Software, cal: Calibration) -> tuple[float, float]:
    scores = part.tokens * part.seq_len * shape.heads / part.tp
    byte = scores / (device.memory_bytes_per_second * cal.stream)
    aligned = 1.0 if shape.head_dim % 8 == 0 else 0.5
    flop = 2.0 * scores * shape.head_dim / (device.matmul_flops * cal.matmul * aligned)
    softmax = (4.0, 6.0)
    if software.fusion == "eager":
        softmax = (12.0, 12.0)
    if software.dropout:
        softmax = (softmax[0] + 5.0, softmax[1] + 5.0)
    gemm = max(flop, 2.0 * byte)
    return 2 * gemm + softmax[0] * byte, 4 * gemm + softmax[1] * byte


def _stream_bytes(shape: LayerShape, part: Slice, software: Software) -> tuple[float, float, int]:
    """Bytes that element-wise operators read and write for one token, forward and backward, and their kernels."""
    eager = software.fusion == "eager"
    rms = shape.gated
    norm = (34.0, 50.0) if eager and rms else (4.0, 10.0)
    residual = (6.0, 6.0)
    if software.dropout:
        residual = (7.0, 9.0)
    if software.fusion == "compiled":
        residual = (4.0, 4.0)
    h = shape.hidden / part.residual_parts
    forward = 2 * (norm[0] + residual[0]) * h
    backward = 2 * (norm[1] + residual[1]) * h
    q = shape.heads * shape.head_dim / part.tp
    kv = max(shape.kv_heads / part.tp, 1) * shape.head_dim
    rope = 0.0
    if rms:
        rope = 18.0 if eager else 4.0
    forward += (rope + 4.0) * (q + kv)
    backward += (rope + 8.0) * (q + kv)
    f = shape.ffn / part.tp
    if shape.gated:
        act = (6.0, 10.0) if software.fusion == "compiled" else (10.0, 16.0)
    else:
        act = (4.0, 6.0)
    forward += act[0] * f
    backward += act[1] * f
    if part.fp8:
        forward += 3.0 * (2 * shape.hidden + q + f)
        backward += 3.0 * (2 * shape.hidden + q + 2 * kv + f * (2 if shape.gated else 1))
    kernels = {"eager": 50 if rms else 30, "kernels": 25, "compiled": 15}[software.fusion]
    return forward, backward, kernels


@lru_cache(maxsize=65536)
def layer_cost(shape: LayerShape, part: Slice, device: Device, software: Software, cal: Calibration) -> LayerCost:
    rate = matmul_rate(device, part.fp8)
    attention, mlp = _linears(shape, part.tp)
    a = [_three_gemms(part.tokens, n, k, rate, device, cal) for n, k in attention]
    m = [_three_gemms(part.tokens, n, k, rate, device, cal) for n, k in mlp]
    if software.flash:
        core = _flash_seconds(shape, part, device, software, cal)
        cores = core, 2.5 * core
    else:
        cores = _scores_seconds(shape, part, device, software, cal)
    fwd, bwd, kernels = _stream_bytes(shape, part, software)
    scale = part.tokens / (device.memory_bytes_per_second * cal.stream)
    return LayerCost(
        Pass(sum(x[0] for x in a + m), cores[0], fwd * scale, kernels, m[0][0]),
        Pass(sum(x[1] for x in a + m), cores[1], bwd * scale, 2 * kernels),
    )


@lru_cache(maxsize=65536)
def head_cost(hidden: int, vocab: int, part: Slice, device: Device, software: Software, cal: Calibration) -> tuple[float, float]:
    """Seconds of the output head and loss, forward and backward."""
    fwd, bwd = _three_gemms(part.tokens, math.ceil(vocab / part.tp / 64) * 64, hidden, device.matmul_flops, device, cal)
    stream = {"eager": (20.0, 18.0), "kernels": (36.0, 18.0), "compiled": (6.0, 6.0)}[software.fusion]
    scale = part.tokens * vocab / part.tp / (device.memory_bytes_per_second * cal.stream)
    return fwd + stream[0] * scale, bwd + stream[1] * scale
