"""Fused kernels: norms, rotary embeddings and gated MLPs, each used only if it changes nothing but the speed.

On GPUs they are Liger's, on CPUs those of `host_kernels.py`. Every kernel that there is for a model type is tried on a
tiny model, on this machine's device, and left out with a line if results or gradients differ. Liger's losses are never
used: the toolkit's own head computes the loss in blocks under vocabulary shards, in a pipeline's last stage and with
scaled or capped logits, too, where Liger's can't. Matrix products on CPUs are apart (`runtime/machine/host_matmul.py`):
they depend on the processor only.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.errors import BadInput, first_line
from toolkit.recipe.model_section import Model
from toolkit.runtime.layers import host_kernels
from toolkit.runtime.machine import host_matmul
from toolkit.runtime.models.attention import LARGEST, TOLERANCE, largest_difference, outcome, trial_batches
from toolkit.runtime.models.build import load_config
from toolkit.runtime.models.tiny_models import trial_config
from toolkit.runtime.models.trials import tried
from toolkit.verdicts import installed

PACKAGE = "liger_kernel"
ABSENT = "the model has no such operator"
LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
"""Switches of Liger's functions that are always off."""


def kernels_of(section: Model) -> tuple[str, ...]:
    """Names of the kernels that a recipe's model uses on this machine in the place of torch's and transformers'.

    `BadInput` if they were asked for and can't run here.
    """
    return (*_of_host(section), *_of_model(section))


def _of_host(section: Model) -> tuple[str, ...]:
    """Matrix products, which depend on the processor and not on the model."""
    if section.kernels != "auto" or section.precision != "fp32" or not _on_host() or host_matmul.why_not():
        return ()
    return (host_matmul.NAME,)


def _of_model(section: Model) -> tuple[str, ...]:
    if section.kernels == "none" or section.compile == "layers" or section.task not in (None, "causal-lm"):
        return ()  # compiled layers fuse their operators themselves
    if reason := why_not_here():
        if section.kernels == "liger":
            raise BadInput("model.kernels", f"liger given; {reason}; use auto or none")
        if not _on_host() or section.precision != "fp32":
            return ()
    config = load_config(section)
    try:
        tiny = trial_config(config)
    except Exception as error:  # configs that differ by layer refuse to be read as one
        _say_once(f"no fused kernels: no tiny model can be made to try them: {first_line(error)}")
        return ()
    if reason:
        return _that_agree(host_kernels.NAMES, tiny, HOST, "The host's")
    offered = _offered(config.model_type)
    if not offered:
        _say_once(f"Liger {_version()} has no kernels for {config.model_type}")
    return _that_agree(offered, tiny, LIGER, "Liger's")


def _that_agree(names: tuple[str, ...], tiny: dict[str, Any], kernels: _Kernels, whose: str) -> tuple[str, ...]:
    """Kernels that give the results of the plain model; a line for each other one that the model has a place for."""
    refused = {name: _refusal(name, tiny, kernels) for name in names}
    for name, reason in refused.items():
        if reason and reason != ABSENT:
            _say_once(f"{whose} {name} is left out: {reason}")
    return tuple(name for name, reason in refused.items() if not reason)


def why_not_here() -> str:
    """Why Liger's kernels can't run on this machine; empty if they can."""
    if importlib.util.find_spec(PACKAGE) is None:
        return "the package liger-kernel is not installed"
    if get_accelerator().device_name() not in ("cuda", "xpu") and not _interpreted():
        return f"its kernels need a GPU, and this is {get_accelerator().device_name()}"
    return ""


def _interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, which works on CPU tensors: for tests."""
    if importlib.util.find_spec("triton") is None:
        return False
    return bool(importlib.import_module("triton").knobs.runtime.interpret)


def _on_host() -> bool:
    return bool(get_accelerator().device_name() == "cpu")


def install(model: Any, section: Model) -> None:
    """Make a recipe's model use its kernels. It may be hollow; layers of a pipeline must not be stand-ins yet."""
    names = kernels_of(section)
    base = model.get_base_model() if section.lora is not None else model
    if _on_host():
        host_matmul.switch(on=host_matmul.NAME in names)
        if host_matmul.NAME in names:
            _say_once("matrix products: oneDNN's, because MKL has none for the AVX-512 of this AMD processor")
    names = tuple(name for name in names if name != host_matmul.NAME)
    if why_not_here():
        if _on_host():
            host_kernels.apply(base, names)  # without names: what a model before this one used is taken out
        if names:
            _say_once(f"fused operators in plain torch: {', '.join(names)}")
    elif names:
        _apply_liger(base, names)
        _say_once(f"fused kernels of Liger {_version()}: {', '.join(names)}")


