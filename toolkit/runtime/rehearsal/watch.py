"""Follows an engine: part of the step, module and micro-batch that run, what tensors are, what layers look like."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from toolkit.recipe.model_section import Model
from toolkit.runtime.engine.replica import ReplicaEngine
from toolkit.runtime.engine.weight_average import FirstWeights
from toolkit.runtime.metrics.step_clock import Lap
from toolkit.runtime.models.build import skeleton
from toolkit.runtime.pipeline.engine import PipelineEngine
from toolkit.runtime.pipeline.split import layer_lists
from toolkit.runtime.rehearsal.ledger import Ledger

PARTS = {"forward": "activations", "backward": "activations", "optimizer": "optimizer"}
"""Part of a step → part of memory that new tensors belong to."""
REPEATED = ("data", "forward", "backward", "pp_comm")
"""Parts of a pipeline's step that happen once per micro-batch."""
MOMENT_MICRO_BATCHES = 2
"""Micro-batches that are told apart; later ones are like the second."""


class PhaseClock:
    """`Clock` that tells the ledger which part of the step, which micro-batch and which module runs."""

    def __init__(self, ledger: Ledger, is_pipeline: bool, label: Callable[[], None]) -> None:
        """`label` is called where a backward pass has ended: gradients have found their place then."""
        self.watcher: Callable[[str], object] | None = None
        self._ledger, self._is_pipeline, self._label = ledger, is_pipeline, label
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._open, self._micro, self._kind = ["step"], 0, ""
        self._tell()

    @property
    def part_name(self) -> str:
        """The innermost open part."""
        return self._open[-1]

    def enter(self, part: str) -> None:
        """Open a part inside the current one."""
        self._open.append(part)
        self._micro += part == "forward"
        self._tell()
        if part == "optimizer":
            self._label()

    def leave(self) -> None:
        """Close the innermost part."""
        self._open.pop()
        self._tell()

    def at(self, path: str, kind: str) -> None:
        """A module begins its forward or backward pass."""
        self._ledger.module, self._kind = path, kind
        self._tell()

    def _tell(self) -> None:
        ledger, part = self._ledger, self._open[-1]
        ledger.part = PARTS.get(part, "temporary")
        ledger.repeats = part in REPEATED if self._is_pipeline else self._micro == 1
        ledger.place = (part, str(min(self._micro, MOMENT_MICRO_BATCHES)), self._kind)

    def hide(self, part: str, seconds: float) -> None:
        """Nothing is timed."""

    def lap(self, *, sample_next: bool) -> Lap:
        """Nothing is timed."""
        return Lap(0.0, {}, {}, [])


def inner(engine: Any) -> Any:
    """DeepSpeed's engine inside an engine of ours."""
    return _replica(engine)._engine


def _replica(engine: Any) -> ReplicaEngine | PipelineEngine:
    """The engine itself; islands wrap the engine of a replica."""
    own: ReplicaEngine | PipelineEngine = (
        engine if isinstance(engine, ReplicaEngine | PipelineEngine) else engine._inner
    )
    return own


def models(engine: Any) -> list[torch.nn.Module]:
    """The models of a rank: one, or one per chunk of a pipeline."""
    return engine.models if isinstance(engine, PipelineEngine) else [engine.module]


def label(ledger: Ledger, engine: Any, first: FirstWeights | None = None) -> None:
    """Sort what is alive between steps into weights (and the copy of the first), states, gradients and the rest."""
    deepspeed = inner(engine)
    wrapper = deepspeed.optimizer
    base = _replica(engine).state.base
    weights = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
    weights += [p.data for p in engine.module.parameters()] + list(engine.module.buffers())
    weights += first.copies if first is not None else []
    weights += [tensor for p in engine.module.parameters() for tensor in _constants(getattr(p, "quant_state", None))]
    gradients = [p.grad for p in engine.module.parameters()] + [
        tensor for name, value in vars(wrapper).items() if "grad" in name for tensor in _tensors(value)
    ]
    states = [tensor for group in base.param_groups for tensor in group["params"]]
    states += [tensor for master, state in base.state.items() for tensor in (master, *_tensors(state))]
    known: set[int] = set()
    # Weights last: without masters of its own, an optimizer updates the weights themselves.
    for part, tensors in (("grads", gradients), ("optimizer", states), ("params", weights)):
        ledger.relabel(tensors, part)
        known |= {tensor.untyped_storage()._cdata for tensor in tensors if isinstance(tensor, torch.Tensor)}
    ledger.relabel_rest(known, "buckets")


def _constants(state: Any) -> Iterator[torch.Tensor]:
    """Constants of a 4-bit weight of bitsandbytes."""
    while state is not None:
        yield from _tensors([state.absmax, state.code, state.offset])
        state = state.state2


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def watch_gradients(ledger: Ledger, engine: Any, *, sharded: bool) -> None:
    """Label gradients of parameters once they are accumulated.

    `sharded`: whether ZeRO 2 or 3 keeps shards only. It has put gradients into a bucket by then; that of the head's
    weights, too large for one, stays what the loss made, for a moment.
    """
    others = ("buckets", "logits") if sharded else ("buckets",)
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda own: ledger.relabel([own.grad], "grads", but=others))


def watch_modules(model: torch.nn.Module, tell: Callable[[str, str], None]) -> None:
    """Tell which module runs, forward or backward, and its path with the number of its layer left out."""
    lists = {
        name: [str(number) for number, layer in enumerate(layers) if next(layer.parameters(), None) is not None]
        for name, layers in layer_lists(model).items()
    }
    for path, module in model.named_modules():
        if path:
            _watch_module(module, path, _kind(path, lists), tell)


def _watch_module(module: torch.nn.Module, path: str, kind: str, tell: Callable[[str, str], None]) -> None:
    def enter(module: Any, inputs: Any) -> None:
        tell(path, kind)

    def back(gradient: torch.Tensor) -> None:
        tell(f"{path} (backward)", f"{kind} (backward)")

    def leave(module: Any, inputs: Any, outputs: Any) -> None:
        first = outputs[0] if isinstance(outputs, tuple) and outputs else outputs
        if isinstance(first, torch.Tensor) and first.grad_fn is not None:
            first.register_hook(back)  # type: ignore[no-untyped-call]

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def _kind(path: str, lists: Mapping[str, Sequence[str]]) -> str:
    """`path` with `first`, `last` or `between` instead of the number of its layer.

    `lists`: numbers of the rank's layers by the name of their list; a stage may have none of an encoder's.
    """
    name = next((name for name, own in lists.items() if own and path.startswith(f"{name}.")), None)
    if name is None:
        return path
    number, _, rest = path.removeprefix(f"{name}.").partition(".")
    place = {lists[name][0]: "first", lists[name][-1]: "last"}.get(number, "between")
    return f"{name}.{place}.{rest}"


def kinds_of_layers(section: Model) -> list[Any]:
    """What each layer looks like: parameters, type of attention, window. Those of an encoder come first."""
    found = []
    for layer in itertools.chain.from_iterable(layer_lists(skeleton(section)).values()):
        shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
        marks = tuple(
            (key, str(value))
            for module in layer.modules()
            for key, value in vars(module).items()
            if key in ("attention_type", "layer_type", "sliding_window", "is_sliding")
        )
        found.append((shapes, marks))
    return found
