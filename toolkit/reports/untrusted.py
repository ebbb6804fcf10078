"""Values from files that anyone may have written: made harmless before they are computed with or shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

DEEPEST = 12
"""Levels of nesting that are kept; no file of a run has more than six."""
LARGEST = 1e18
"""Numbers beyond it are not measurements."""
LONGEST = 100_000
"""Characters of a text, and entries of a list or mapping, that are kept."""


def number(value: object) -> float:
    """Return a finite number of a plausible size as a float; NaN for anything else."""
    if type(value) is int or type(value) is float:
        return float(value) if -LARGEST < value < LARGEST else math.nan
    return math.nan


def numbers(value: object) -> dict[str, float]:
    """Return the entries of a mapping that are numbers."""
    found = {str(key): number(entry) for key, entry in value.items()} if isinstance(value, Mapping) else {}
    return {key: entry for key, entry in found.items() if not math.isnan(entry)}


def harmless(value: Any, depth: int = DEEPEST) -> Any:
    """Return a copy of JSON data with printable text, finite numbers and bounded nesting."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return {text(str(k)): harmless(v, depth - 1) for k, v in list(value.items())[:LONGEST]} if depth else None
    if isinstance(value, list | tuple):
        return [harmless(entry, depth - 1) for entry in value[:LONGEST]] if depth else None
    if isinstance(value, bool) or value is None:
        return value
    found = number(value)
    return None if math.isnan(found) else value


def text(value: object) -> str:
    """Return text without escape sequences, which a terminal obeys, and without halves of surrogate pairs."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in str(value)[:LONGEST])
