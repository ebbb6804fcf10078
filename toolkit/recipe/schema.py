"""Build frozen dataclasses from mappings, strictly: every problem is collected with its key path."""

from __future__ import annotations

import difflib
import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Any, Literal, TypeVar

from toolkit.errors import Problem

T = TypeVar("T")
INVALID: Any = object()
"""Placeholder for a value with a problem; the problem itself is in the list."""


def number(
    default: Any = MISSING, *, least: float | None = None, above: float | None = None, most: float | None = None
) -> Any:
    """A number field with its range; `above` excludes the bound itself."""
    metadata = {"least": least, "above": above, "most": most}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


def build(cls: type[T], given: Any, path: str, problems: list[Problem]) -> T:
    """An instance of `cls` from a mapping; on problems, appends them to `problems` and returns `INVALID`."""
    if not isinstance(given, Mapping):
        problems.append(Problem(path or "recipe", f"{show(given)} given; a mapping of keys is required"))
        return typing.cast(T, INVALID)
    known = {f.name: f for f in fields(typing.cast(Any, cls))}
    hints = _hints(typing.cast(Any, cls))
    before = len(problems)
    for key in given:
        if key not in known:
            problems.append(Problem(join(path, str(key)), _unknown(str(key), known, path)))
    values = {
        name: _check(hints[name], given[name], join(path, name), known[name], problems)
        for name in known
        if name in given
    }
    for name, f in known.items():
        if name not in given and f.default is MISSING and f.default_factory is MISSING:
            problems.append(Problem(join(path, name), "required, but not given"))
    return typing.cast(T, INVALID) if len(problems) > before else cls(**values)


@functools.cache
def _hints(cls: type) -> Mapping[str, Any]:
    """Types of the fields; kept, because Python evaluates every annotation anew."""
    return typing.get_type_hints(cls)


def _check(kind: Any, value: Any, path: str, f: Field[Any], problems: list[Problem]) -> Any:
    """`value` converted to `kind`; on a problem, appends it and returns `INVALID`."""
    options = [kind]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        options = list(typing.get_args(kind))
    for option in options:
        if is_dataclass(option) and isinstance(value, Mapping):
            return build(typing.cast(type, option), value, path, problems)
        result = _scalar(option, value)
        if result is not INVALID:
            wrong = _range_problem(result, f)
            if wrong:
                problems.append(Problem(path, f"{show(value)} given; {wrong}"))
            return INVALID if wrong else result
    problems.append(Problem(path, _mismatch(value, options)))
    return INVALID


def _scalar(kind: Any, value: Any) -> Any:
    if kind is type(None):
        return None if value is None else INVALID
    if typing.get_origin(kind) is Literal:
        return value if value in typing.get_args(kind) and not isinstance(value, bool) else INVALID
    if typing.get_origin(kind) is tuple:
        return _items(typing.get_args(kind)[0], value)
    if typing.get_origin(kind) in (dict, Mapping) or kind is dict:
        return dict(value) if isinstance(value, Mapping) else INVALID
    if kind is float:
        return _as_float(value)
    if kind is int:
        return value if isinstance(value, int) and not isinstance(value, bool) else INVALID
    return value if isinstance(kind, type) and isinstance(value, kind) else INVALID


def _items(kind: Any, value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return INVALID
    items = tuple(_scalar(kind, item) for item in value)
    return INVALID if any(item is INVALID for item in items) else items


def _as_float(value: Any) -> Any:
    """A number, or text such as `3e-4`, which YAML 1.1 does not read as a number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return INVALID
    try:
        result = float(value)
    except (ValueError, OverflowError):
        return INVALID
    return result if math.isfinite(result) else INVALID


def _range_problem(value: Any, f: Field[Any]) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    least, above, most = (f.metadata.get(name) for name in ("least", "above", "most"))
    if above is not None and value <= above:
        return f"more than {above:g} is required"
    if least is not None and value < least:
        return f"at least {least:g} is required"
    if most is not None and value > most:
        return f"at most {most:,} is allowed" if isinstance(most, int) else f"at most {most:g} is allowed"
    return None


def _mismatch(value: Any, options: list[Any]) -> str:
    choices = [
        str(choice) for option in options if typing.get_origin(option) is Literal for choice in typing.get_args(option)
    ]
    wanted = " or ".join(words(option) for option in options if option is not type(None))
    hint = nearest(str(value), choices) if choices else ""
    return f"{show(value)} given; {wanted} is required{hint}"


def words(kind: Any) -> str:
    """A type in words, for messages."""
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return "a list of " + words(typing.get_args(kind)[0]).removeprefix("a ").removeprefix("an ") + "s"
    if is_dataclass(kind) or kind is dict or typing.get_origin(kind) in (dict, Mapping):
        return "a mapping"
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(kind, str(kind))


def _unknown(key: str, known: Mapping[str, Any], path: str) -> str:
    return "unknown key" + nearest(key, [join(path, name) for name in known], of=join(path, key))


def nearest(given: str, known: list[str], of: str | None = None) -> str:
    """`; did you mean X?`, or a list of the known names if none is close."""
    close = difflib.get_close_matches(of or given, known, n=1, cutoff=0.75)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known: {', '.join(name.rpartition('.')[2] for name in known)}" if of else ""


def join(path: str, key: str) -> str:
    """`path.key`."""
    return f"{path}.{key}" if path else key


def show(value: Any) -> str:
    """A value for a message, shortened to 60 characters."""
    try:
        text = "nothing" if value is None else repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= 60 else text[:57] + "..."
