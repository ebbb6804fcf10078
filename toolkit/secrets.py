"""What a secret is: one definition of secret names, one of secret shapes. Used to redact, to refuse and to withhold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.errors import Problem

HIDDEN = "(hidden)"

_KINDS_OF_KEY = r"(?:api|access|private)_?key"
_SECRET_WORDS = rf"token|pwd|auth|(?:{_KINDS_OF_KEY}|secret|password|passwd|credential)s?"
"""Words that name a secret. `tokens` is not one of them: here it is a count."""
_SECRET_NAME = re.compile(rf"(^|[_\-.])({_SECRET_WORDS})($|[_\-.])", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(rf"{_SECRET_WORDS}|key|proxy", re.IGNORECASE)
_SHORTEST = 6
"""Characters; shorter values of secret variables are words like `true`, not secrets."""


def is_secret_name(name: str) -> bool:
    """Return whether a key names a secret: as a complete word, so that `tokenizer` and `pad_tokens` do not."""
    return _SECRET_NAME.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)) is not None


def is_secret_variable(name: str) -> bool:
    """Return whether an environment variable must stay off command lines and out of files.

    Stricter than `is_secret_name`: the word may be part of another, and every key counts, as does a proxy, whose
    address may contain a password. A withheld setting is reported; a leaked one is not.
    """
    return _SECRET_VARIABLE.search(name) is not None


@dataclass(frozen=True)
class Shape:
    """A form that secrets have, whatever key they are stored under."""

    kind: str
    pattern: re.Pattern[str]
    refused: bool = True
    """Whether recipes may not contain it; else it is only redacted, because harmless values look like it."""
    replacement: str = HIDDEN


SHAPES = (
    Shape("an address with a user name", re.compile(r"(?<=://)[^/@\s]+@"), refused=False, replacement=f"{HIDDEN}@"),
    Shape(
        "a key of another service",  # W&B's old keys are 40 hexadecimal digits, and so are git revisions
        re.compile(r"\bsk-[A-Za-z0-9_-]{16,}|\bxox[a-z]-[A-Za-z0-9-]{10,}|\bwandb_v\d_\w{16,}|\b[0-9a-f]{40}\b"),
        refused=False,
    ),
    Shape("an address with a password", re.compile(r"://[^/\s:@]*:[^/\s@]+@")),
    Shape("a Hugging Face token", re.compile(r"\bhf_[A-Za-z0-9]{20,}")),
    Shape("an AWS key", re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b")),
    Shape("a GitHub token", re.compile(r"\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}")),
    Shape("a private key", re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")),
)
"""In the order in which they are redacted."""


def secrets_in(env: Mapping[str, str]) -> frozenset[str]:
    """Return the values of environment variables with secret names."""
    return frozenset(value for name, value in env.items() if is_secret_name(name) and len(value) >= _SHORTEST)


def redact(tree: Any, secrets: Iterable[str] = ()) -> Any:
    """Return a copy of nested mappings and lists without secrets; `secrets` are values to hide wherever they occur."""
    known = sorted(secrets, key=len, reverse=True)
    return _redact(tree, known)


def _redact(tree: Any, known: list[str]) -> Any:
    if isinstance(tree, Mapping):
        return {
            redact_text(str(key), known): HIDDEN
            if isinstance(value, str) and is_secret_name(str(key))
            else _redact(value, known)
            for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [_redact(item, known) for item in tree]
    return redact_text(tree, known) if isinstance(tree, str) else tree


def redact_text(text: str, known: Iterable[str] = ()) -> str:
    """Return the text without known secrets and without anything that has the shape of one."""
    for secret in known:
        text = text.replace(secret, HIDDEN)
    for shape in SHAPES:
        text = shape.pattern.sub(shape.replacement, text)
    return text


def secret_problems(value: Any, where: str = "") -> Iterator[Problem]:
    """Yield a problem for every value of a recipe that looks like a secret; the message does not repeat the value."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from secret_problems(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from secret_problems(item, f"{where}[{number}]")
    elif isinstance(value, str):
        for shape in SHAPES:
            if shape.refused and shape.pattern.search(value):
                what = (
                    f"looks like {shape.kind}; recipes are copied into runs and reports; use the environment, or log in"
                )
                yield Problem(where, what)
