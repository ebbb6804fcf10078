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
from toolkit.cost.software import Software

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.6))
"""Output tiles of the matmul library (CUTLASS' profiler, A100): rows, columns, rate relative to the largest tiles."""
SPLITS = (1, 2, 4, 8)
"""Parts that the inner dimension may be split into, so that few tiles occupy all multiprocessors."""
PROLOGUE = 64
"""Inner elements whose time a tile needs to fill its pipeline and to write its result."""
UNALIGNED = 0.45
"""Relative rate of a matmul whose rows are not 16-byte aligned: GPT-2 gains 25% when its table of 50,257 rows is padded
to 50,304 (nanoGPT)."""
TENSOR_SHARE = 0.9
"""Share of the tensor cores' peak in the matmuls of an attention kernel."""
EXPONENTIALS = {1: 5.4e12, 2: 5.4e12, 3: 2.0e13}
"""Attention FLOPs per second of one multiprocessor whose exponentials take as long as their matmuls, by generation of
the kernel. With `TENSOR_SHARE` it gives the rates published for long causal sequences, forward and backward:
FlashAttention 2 on A100 (190 of 312 TFLOP/s) and H100 (335 of 989, arXiv 2307.08691), 3 and cuDNN on H100 (530 to 660,
arXiv 2407.08608)."""
FIRST_KERNEL = 0.7
"""FlashAttention 1 relative to 2 (arXiv 2307.08691)."""
DEQUANTISED = 4.0
"""Bytes per 4-bit weight that is made 16-bit for a matmul: read 0.5, write 2, and its scales in two steps."""
AMPERE_ON_HOPPER = 0.62
"""Tensor-core rate of FlashAttention 1 and 2 on Hopper: they do not use its asynchronous matmuls (ibid.)."""
CPU_ATTENTION = 0.6  # relative to the peak
OLD_KERNEL = 0.6
"""torch's memory-efficient kernel on V100 and T4, where FlashAttention does not run, relative to FlashAttention 1."""
FLASH_HALF_SEQ = 800.0
"""Sequence length at which causal attention reaches half of its long-sequence rate (ibid., figures 4-6)."""
HOPPER_FLOPS = 4e12
"""Peak per multiprocessor above which a device is of Hopper's generation or later."""
H100_WATTS_PER_FLOP = 700 / 989e12
"""Watts per peak FLOP/s with which a matmul sustains its measured rate in training."""
CAPPED = 0.6
"""Exponent by which the sustained rate of one kind falls with its power limit: between a cube root (voltage follows
the clock) and proportional (only the clock falls)."""
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
    mlp = _mlp(shape, part, device, cal)
    core = _flash(shape, part, device, software, cal) if software.flash else _scores(shape, part, device, software, cal)
    stream = layer_stream_bytes(shape, part, software)
    second = part.tokens / _stream_rate(device, cal)
    kernels = kernels_per_layer(shape, part, software)
    linears = [*((shape.attention_share * f, shape.attention_share * b) for f, b in attention), *mlp]
    gap = cal.kernel_seconds * kernels if device.backend != "cpu" else 0.0
    return LayerCost(
        Pass(sum(f for f, _ in linears), core[0], stream[0] * second, kernels, mlp[0][0], gap),
        Pass(sum(b for _, b in linears), core[1], stream[1] * second, 2 * kernels, 0.0, 2 * gap),
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
    return rate * cal.matmul * power_share(device, cal)


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


def _mlp(shape: LayerShape, part: Slice, device: Device, cal: Calibration) -> list[tuple[float, float]]:
    """(forward, backward) seconds of each MLP matmul: the dense or shared MLP, then the experts on this device."""
    costs = _mlp_pair(part.tokens, shape.ffn, shape, part, device, cal) if shape.ffn else []
    if shape.experts:
        local = shape.experts / part.ep
        shared = part.expert_tp or part.tp
        tokens = part.tokens * shape.experts_per_token / local * shared / part.tp
        pair = _mlp_pair(tokens, shape.expert_ffn, shape, replace(part, tp=shared), device, cal)
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
    flops = 4.0 * part.tokens * seen_tokens(part) * shape.heads * shape.head_dim / part.tp
    rate = _kernel_flops(device, software.flash) * cal.attention * power_share(device, cal)
    rate *= part.seq_len / (part.seq_len + FLASH_HALF_SEQ)
    return flops / rate, 2.5 * flops / rate


def _kernel_flops(device: Device, generation: int) -> float:
    """FLOPs per second of an attention kernel on long sequences: its matmuls, then the exponentials between them."""
    if device.backend == "cpu":
        return CPU_ATTENTION * device.peak_flops
    matmuls = device.peak_flops * TENSOR_SHARE
    if generation < 3 and device.peak_flops / device.multiprocessors > HOPPER_FLOPS:
        matmuls *= AMPERE_ON_HOPPER
    exponentials = device.multiprocessors * EXPONENTIALS[generation]
    rate = 1 / (1 / matmuls + 1 / exponentials)
    slow = 1.0 if device.flash_attention else OLD_KERNEL
    return rate * slow * (FIRST_KERNEL if generation == 1 else 1.0)


def seen_tokens(part: Slice) -> float:
    """Tokens that a query attends to on average: half of the sequence, or its window."""
    if not part.window or part.window >= part.seq_len:
        return part.seq_len / 2
    return part.window * (1 - part.window / (2 * part.seq_len))


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
COMPOSED_GELU = (34.0, 52.0)
"""Bytes per element of GPT-2's GELU as transformers writes it: power, two products, sum, tanh, sum, two products."""
ADAPTER = (14.0, 24.0)
"""Bytes per element of a linear layer's output for a LoRA adapter: its input, its product, scale and sum."""
FUSED_ADAPTER = 0.3
"""The same where the adapter is fused with its layer (Megatron), relative to eager."""
ROUTED = (16.0, 24.0)
"""Bytes per element and visited expert to permute tokens, send buffers included, and to sum what experts return."""
ROUTED_KERNELS = 60
"""Launches of the forward pass for routing: scores, top-k, permutation, counts, exchange, grouped matmuls."""
ADAPTER_KERNELS = 5
"""Launches of one adapter's forward pass."""
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
FUSED_HEAD = (6.0, 4.0)
"""Bytes per logit of a fused loss: read the logits twice, write their gradient in place."""
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
    return FUSED_HEAD if software.fused_loss else HEAD[software.fusion]


def softmax_bytes(software: Software) -> tuple[float, float]:
    """Bytes per stored attention score that softmax and dropout read and write, forward and backward."""
    forward, backward = SOFTMAX[software.fusion]
    extra = DROPOUT if software.dropout else 0.0
    return forward + extra, backward + extra


def kernels_per_layer(shape: LayerShape, part: Slice, software: Software) -> int:
    """Kernel launches of one forward pass through a layer."""
    llama = EAGER_LLAMA_KERNELS if software.fusion == "eager" and shape.gated else 0
    loop = EXPERT_KERNELS * shape.experts // part.ep if software.expert_loop else 0
    experts = ROUTED_KERNELS + loop if shape.experts else 0
    return KERNELS[software.fusion] + llama + experts + ADAPTER_KERNELS * part.adapters


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
    plain = COMPOSED_GELU if software.composed_gelu else PLAIN_ACTIVATION
    activation = GATED_ACTIVATION[software.fusion] if shape.gated else plain
    adapted = {0: 0.0, 2: q + kv, 4: 2 * q + 2 * kv}.get(part.adapters, 2 * q + 2 * kv + 3 * inner)
    adapted *= 1.0 if software.fusion == "eager" else FUSED_ADAPTER
    routed = shape.experts_per_token * shape.hidden / part.tp
    forward = (rope + 4.0) * (q + kv) + activation[0] * inner + ADAPTER[0] * adapted + ROUTED[0] * routed
    backward = (rope + 8.0) * (q + kv) + activation[1] * inner + ADAPTER[1] * adapted + ROUTED[1] * routed
    if part.fp8:
        forward += FP8_CAST * (2 * shape.hidden + q + inner)
        backward += FP8_CAST * (2 * shape.hidden + q + 2 * kv + inner * (2 if shape.gated else 1))
    return forward, backward
