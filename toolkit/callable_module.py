"""Modules that can be called: `toolkit.plan(...)` and `toolkit.parity(...)` are names of the notebook's interface."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class CallableModule(types.ModuleType):
    """A module that stands for the function of the same name in `toolkit.api`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = getattr(importlib.import_module("toolkit.api"), self.__name__.rpartition(".")[2])
        return function(*args, **kwargs)


def make_callable(name: str) -> None:
    """Let calls to a module reach `toolkit.api`."""
    sys.modules[name].__class__ = CallableModule
