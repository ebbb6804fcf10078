"""Token shards between tensor-parallel regions (Megatron's sequence parallel), over the styles of tensor parallel.

Where the first decoder layer is entered each rank takes its share of the tokens; after the last one, and the norm that
follows it, the shares are gathered. In between, the children of a layer are of three kinds:

- *per token* (norms, activations, dropout): they run on the share, and gradients of their weights are summed.
- *fused*: tokens are gathered at the entrance, and row matrices reduce-scatter what they would sum.
- *wrapped*, which fits every block that is right in plain tensor parallel: tokens are gathered at the entrance, and of
  the output a rank keeps its share.

Masks, positions and rotary tables stay those of the whole sequence. The float64 proof finds types that this is wrong
for; they keep complete residuals.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from toolkit.runtime.models.build import SplitRefused, find_layers
from toolkit.runtime.models.parameter_shards import is_partial, layout_of, mark_partial
from toolkit.runtime.sharding import styles
from toolkit.runtime.sharding.collectives import TensorGroup
from toolkit.runtime.sharding.token_collectives import cut_tokens, enter_tokens, join_tokens

COLUMNS = ("colwise", "packed_colwise", "packed3_colwise")
NORM = "norm"
"""Part of the names of norms' classes."""
FUSED = {*COLUMNS, "rowwise", "replicated_with_grad_allreduce"}
"""Styles that a fused block may have."""


def share_tokens(
    model: PreTrainedModel, plan: Mapping[str, str], group: TensorGroup, owned: Callable[[str], bool]
) -> list[str]:
    """Make the sharded layers of a model hold their share of the tokens between blocks; return wrapped blocks' names.

    `plan`: style by name. `owned`: whether this rank holds a parameter.
    """
    name, layers = find_layers(model)
    names = {id(p): own for own, p in model.named_parameters()}
    blocks = _Blocks(dict(model.named_modules()), plan, group)
    for number, layer in enumerate(layers):
        if any(owned(names[id(parameter)]) for parameter in layer.parameters()):
            _sum_gradients(layer.parameters(recurse=False))
            for key, _ in layer.named_children():
                blocks.share(f"{name}.{number}.{key}")
    _enter_at(layers[0], group)
    norm = _final_norm(model.get_submodule(name.rpartition(".")[0]), layers)
    if norm is not None:
        _sum_gradients(norm.parameters())
    if norm is None:
        _leave_at(layers[-1], group, lambda: True)
    else:
        _leave_at(norm, group, _runs_of(layers[-1]))
    return blocks.wrapped


class _Blocks:
    """Decides how the children of layers compute on shares, and makes them do so."""

    def __init__(self, modules: dict[str, torch.nn.Module], plan: Mapping[str, str], group: TensorGroup) -> None:
        self._modules, self._plan, self._group = modules, plan, group
        self.wrapped: list[str] = []
        """Names of blocks that compute on all tokens, as in plain tensor parallel."""

    def share(self, name: str) -> None:
        """Make a child of a layer take shares and return shares."""
        block, own = self._modules[name], self._styles(name)
        if not own and all(parameter.dim() <= 1 for parameter in block.parameters()):
            _sum_gradients(block.parameters())
            return
        columns, rows = ({n for n, style in own.items() if style in kind} for kind in (COLUMNS, ("rowwise",)))
        others = self._others(block, own)
        in_pairs = bool(own) and set(own.values()) <= FUSED
        flat = all(parameter.dim() <= 1 for parameter in others)
        if in_pairs and (not others or (flat and not columns)):
            self._fuse(name, own)
            _sum_gradients(others)  # after the row matrix
        elif in_pairs and flat and not any(n.rpartition(".")[0] == name for n in columns | rows):
            _sum_gradients(block.parameters(recurse=False))
            for key, _ in block.named_children():  # a block of blocks, with a norm in one of them (BERT)
                self.share(f"{name}.{key}")
        elif bool(columns) != bool(rows):
            raise SplitRefused(f"{name} holds one half of a pair of matrices and can't compute on shares of tokens")
        else:
            _wrap(block, self._group)
            self.wrapped.append(name)

    def _styles(self, name: str) -> dict[str, str]:
        return {n: style for n, style in self._plan.items() if n == name or n.startswith(f"{name}.")}

    def _others(self, block: torch.nn.Module, own: Mapping[str, str]) -> list[torch.nn.Parameter]:
        """Complete parameters of a block that are not known to act on shares, or on slices of all tokens."""
        known = {id(p) for n, style in own.items() for p in self._known(n, style)}
        return [p for p in block.parameters() if layout_of(p) is None and not is_partial(p) and id(p) not in known]

    def _known(self, name: str, style: str) -> Iterator[torch.nn.Parameter]:
        """Complete parameters of a fused linear: a row matrix's bias, and one matrix of an adapter."""
        linear, adapters = _linear(self._modules.get(name))
        if linear is None:
            return
        if style == "rowwise" and getattr(linear, "bias", None) is not None:
            yield linear.bias  # type: ignore[misc]
        for adapter in adapters.get("lora_A" if style in COLUMNS else "lora_B", ()):
            yield from adapter.parameters()

    def _fuse(self, name: str, own: Mapping[str, str]) -> None:
        """Gather tokens at the entrance, if column matrices are inside; row matrices reduce-scatter."""
        for each, style in own.items():
            linear, adapters = _linear(self._modules.get(each))
            if linear is None or style not in (*COLUMNS, "rowwise"):
                continue
            for module in (linear, *adapters.get("lora_A", ()), *adapters.get("lora_B", ())):
                styles.compute_on_shares(module)
            for parameter in self._known(each, style):
                mark_partial(parameter)
            for adapter in adapters.get("lora_A", ()) if style in COLUMNS else ():
                styles.wrap(adapter, styles.reader_of_shares(adapter))
        if any(style in COLUMNS for style in own.values()):
            _enter(self._modules[name], self._group, least_dims=2 if name in own else 3)


