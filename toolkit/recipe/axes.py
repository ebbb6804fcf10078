"""Allowed values of the axes that a recipe may fix: the one home for recipe keys, plans and strategies."""

from __future__ import annotations

from typing import Literal, get_args

Offload = Literal["none", "cpu", "nvme", "cpu_params", "nvme_params"]
Recompute = Literal["none", "selective", "full", "offload"]
ZeroVariant = Literal["plain", "hpz", "mics"]
ZeroQuantized = Literal["none", "weights", "gradients", "both"]
TensorBy = Literal["slices", "autotp"]
PipelineSchedule = Literal["1f1b", "interleaved", "zero_bubble"]

RECOMPUTES: tuple[str, ...] = get_args(Recompute)
"""From the fastest, which keeps most, to the slowest, which keeps least."""
OFFLOADS: tuple[str, ...] = get_args(Offload)
ZERO_VARIANTS: tuple[str, ...] = get_args(ZeroVariant)
ZERO_QUANTIZED: tuple[str, ...] = get_args(ZeroQuantized)
PIPELINE_SCHEDULES: tuple[str, ...] = get_args(PipelineSchedule)
