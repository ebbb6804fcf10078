"""The fitted constants of the cost model: all of them, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Calibration:
    matmul: float = 0.92
    attention: float = 1.0
    flash_half_seq: float = 500.0
    stream: float = 0.75
    score_bytes: float = 12.0
    misaligned: float = 0.70
    launch_seconds: float = 12e-6
    tp_exposed: float = 0.5
    interference: float = 0.35
    intra: float = 0.77
    inter: float = 0.62
    pp_exposed: float = 1.0
    fixed_seconds: float = 0.02
    power: float = 0.5
    wave: float = 0.5
    contention: float = 1.0
    ring_hop_seconds: float = 10e-6


CALIBRATION = Calibration()
