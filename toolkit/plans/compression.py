"""Sizes of compressed gradients on the wire."""

from __future__ import annotations

BLOCK = 2048
"""Elements that share one scale: small enough that layers of different size do not drown each other."""
ONE_BIT_BYTES = 1 / 8 + 4 / BLOCK
"""Of an element: its sign, and its part of an fp32 scale."""
