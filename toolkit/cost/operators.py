"""The operators of one decoder layer, and the time of each on one device.

Matmuls run at a share of the best measured rate, and attention at a share of the published kernel rates. Everything
else is limited by memory bandwidth: the bytes that it reads and writes are counted operator by operator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from toolkit.clusters.devices import Device
from toolkit.cost.calibration import Calibration
from toolkit.cost.software import (
    ROPE,
    Software,
    activation_bytes,
    head_stream_bytes,
    residual_stream_bytes,
    softmax_bytes,
)

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.6))
"""Output tiles of the matmul library (CUTLASS' profiler, A100): rows, columns, rate relative to the largest tiles."""
SPLITS = (1, 2, 4, 8)
"""Parts that the inner dimension may be split into, so that few tiles occupy all multiprocessors."""
PROLOGUE = 64
"""Inner elements whose time a tile needs to fill its pipeline and to write its result."""
UNALIGNED = 0.45
"""Relative rate of a matmul whose rows are not 16-byte aligned: GPT-2 gains 25% when its table of 50,257 rows is padded
to 50,304 (nanoGPT)."""
TENSOR_SHARE = {1: 0.68, 2: 0.68, 3: 0.9, 4: 0.9}
"""Share of the tensor cores' peak in the matmuls of an attention kernel, by its generation."""
EXPONENTIALS = {1: 1.68e13, 2: 1.68e13, 3: 2.0e13, 4: 4.0e13}
"""Attention FLOPs per second of one multiprocessor whose exponentials take as long as their matmuls, with heads of
`WIDE_HEAD`. With `TENSOR_SHARE` it gives the rates published for long causal sequences, forward and backward:
FlashAttention 2 on A100 (190 of 312 TFLOP/s, 172 with heads of 64) and H100 (335 of 989, arXiv 2307.08691), 3 and cuDNN
on H100 (530 to 660, arXiv 2407.08608), 4 and cuDNN on B200 (1,400 to 1,600; some exponentials are multiplications)."""
WIDE_HEAD = 128
FIRST_KERNEL = 0.7
"""FlashAttention 1 relative to 2 (arXiv 2307.08691)."""
DEQUANTISED = 4.0
"""Bytes per 4-bit weight that is made 16-bit for a matmul: read 0.5, write 2, and its scales in two steps."""
AMPERE_ON_HOPPER = 0.56
"""Tensor-core rate of FlashAttention 1 and 2 on Hopper: they do not use its asynchronous matmuls (ibid.)."""
CPU_ATTENTION = 0.6  # relative to the peak
OLD_KERNEL = 0.6
"""torch's memory-efficient kernel on V100 and T4, where FlashAttention does not run, relative to FlashAttention 1."""
HOPPER_FLOPS = 4e12
"""Peak per multiprocessor above which a device is of Hopper's generation or later."""
H100_WATTS_PER_FLOP = 700 / 989e12
"""Watts per peak FLOP/s with which a matmul sustains its measured rate in training."""
CAPPED = 0.6
"""Exponent by which the sustained rate of one kind falls with its power limit: between a cube root (voltage follows
the clock) and proportional (only the clock falls)."""
SUSTAINED = 0.832
"""Largest share of a data sheet's peak that a layer's matmuls reach in training, however good single ones are."""
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
    crosses: float = 0.0
    """Share of the layers with a second attention, over an encoder's output."""
    attention_share: float = 1.0
    """Parameters of the attention matrices relative to plain ones of the same heads (latent attention: below 1)."""


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
    emulated: bool = False
    """Whether the tensor cores lack the number format: bf16 on V100 and T4."""
    frozen: bool = False
    """Whether the weights need no gradient (LoRA)."""
    adapters: int = 0
    """Linear layers with LoRA adapters per layer: 0, 2 (`qv`), 4 (attention) or 7 (all)."""
    quantized: bool = False
    """Whether frozen weights are stored in 4 bits and dequantised for every matmul."""
    window: int = 0
    """Tokens that attention sees in a layer with a sliding window; 0: the full sequence."""
    expert_tp: int = 0
    """Ranks that share the matrices of an expert; 0: as many as `tp`."""
    document_share: float = 1.0
    """Length of packed documents, which attention keeps apart, relative to the sequence."""
    expert_load: float = 1.0
    """Tokens of the busiest expert-parallel rank relative to the mean."""
    experts_whole: bool = False
    """Whether every tensor-parallel rank computes all tokens of its experts."""

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on this device."""
        return self.micro_batch * self.seq_len / self.parts

    @property
    def routed_share(self) -> float:
        """Tokens whose visits the busiest rank computes, relative to the tokens of its tensor group.

        Ranks that share the matrices of an expert compute the same visits: rows of full width on each of them."""
        return self.expert_load * (1.0 if self.experts_whole else (self.expert_tp or self.tp) / self.tp)


@dataclass(frozen=True)
class Pass:
    """Seconds of one pass (forward or backward) through one layer, by kind of operator."""

    matmul: float
    attention: float
    stream: float
    kernels: int
    mlp_up: float = 0.0
    """The MLP's first matmul, a part of `matmul`."""

    gap: float = 0.0
    """Seconds that the device needs to start each kernel, in total."""

    @property
    def device(self) -> float:
        """Seconds on the device."""
        return self.matmul + self.attention + self.stream + self.gap


class LayerCost(NamedTuple):
    """Cost of the forward and the backward pass of a layer."""

    forward: Pass
    backward: Pass


@lru_cache(maxsize=65536)
def layer_cost(shape: LayerShape, part: Slice, device: Device, software: Software, cal: Calibration) -> LayerCost:
    """Seconds of one layer for one micro-batch."""
    attention = [_linear(part.tokens, n, k, part, device, cal) for n, k in _attention_sides(shape, part.tp)]
    mlp = _mlp(shape, part, device, software, cal)
    core = _flash(shape, part, device, software, cal) if software.flash else _scores(shape, part, device, software, cal)
    stream = layer_stream_bytes(shape, part, software)
    second = part.tokens / _stream_rate(device, cal)
    kernels = kernels_per_layer(shape, part, software)
    linears = [*((shape.attention_share * f, shape.attention_share * b) for f, b in attention), *mlp]
    gap = cal.kernel_seconds * kernels if device.backend != "cpu" else 0.0
    return LayerCost(
        Pass(sum(f for f, _ in linears), (1 + shape.crosses) * core[0], stream[0] * second, kernels, mlp[0][0], gap),
        Pass(sum(b for _, b in linears), (1 + shape.crosses) * core[1], stream[1] * second, 2 * kernels, 0.0, 2 * gap),
    )


@lru_cache(maxsize=65536)
def head_cost(hidden: int, vocab: int, part: Slice, device: Device, software: Software, cal: Calibration) -> Pass:
    """Seconds of the output head and the loss, forward and backward together; always in 16 bits."""
    rows = vocab / part.tp if software.unpadded_vocab else math.ceil(vocab / part.tp / 64) * 64
    wide = Slice(
        micro_batch=part.micro_batch,
        seq_len=part.seq_len,
        parts=part.parts,
        element_bytes=part.element_bytes,
        emulated=part.emulated,
    )
    forward, backward = _linear(part.tokens, rows, hidden, wide, device, cal)
    stream = sum(head_stream_bytes(software)) * part.tokens * vocab / part.tp / _stream_rate(device, cal)
    return Pass(forward + backward, 0.0, stream, 10)


def matmul_rate(device: Device, part: Rates | Slice, cal: Calibration) -> float:
    """FLOPs per second that large matmuls sustain in training."""
    rate = device.fp8_matmul_flops if part.fp8 and device.fp8_matmul_flops else device.matmul_flops
    if (part.element_bytes == 4 or part.emulated) and device.backend != "cpu":
        rate *= FP32_SHARE
    share = (
        cal.matmul if device.backend == "cpu" else min(cal.matmul, SUSTAINED * device.peak_flops / device.matmul_flops)
    )
    return rate * share * power_share(device, cal)


@lru_cache(maxsize=256)
def power_share(device: Device, cal: Calibration) -> float:
    """Share of the short-run rate that remains if the power limit is low for the peak (B200, capped H100)."""
    capped = float(device.power_cap**CAPPED)
    if not device.watts:
        return capped
    return capped * float(min(1.0, device.watts / device.peak_flops / H100_WATTS_PER_FLOP) ** cal.power)


@lru_cache(maxsize=65536)
def gemm_seconds(m: float, n: float, k: float, part: Rates, device: Device, cal: Calibration) -> float:
    """Seconds of a matmul of m×k by k×n with the fastest tile and split, at least the time to move its operands."""
    rate = matmul_rate(device, part, cal) * alignment(n, k, cal)
    if device.backend == "cpu":
        return 2.0 * m * n * k / rate
    units = device.multiprocessors
    best = math.inf
    for rows, columns, share in TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        for split in SPLITS if tiles < units else (1,):
            waves = math.ceil(tiles * split / units)
            one = 2.0 * rows * columns * (k / split + PROLOGUE) * units / (rate * share)
            summed = 4.0 * m * n * split / _stream_rate(device, cal) if split > 1 else 0.0
            best = min(best, waves * one + summed)
    moved = (m * k + k * n + m * n) * part.element_bytes / _stream_rate(device, cal)
    return max(best, moved)


class Rates(NamedTuple):
    """What the rate of a matmul depends on besides its shape."""

    fp8: bool = False
    element_bytes: int = 2
    emulated: bool = False


def alignment(n: float, k: float, cal: Calibration) -> float:
    """Relative rate by how the sides fit the tiles: whole tiles, 16-byte rows, or neither."""
    if n % 8 or k % 8:
        return UNALIGNED
    return 1.0 if n % 64 == 0 and k % 64 == 0 else cal.misaligned


def _linear(m: float, n: float, k: float, part: Slice, device: Device, cal: Calibration) -> tuple[float, float]:
    """Seconds of the forward and backward pass of a linear layer; frozen weights have no weight gradient."""
    rates = Rates(part.fp8, part.element_bytes, part.emulated)
    unpacked = DEQUANTISED * n * k / _stream_rate(device, cal) if part.quantized else 0.0
    forward = gemm_seconds(m, n, k, rates, device, cal) + unpacked
    inputs = gemm_seconds(m, k, n, rates, device, cal) + unpacked
    weights = 0.0 if part.frozen else gemm_seconds(n, k, m, rates, device, cal)
    return forward, inputs + weights


def _attention_sides(shape: LayerShape, tp: int) -> list[tuple[float, float]]:
    """(outputs, inputs) of the fused query-key-value and of the output projection on one tensor-parallel rank."""
    q = shape.heads * shape.head_dim / tp
    kv = max(shape.kv_heads / tp, 1) * shape.head_dim
    return [(q + 2 * kv, shape.hidden), (shape.hidden, q)]


def _mlp(
    shape: LayerShape, part: Slice, device: Device, software: Software, cal: Calibration
) -> list[tuple[float, float]]:
    """(forward, backward) seconds of each MLP matmul: the dense or shared MLP, then the experts on this device."""
    costs = _mlp_pair(part.tokens, shape.ffn, shape, part, device, cal) if shape.ffn else []
    if shape.experts:
        local = shape.experts / part.ep
        grouped = part.expert_load if software.grouped_experts else 1.0
        tokens = part.tokens * part.routed_share / grouped * shape.experts_per_token / local
        pair = _mlp_pair(tokens, shape.expert_ffn, shape, replace(part, tp=part.expert_tp or part.tp), device, cal)
        costs += [(grouped * local * forward, grouped * local * backward) for forward, backward in pair]
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
    flops = 4.0 * part.tokens * seen_tokens(part) * shape.heads * shape.head_dim / part.tp
    rate = _kernel_flops(device, software.flash, shape.head_dim) * cal.attention * power_share(device, cal)
    rate *= attended(part) / (attended(part) + cal.attention_tokens)
    return flops / rate, 2.5 * flops / rate


def _kernel_flops(device: Device, generation: int, head_dim: int) -> float:
    """FLOPs per second of an attention kernel on long sequences: its matmuls, then the exponentials between them.

    One exponential serves 4 FLOPs per value of a head, so narrow heads wait for more of them."""
    if device.backend == "cpu":
        return CPU_ATTENTION * device.peak_flops
    matmuls = device.peak_flops * TENSOR_SHARE[generation]
    if generation < 3 and device.peak_flops / device.multiprocessors > HOPPER_FLOPS:
        matmuls *= AMPERE_ON_HOPPER
    exponentials = device.multiprocessors * EXPONENTIALS[generation] * min(head_dim, WIDE_HEAD) / WIDE_HEAD
    rate = 1 / (1 / matmuls + 1 / exponentials)
    slow = 1.0 if device.flash_attention else OLD_KERNEL
    return rate * slow * (FIRST_KERNEL if generation == 1 else 1.0)


def seen_tokens(part: Slice) -> float:
    """Tokens that a query attends to on average: half of the sequence, or its window."""
    length = attended(part)
    if not part.window or part.window >= length:
        return length / 2
    return part.window * (1 - part.window / (2 * length))


def attended(part: Slice) -> float:
    """Tokens of the sequence, or of a packed document, that attention stays inside."""
    return part.seq_len * part.document_share


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


ADAPTER = (14.0, 24.0)
"""Bytes per element of a linear layer's output for a LoRA adapter: its input, its product, scale and sum."""
FP32_ADAPTER = (38.0, 44.0)
"""The same in fp32: copies of the input and to fp32 and back, product, scale and sum, each with twice the bytes."""
FUSED_ADAPTER = 0.3
"""The same where the adapter is fused with its layer (Megatron), relative to eager."""
ROUTED = (16.0, 24.0)
"""Bytes per element and visited expert to permute tokens, send buffers included, and to sum what experts return."""
ROUTED_ONCE = (10.0, 15.0)
"""The same where the exchange itself permutes tokens (DeepEP)."""
ROUTED_FUSED = (4.0, 6.0)
"""The same where permutations are also parts of the experts' matmuls."""
ROUTED_KERNELS, EXCHANGE_KERNELS = 40, 20
"""Launches of the forward pass for routing (scores, top-k, permutation, counts, grouped matmuls) and the exchange."""
AUTOCAST_KERNELS = 1.5
"""Launches with torch.autocast, relative to none: each matmul casts its input, weight and bias."""
ADAPTER_KERNELS = 5
"""Launches of one adapter's forward pass."""
FP8_CAST = 3.0
"""Bytes per element of a cast for an fp8 matmul: read 16 bits, write 8."""
KERNELS = {"eager": 30, "kernels": 25, "compiled": 15}
"""Kernel launches of the forward pass of a GPT layer."""
EAGER_LLAMA_KERNELS = 20
"""Further launches for eager RMSNorm and rotary embedding."""
EXPERT_KERNELS = 5
"""Launches per expert if experts run one after the other."""


def layer_stream_bytes(shape: LayerShape, part: Slice, software: Software) -> tuple[float, float]:
    """Bytes per token that element-wise operators of a layer read and write, forward and backward."""
    residual = residual_stream_bytes(software, gated=shape.gated)
    inner = _inner_bytes(shape, part, software)
    scale = part.element_bytes / 2
    forward, backward = (residual[i] * shape.hidden / part.residual_parts + inner[i] for i in (0, 1))
    return forward * scale, backward * scale


def kernels_per_layer(shape: LayerShape, part: Slice, software: Software) -> int:
    """Kernel launches of one forward pass through a layer."""
    llama = EAGER_LLAMA_KERNELS if software.fusion == "eager" and shape.gated else 0
    loop = EXPERT_KERNELS * shape.experts // part.ep if software.expert_loop else 0
    experts = ROUTED_KERNELS + (EXCHANGE_KERNELS if part.ep > 1 else 0) + loop if shape.experts else 0
    plain = (KERNELS[software.fusion] + llama) * (AUTOCAST_KERNELS if software.autocast else 1)
    return int(plain) + experts + ADAPTER_KERNELS * part.adapters


def _inner_bytes(shape: LayerShape, part: Slice, software: Software) -> tuple[float, float]:
    """Bytes per token that tensor parallelism divides: rotary embedding, attention tensors, activation, casts."""
    q = shape.heads * shape.head_dim / part.tp
    kv = max(shape.kv_heads / part.tp, 1) * shape.head_dim
    rope = ROPE[software.fusion] if shape.gated else 0.0
    activation = activation_bytes(software, gated=shape.gated)
    inner = (shape.ffn + part.expert_load * shape.experts_per_token * shape.expert_ffn) / part.tp
    adapted = {0: 0.0, 2: q + kv, 4: 2 * q + 2 * kv}.get(part.adapters, 2 * q + 2 * kv + 3 * inner)
    adapted *= 1.0 if software.fusion == "eager" else FUSED_ADAPTER
    routed = part.routed_share * shape.experts_per_token * shape.hidden
    adapter = FP32_ADAPTER if software.fp32_adapters else ADAPTER
    moved = ROUTED_FUSED if software.fused_experts else ROUTED_ONCE if software.dispatch_once else ROUTED
    forward = (rope + 4.0) * (q + kv) + activation[0] * inner + adapter[0] * adapted + moved[0] * routed
    backward = (rope + 8.0) * (q + kv) + activation[1] * inner + adapter[1] * adapted + moved[1] * routed
    if part.fp8 and not software.fused_experts:
        forward += FP8_CAST * (2 * shape.hidden + q + inner)
        backward += FP8_CAST * (2 * shape.hidden + q + 2 * kv + inner * (2 if shape.gated else 1))
    return forward, backward
