"""`torch.compile` for each decoder layer, so that its element-wise operators run as fused kernels.

Attention over packed documents stays outside: its bounds differ in every step, and compiled code would be made anew for
each. So a layer is two graphs, one on each side of attention, and all layers share them. A tiny model is compiled
before a run: if its layers come apart elsewhere, if other bounds are compiled again, or if results differ, the run is
refused.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.errors import BadInput, first_line
from toolkit.recipe.model_section import Model
from toolkit.runtime.models import attention
from toolkit.runtime.models.attention import (
    LARGEST,
    TOLERANCE,
    forward,
    largest_difference,
    outcome,
    trial_batches,
)
from toolkit.runtime.models.build import load_config
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.models.tiny_models import trial_config
from toolkit.runtime.models.trials import tried

BACKEND = "inductor"


def install(model: Any, section: Model, outside: Callable[[torch.nn.Module], bool] = lambda module: False) -> None:
    """Compile the layers of a recipe's model when they first run; `BadInput` if a trial says no.

    `outside`: modules that stay as they are, because they communicate. The layer is compiled around them.
    """
    if section.compile == "none":
        return
    if reason := why_not(section):
        raise BadInput("model.compile", f"layers given; {reason}; use none")
    compile_layers(model, BACKEND, outside)
    print(f"decoder layers are compiled by torch.compile ({BACKEND}) in the first step")


def compile_layers(model: Any, backend: str, outside: Callable[[torch.nn.Module], bool] = lambda module: False) -> None:
    """Compile each decoder layer, with attention and the modules `outside` left as they are."""
    attention.register(torch.compiler.disable)
    for layer in _layers(model):
        for module in filter(outside, layer.modules()):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]
        layer.compile(backend=backend, dynamic=False)


def compiled_graphs() -> int | None:
    """Graphs that this process has compiled so far; None if it compiles nothing."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    found = dynamo.counters["stats"]["unique_graphs"] if dynamo else 0
    return int(found) or None


def why_not(section: Model, backend: str = BACKEND) -> str:
    """Why the layers of a recipe's model can't be compiled; empty if they can. Tried on a tiny model."""
    if section.task not in (None, "causal-lm"):
        return f"only language models have been tried, not {section.task}"
    if attention.kernel_of(section) is None:
        return f"attention {section.attention} has masks of its own, which break the graph"
    config = load_config(section)
    if reason := attention.why_not(config, section.task):
        return f"{config.model_type} keeps transformers' attention: {reason}"
    try:
        tiny = trial_config(config)
    except Exception as error:  # configs that differ by layer refuse to be read as one
        return f"no tiny model can be made of it: {first_line(error)}"
    return tried("compile", tiny, [backend], lambda: _trial(dict(tiny), backend))


def _layers(model: Any) -> list[GradientCheckpointingLayer]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _trial(values: dict[str, Any], backend: str) -> str:
    import torch._dynamo as dynamo

    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        return f"its tiny model has {size:,} parameters, too many for a trial"
    plain, ours = _tiny(config), _tiny(config)
    if not _layers(ours):
        return "its layers are not marked as layers by transformers"
    compile_layers(ours, backend)
    counters = dynamo.utils.counters
    try:
        worst = _difference(plain, ours, _packed((5, 7), (3, 6, 3)))
        graphs = counters["stats"]["unique_graphs"]
        worst = max(worst, _difference(plain, ours, _packed((4, 4, 4), (11, 1))))
        again = counters["stats"]["unique_graphs"] - graphs
        breaks = [first_line(Exception(why)) for why in counters["graph_break"] if "torch.compiler.disable" not in why]
    finally:
        dynamo.reset()
        counters.clear()
        attention.register()
    if breaks:
        return f"its layers break into pieces: {breaks[0]}"
    if worst > TOLERANCE:
        return f"results on a tiny model differ by {worst:.1e}"
    return f"documents with other bounds are compiled again, {again} graphs" if again else ""


def _packed(*rows: tuple[int, ...]) -> MicroBatch:
    """Rows of 12 tokens with documents of these lengths."""
    ids = trial_batches()[0].input_ids
    assert ids is not None
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
    return MicroBatch(ids, ids, position_ids=positions).located()


def _tiny(config: Any) -> Any:
    torch.manual_seed(0)
    # A copy: the model's own attention is named in it, and some types look up a class by that name when they are made.
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).eval()
    attention.use(model, "by_document")
    return model


def _difference(plain: Any, ours: Any, micro: MicroBatch) -> float:
    expected = outcome(plain, lambda: forward(plain, micro).logits, micro)
    return largest_difference(expected, outcome(ours, lambda: forward(ours, micro).logits, micro))
