"""Secrets in recipes: recipes are copied into run directories, launch files and W&B, so none may be in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from toolkit.errors import Problem

SHAPES = {
    "an address with a password": re.compile(r"://[^/\s:@]*:[^/\s@]+@"),
    "a Hugging Face token": re.compile(r"\bhf_[A-Za-z0-9]{20,}"),
    "an AWS key": re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "a GitHub token": re.compile(r"\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
}
"""What a secret looks like, whatever key it stands under."""


def secret_faults(value: Any, where: str = "") -> Iterator[Problem]:
    """Every value that looks like a secret; the value itself is not repeated."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from secret_faults(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from secret_faults(item, f"{where}[{number}]")
    elif isinstance(value, str):
        for kind, shape in SHAPES.items():
            if shape.search(value):
                what = (
                    f"looks like {kind}; recipes are copied to places where others read; use the environment, or log in"
                )
                yield Problem(where, what)
