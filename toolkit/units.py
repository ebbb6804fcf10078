"""Units of size and rate. Multiply by one to get bytes, FLOPs or bytes per second; divide to show a number."""

from __future__ import annotations

KIB = 2**10
"""Bytes in a kibibyte."""
MIB = 2**20
"""Bytes in a mebibyte."""
GIB = 2**30
"""Bytes in a gibibyte: memory sizes."""
GB = 10**9
"""Bytes in a gigabyte: bandwidths and disk sizes."""
GBIT = 10**9 / 8
"""Bytes in a gigabit: network rates."""
TERA = 10**12
"""FLOPs in a TFLOP; bytes in a terabyte."""