@dataclass(frozen=True)
class _Kernels:
    """Kernels of one origin."""

    apply: Callable[[Any, tuple[str, ...]], None]
    """Make a model use those of these names."""
    packages: tuple[str, ...] = ()
    """Packages whose versions decide about results."""
    has_place: Callable[[Any, str], bool] = lambda model, name: True
    """Whether a model has the operator that a kernel replaces."""


def _apply_liger(model: Any, names: tuple[str, ...]) -> None:
    """Let Liger change the modules of one model.

    Liger 0.8.5 also replaces classes and functions in transformers' module, so models built later would be fused,
    tiny ones on the host included. Classes are put back; functions, which layers look up by name, decide by device.
    """
    if not names:
        return
    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    change = _functions()[model.config.model_type]
    change(model=model, **{name: name in names for name in _switches(change)})
    for name, value in before.items():
        found = vars(module).get(name)
        if found is not value:
            setattr(module, name, value if isinstance(value, type) else _by_device(value, found))


def _by_device(plain: Callable[..., Any], fused: Any) -> Callable[..., Any]:
    """The fused function for tensors where Triton runs, the plain one for others."""
    interpreted = _interpreted()

    @functools.wraps(plain)
    def chosen(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (fused if interpreted or first.device.type != "cpu" else plain)(first, *args, **kwargs)

    return chosen


@functools.cache
def _functions() -> dict[str, Callable[..., None]]:
    """Model type → the function of Liger that changes such a model."""
    return dict(importlib.import_module(f"{PACKAGE}.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN)


def _switches(change: Callable[..., None]) -> tuple[str, ...]:
    """Names of all switches of a function of Liger."""
    parameters = inspect.signature(change).parameters.values()
    return tuple(one.name for one in parameters if isinstance(one.default, bool))


def _offered(model_type: str) -> tuple[str, ...]:
    """Kernels that Liger has for a type, without losses."""
    change = _functions().get(model_type)
    return tuple(name for name in _switches(change) if name not in LOSSES) if change else ()


def _refusal(name: str, tiny: dict[str, Any], kernels: _Kernels) -> str:
    """Why a kernel is not used; empty if it gives the results of the plain model."""
    how = [name, get_accelerator().device_name(), installed(kernels.packages)]
    return tried("kernel", tiny, how, lambda: _trial(dict(tiny), name, kernels))


def _trial(values: dict[str, Any], name: str, kernels: _Kernels) -> str:
    kind = values.pop("model_type")
    config = AutoConfig.for_model(kind, **values)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        return f"its tiny model has {size:,} parameters, too many for a trial"
    device = torch.device(get_accelerator().current_device_name())
    worst = 0.0
    for micro in trial_batches():
        if micro.attention_mask is not None:
            continue  # padding does not reach these kernels
        there, outcomes = micro.to(device), []
        for names in ((), (name,)):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device).eval()
            if not kernels.has_place(model, name):
                return ABSENT
            with _for_a_while(model, names, kernels):
                run = functools.partial(_logits, model, there)
                outcomes.append(outcome(model, run, there))
        worst = max(worst, largest_difference(*outcomes))
    return "" if worst <= TOLERANCE else f"results on a tiny model differ by {worst:.1e}"


def _logits(model: Any, micro: Any) -> torch.Tensor:
    found: torch.Tensor = model(**micro.inputs()).logits
    return found


@contextlib.contextmanager
def _for_a_while(model: Any, names: tuple[str, ...], kernels: _Kernels) -> Iterator[None]:
    """A model with kernels; afterwards transformers' module is as it was."""
    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    try:
        kernels.apply(model, names)
        yield
    finally:
        for name, value in before.items():
            if vars(module).get(name) is not value:
                setattr(module, name, value)


LIGER = _Kernels(_apply_liger, ("liger-kernel", "triton"))
HOST = _Kernels(host_kernels.apply, has_place=lambda model, name: name in host_kernels.offered(model))


def _version() -> str:
    return installed(("liger-kernel",))[0]


@functools.cache
def _say_once(line: str) -> None:
    print(line)
