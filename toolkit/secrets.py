"""Secrets out of what leaves the run directory: tokens and passwords by the key's name, the value's form, or both."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from toolkit.errors import Problem

HIDDEN = "(hidden)"
_SECRET_NAME = re.compile(
    r"(^|[_\-.])(token|pwd|auth|(api_?key|access_?key|secret|password|passwd|credential|private_?key)s?)($|[_\-.])",
    re.IGNORECASE,
)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_KEYS = re.compile(r"\bsk-[A-Za-z0-9_-]{16,}|\bxox[a-z]-[A-Za-z0-9-]{10,}|\bwandb_v\d_\w{16,}|\b[0-9a-f]{40}\b")
"""Keys of services that recipes have no business with; W&B's old ones are 40 hexadecimal digits."""
_SHORTEST = 6
"""Shorter values of secret variables are words like `true`, not secrets."""


def secrets_in(env: Mapping[str, str]) -> frozenset[str]:
    """Values of environment variables that are named like secrets."""
    return frozenset(value for name, value in env.items() if _is_secret_name(name) and len(value) >= _SHORTEST)


def redact(tree: Any, secrets: Iterable[str] = ()) -> Any:
    """The same tree of mappings and lists with secrets replaced; `secrets` are hidden wherever they stand."""
    known = sorted(secrets, key=len, reverse=True)
    return _redact(tree, known)


def _redact(tree: Any, known: list[str]) -> Any:
    if isinstance(tree, Mapping):
        return {
            redact_text(str(key), known): HIDDEN
            if isinstance(value, str) and _is_secret_name(str(key))
            else _redact(value, known)
            for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [_redact(item, known) for item in tree]
    return redact_text(tree, known) if isinstance(tree, str) else tree


def redact_text(text: str, known: Iterable[str] = ()) -> str:
    """Secrets inside a text, by their form or because they are known."""
    for secret in known:
        text = text.replace(secret, HIDDEN)
    text = _USER_IN_URL.sub(f"{HIDDEN}@", text)
    for shape in (_KEYS, *SHAPES.values()):
        text = shape.sub(HIDDEN, text)
    return text


def _is_secret_name(name: str) -> bool:
    return _SECRET_NAME.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)) is not None


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


_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|PROXY", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether a setting must stay off command lines and out of files."""
    return bool(_SECRET.search(name))