def _final_norm(parent: torch.nn.Module, layers: torch.nn.ModuleList) -> torch.nn.Module | None:
    """The norm beside the layers that comes after them; its fp32 copies of all tokens would be the peak of a step.

    A norm of embeddings comes before them, wherever its name stands (BART).
    """
    after = [*itertools.dropwhile(lambda child: child[1] is not layers, parent.named_children())][1:]
    norms = [
        one for name, one in after
        if NORM in type(one).__name__.lower() and "emb" not in name and not list(one.children())
    ]  # fmt: skip
    return norms[0] if len(norms) == 1 else None


Adapters = dict[str, list[torch.nn.Module]]


def _linear(module: torch.nn.Module | None) -> tuple[torch.nn.Module | None, Adapters]:
    """The linear of a name, and the matrices of its LoRA adapters (peft 0.21)."""
    if module is None or "base_layer" not in module._modules:
        return module, {}
    adapters = {side: list(module._modules[side].children()) for side in ("lora_A", "lora_B")}  # type: ignore[union-attr]
    return module._modules["base_layer"], adapters


def _sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Each rank sees its tokens only, so gradients of these complete parameters are summed over the ranks."""
    for parameter in parameters:
        if layout_of(parameter) is None:
            mark_partial(parameter)


def _is_share(value: Any, tokens: int | None = None, least_dims: int = 3) -> bool:
    return (
        torch.is_tensor(value)
        and value.is_floating_point()
        and least_dims <= value.dim() <= 3
        and tokens in (None, value.shape[-2])
    )


def _enter(block: torch.nn.Module, group: TensorGroup, least_dims: int) -> None:
    """Gather the first argument of hidden states; a further one is a residual, which is added to the output."""

    def forward(inner: styles.Forward) -> styles.Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            given: list[Any] = [*args, *kwargs.values()]
            place = next(n for n, value in enumerate(given) if _is_share(value, least_dims=least_dims))
            given[place] = enter_tokens(given[place], group)
            return inner(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))

        return run

    styles.wrap(block, forward)


def _wrap(block: torch.nn.Module, group: TensorGroup) -> None:
    """Gather hidden states for a block that computes as in plain tensor parallel, and keep a share of its output."""

    def forward(inner: styles.Forward) -> styles.Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            own = next(value.shape[1] for value in (*args, *kwargs.values()) if _is_share(value))

            def gathered(value: Any) -> Any:
                return join_tokens(value, group) if _is_share(value, own) else value

            output = inner(*map(gathered, args), **{key: gathered(value) for key, value in kwargs.items()})
            whole = own * group.ranks
            return tree_map(lambda value: cut_tokens(value, group) if _is_share(value, whole) else value, output)

        return run

    styles.wrap(block, forward)


def _enter_at(layer: torch.nn.Module, group: TensorGroup) -> None:
    """Cut the hidden states that enter a layer, outside of what it recomputes."""

    def around(call: styles.Forward) -> styles.Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            given = [*args, *kwargs.values()]
            hidden = next((value for value in given if _is_share(value)), None)
            if hidden is None:
                raise SplitRefused("the first layer is called without hidden states of (batch, tokens, width)")
            share = cut_tokens(hidden, group)
            given = [share if value is hidden else value for value in given]
            return call(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))

        return run

    wrap_call(layer, around)


def _runs_of(layer: torch.nn.Module) -> Callable[[], bool]:
    """Whether a layer has run since the last time that this was asked: a norm may be used before the layers, too."""
    has_run = False

    def around(call: styles.Forward) -> styles.Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_run
            has_run = True
            return call(*args, **kwargs)

        return run

    def asked() -> bool:
        nonlocal has_run
        found, has_run = has_run, False
        return found

    wrap_call(layer, around)
    return asked


def _leave_at(module: torch.nn.Module, group: TensorGroup, has_shares: Callable[[], bool]) -> None:
    """Gather the hidden states that leave a module, if it is given shares."""

    def around(call: styles.Forward) -> styles.Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            output = call(*args, **kwargs)
            if not has_shares():
                return output
            own = next(value.shape[1] for value in (*args, *kwargs.values()) if _is_share(value))
            return tree_map(lambda value: join_tokens(value, group) if _is_share(value, own) else value, output)

        return run

    wrap_call(module, around)


def wrap_call(layer: torch.nn.Module, around: Callable[[styles.Forward], styles.Forward]) -> None:
    """Wrap `__call__`, which transformers' checkpointed layers override: what is around it is not recomputed.

    The class becomes a subclass; parameter names and isinstance() stay as they are.
    """
    base: Any = type(layer)

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(base.__call__.__get__(self))(*args, **kwargs)

    layer.__class__ = type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__})
