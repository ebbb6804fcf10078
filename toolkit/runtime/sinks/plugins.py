"""Sinks that users bring: `module:Class`, or a name in the entry-point group `toolkit.sinks`."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import entry_points
from typing import Any

from toolkit.errors import BadInput
from toolkit.recipe.schema import nearest

GROUP = "toolkit.sinks"
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_METHODS = ("start", "log", "finish")


def load_sink(name: str) -> Any:
    """The class that a name stands for; `BadInput` if there is none, or if it is no sink."""
    found = _by_path(name) if ":" in name else _by_entry_point(name)
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if missing:
        raise BadInput("metrics.sinks", f"{name} is no sink: it has no {', '.join(missing)}; see docs/metrics.md")
    return found


def _by_path(name: str) -> Any:
    if not _PATH.fullmatch(name):
        raise BadInput("metrics.sinks", f"{name!r} given; module:Class is required")
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise BadInput("metrics.sinks", f"{name}: {error}; is the module's folder in PYTHONPATH?") from None
    except AttributeError:
        raise BadInput("metrics.sinks", f"{name}: {module} has no {attribute}") from None


def _by_entry_point(name: str) -> Any:
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        what = f"{name!r} is neither module:Class nor an entry point of {GROUP}{nearest(name, list(points))}"
        raise BadInput("metrics.sinks", what)
    return points[name].load()
