"""What was tried on a tiny model, once per host and user: verdicts are kept on disk.

Every rank of every run would make the same trials before it builds its engine: about a second of CPU. On a host one
rank makes them, and the others wait for it.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import first_line
from toolkit.resources import user_cache
from toolkit.runtime.distributed import rng
from toolkit.verdicts import Verdict, VerdictFile, installed

CACHE_NAME = "trials.json"
LIBRARIES = ("torch", "transformers")
_failed: dict[str, str] = {}
"""Trials of this process that raised an exception: why."""


def tried(what: str, config: dict[str, Any], how: list[Any], trial: Callable[[], str]) -> str:
    """Why a trial of something says no; empty if it says yes.

    `config`: values of the tiny model; `how`: what else the trial depends on. A trial that fails with an exception says
    no, too, but is made again next time: the host may have been short of memory.
    """
    key = _key(what, config, [*how, _sources(trial.__code__.co_filename)])
    if _file().get(key) is None and key not in _failed:
        with _file().one_at_a_time():
            if _file().get(key) is None:
                _try(key, trial)
    known = _file().get(key)
    return known.reason if known is not None else _failed[key]


def _try(key: str, trial: Callable[[], str]) -> None:
    """Make a trial and remember its verdict."""
    before = rng.capture()
    try:
        with torch.enable_grad():  # a trial may be asked for inside another one, which computes no gradients
            reason = trial()
    except Exception as error:
        _failed[key] = f"a trial on a tiny model failed: {first_line(error)}"
        return
    finally:
        rng.restore(before)  # building a model seeds all generators, and dropout draws from them
        gc.collect()  # models hold themselves in cycles: their tensors would be counted as the run's
    _file().put(key, Verdict(not reason, reason))


@functools.cache
def _file() -> VerdictFile:
    return VerdictFile(user_cache() / CACHE_NAME, "tiny models are tried again")


def _key(what: str, config: dict[str, Any], how: list[Any]) -> str:
    text = json.dumps([what, config, how, installed(LIBRARIES)], sort_keys=True, default=str)
    return f"{what}:{config.get('model_type')}:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@functools.cache
def _sources(asking: str) -> str:
    """Digest of this package and the one that asks: a verdict on other code says nothing."""
    digest = hashlib.sha256()
    for path in sorted({*Path(__file__).parent.glob("*.py"), *Path(asking).parent.glob("*.py")}):
        digest.update(path.read_bytes())
    return digest.hexdigest()
