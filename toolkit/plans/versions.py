"""Versions of DeepSpeed, read without importing it."""

from __future__ import annotations

import functools
import importlib.metadata
import re

Version = tuple[int, ...]
REFERENCE_VERSION: Version = (0, 19, 8)
"""Version to assume where DeepSpeed is not installed, e.g. on a laptop that only plans."""


@functools.cache
def deepspeed_version() -> Version:
    """The installed DeepSpeed's version, read without importing it."""
    try:
        return parse_version(importlib.metadata.version("deepspeed"))
    except importlib.metadata.PackageNotFoundError:
        return REFERENCE_VERSION


def parse_version(text: str) -> Version:
    """`0.19.8+cpu` → (0, 19, 8)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else REFERENCE_VERSION


def is_within(version: Version, since: str, until: str) -> bool:
    """Whether a version is `since` or newer, and older than `until`; empty: no end."""
    return parse_version(since) <= version and (not until or version < parse_version(until))
