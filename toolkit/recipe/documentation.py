"""Documentation of the recipe keys, read from the docstrings under the fields of the sections."""

from __future__ import annotations

import ast
import inspect
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass

from toolkit.recipe.schema import words
from toolkit.recipe.sections import Recipe


@dataclass(frozen=True)
class Key:
    """One recipe key as shown to users."""

    path: str
    kind: str
    default: str
    meaning: str


def recipe_keys(section: type = Recipe, prefix: str = "") -> Iterator[Key]:
    """All recipe keys, depth first."""
    meanings = _meanings(section)
    hints = typing.get_type_hints(section)
    for f in fields(section):
        options = _options(hints[f.name])
        path = prefix + f.name
        kind = " or ".join(words(option) for option in options if option is not type(None))
        yield Key(path, kind, _default(f), meanings.get(f.name, ""))
        for option in options:
            if is_dataclass(option) and isinstance(option, type):
                yield from recipe_keys(option, path + ".")


def _options(kind: typing.Any) -> tuple[typing.Any, ...]:
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if is_union else (kind,)


def _default(f: Field[typing.Any]) -> str:
    if f.default is MISSING:
        return "" if f.default_factory is not MISSING else "required"
    if isinstance(f.default, bool):
        return str(f.default).lower()
    if isinstance(f.default, tuple):
        return "[" + ", ".join(map(str, f.default)) + "]"
    return "" if f.default is None else str(f.default)


def _meanings(section: type) -> dict[str, str]:
    """Field name → the docstring under it."""
    body = ast.parse(inspect.getsource(section)).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement, after in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(after, ast.Expr)
        ):
            text = ast.literal_eval(after.value)
            found[statement.target.id] = " ".join(str(text).split())
    return found
