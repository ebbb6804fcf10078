"""How one module computes in shards. Each style replaces parameters by slices and wraps the module's own forward.

Slices are plain local tensors, because DeepSpeed 0.19.8's optimizers do not accept DTensors: DeepSpeed and ZeRO see
ordinary, smaller parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from toolkit.runtime.layers.later_gradients import AT_ONCE, Later, later_linear
from toolkit.runtime.models.parameter_shards import Layout, layout_of, mark_partial, mark_shard, shares, sites
from toolkit.runtime.sharding.collectives import TensorGroup, copy_in, cut_in, join_out, sum_out, whole_weight
from toolkit.runtime.sharding.token_collectives import leave_tokens, linear_of_tokens

Forward = Callable[..., Any]


class Sharder:
    """Slices parameters of one model; a shared parameter is sliced once and stays shared."""

    def __init__(self, model: torch.nn.Module, group: TensorGroup) -> None:
        self.group = group
        self._sites = sites(model)
        self._whole = list(model.parameters())  # kept alive, so that no id is reused

    def cut(self, module: torch.nn.Module, key: str, dim: int, packs: int = 1) -> None:
        """Replace a parameter by this rank's slice in every module that holds it, unless absent or sliced already."""
        full = module._parameters.get(key)
        if full is None or layout_of(full) is not None:
            return
        layout = Layout(
            dim=dim % full.ndim,
            index=self.group.index,
            ranks=self.group.ranks,
            shape=tuple(full.shape),
            packs=packs,
        )
        piece = torch.nn.Parameter(layout.slice_of(full.detach()).clone(), requires_grad=full.requires_grad)
        mark_shard(piece, layout)
        for holder, name in self._sites[id(full)]:
            holder._parameters[name] = piece


def wrap(module: torch.nn.Module, forward: Callable[[Forward], Forward]) -> None:
    """Wrap a module's forward by changing its class to a subclass; names, hooks and isinstance() stay as they are."""
    base: Any = type(module)

    def wrapped(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(base.forward.__get__(self))(*args, **kwargs)

    changed = {"forward": wrapped, "__module__": base.__module__, "in_shards": True}
    module.__class__ = type(base.__name__, (base,), changed)


def is_wrapped(module: torch.nn.Module) -> bool:
    """Whether a style has been applied; a module with several names is visited several times."""
    return getattr(type(module), "in_shards", False)


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Full shape of a parameter, which may be sliced already if another module shares it."""
    layout = layout_of(parameter)
    return layout.shape if layout else tuple(parameter.shape)


def output_dim(module: torch.nn.Module) -> int:
    """The output dimension of a linear's weight."""
    return 1 if isinstance(module, Conv1D) else 0


def _as_linear(module: Any) -> torch.Tensor:
    """The weight of a linear with outputs first."""
    return module.weight.t() if isinstance(module, Conv1D) else module.weight  # type: ignore[no-any-return]


def compute_on_shares(module: torch.nn.Module) -> None:
    """Make a sliced linear part of a region between shares of tokens.

    Its input's gradient stays a partial sum until the region is left, and a row matrix gives a share of its output.
    """
    module.on_token_shares = True  # type: ignore[assignment]


def _is_on_shares(module: torch.nn.Module) -> bool:
    return getattr(module, "on_token_shares", False)


def put_off_weights(module: torch.nn.Module, later: Later) -> None:
    """Let a sliced linear compute the gradient of its weight when `later` says so."""
    module.weights_later = later  # type: ignore[assignment]


def _later(module: torch.nn.Module) -> Later:
    return getattr(module, "weights_later", AT_ONCE)


def reader_of_shares(module: Any) -> Callable[[Forward], Forward]:
    """How a complete linear computes inside such a region: it keeps a share of its input."""
    return lambda inner: lambda x: linear_of_tokens(x, module.weight, module.bias, _later(module))


def columns(module: Any, sharder: Sharder, *, gather: bool = False, packs: int = 1) -> None:
    """Each rank computes a slice of the output; `gather` all-gathers the output."""
    group, size = sharder.group, whole_shape(module.weight)[output_dim(module)]
    sharder.cut(module, "weight", output_dim(module), packs)
    sharder.cut(module, "bias", 0, packs)
    if isinstance(module, Conv1D):
        module.nf = module.weight.shape[1]
    plain = type(module).forward is torch.nn.Linear.forward

    def forward(inner: Forward) -> Forward:
        def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if _is_on_shares(module):
                known = plain or isinstance(module, Conv1D)
                if known:
                    return linear_of_tokens(x, _as_linear(module), module.bias, _later(module))
                inside: torch.Tensor = inner(x, *args, **kwargs)
                return inside
            if plain:
                y = group.linear(x, module.weight, module.bias, _later(module))
            else:
                y = inner(group.enter(x), *args, **kwargs)
            return join_out(y, size, group) if gather else y

        return run

    wrap(module, forward)


def beside_columns(module: Any, sharder: Sharder, *, gather: bool = False, packs: int = 1) -> None:
    """The second matrix of an adapter beside a linear that is sliced by columns, sliced alike.

    The gradient of what lies between the adapter's matrices, as wide as the adapter's rank, is summed over ranks. So
    the first matrix, which every rank holds, has its complete gradient everywhere.
    """
    group, size = sharder.group, whole_shape(module.weight)[0]
    sharder.cut(module, "weight", 0, packs)
    sharder.cut(module, "bias", 0, packs)

    def forward(inner: Forward) -> Forward:
        def run(x: torch.Tensor) -> torch.Tensor:
            y = inner(x if _is_on_shares(module) else copy_in(x, group))
            return join_out(y, size, group) if gather else y

        return run

    wrap(module, forward)


def cut_factors(adapter: Any, sharder: Sharder, *, outputs: bool, packs: int) -> None:
    """The factors of a LoRA adapter that is added to a sliced tensor of experts: one is sliced alike.

    The other one is on every rank, which computes the part of its gradient that comes from its slice.
    """
    for first, second in zip(adapter.lora_A.values(), adapter.lora_B.values(), strict=True):
        if outputs:
            sharder.cut(second, "weight", 0, packs)
            mark_partial(first.weight)
        else:
            sharder.cut(first, "weight", 1)
            mark_partial(second.weight)


def rows(module: Any, sharder: Sharder, *, split: bool = False) -> None:
    """Each rank uses a slice of the input; partial outputs are summed. `split`: the input is replicated."""
    group = sharder.group
    sharder.cut(module, "weight", 1 - output_dim(module))

    def forward(inner: Forward) -> Forward:
        def run(x: torch.Tensor) -> torch.Tensor:
            y = later_linear(cut_in(x, group) if split else x, _as_linear(module), None, _later(module))
            y = leave_tokens(y, group) if _is_on_shares(module) else sum_out(y, group, in_place=True)
            return y if module.bias is None else y + module.bias  # once, after the sum

        return run

    wrap(module, forward)


def vocabulary(module: torch.nn.Embedding, sharder: Sharder) -> None:
    """Each rank holds a range of the vocabulary; rows of other ranks are zeros before the sum."""
    group = sharder.group
    sizes = shares(whole_shape(module.weight)[0], group.ranks)
    start = sum(sizes[: group.index])
    end = start + sizes[group.index]
    sharder.cut(module, "weight", 0)
    if module.padding_idx is not None:
        module.padding_idx = module.padding_idx - start if start <= module.padding_idx < end else None

    def forward(inner: Forward) -> Forward:
        def run(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            foreign = (ids < start) | (ids >= end)
            found = inner((ids - start).masked_fill(foreign, 0), *args, **kwargs)
            return sum_out(found.masked_fill(foreign.unsqueeze(-1), 0.0), group, in_place=True)

        return run

    wrap(module, forward)


def region(module: torch.nn.Module, sharder: Sharder) -> None:
    """A module with sliced parameters: floating-point inputs are replicated, outputs are summed."""
    group = sharder.group

    def enter(value: Any) -> Any:
        return copy_in(value, group) if torch.is_tensor(value) and value.is_floating_point() else value

    def forward(inner: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            return sum_out(inner(*map(enter, args), **{key: enter(value) for key, value in kwargs.items()}), group)

        return run

    wrap(module, forward)


def summed(module: torch.nn.Module, sharder: Sharder) -> None:
    """A module that returns a partial result, because a module before it is sharded: its output is summed."""
    group = sharder.group
    wrap(module, lambda inner: lambda *args, **kwargs: sum_out(inner(*args, **kwargs), group))


def latent_keys(module: torch.nn.Module, sharder: Sharder, rope: int) -> None:
    """Down-projection of latent attention: its rope part enters all heads, which are sharded, directly."""
    group = sharder.group

    def forward(inner: Forward) -> Forward:
        def run(x: torch.Tensor) -> torch.Tensor:
            y = inner(x)
            latent, shared = y.split([y.shape[-1] - rope, rope], -1)
            return torch.cat([latent, copy_in(shared, group)], -1)

        return run

    wrap(module, forward)


def partial(module: torch.nn.Module, sharder: Sharder) -> None:
    """Full parameters inside a sharded region: each rank computes a part of their gradient."""
    for parameter in module.parameters(recurse=False):
        mark_partial(parameter)


def stored(module: torch.nn.Module, sharder: Sharder) -> None:
    """Parameters stored in slices and gathered for the module's own forward: saves memory, not compute."""
    group, dims = sharder.group, {}
    for key, parameter in list(module._parameters.items()):
        dim = _divisible_dim(parameter, group.ranks)
        if dim is not None:
            sharder.cut(module, key, dim)
            dims[key] = dim

    def forward(inner: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            with _Gathered(module, dims, group):
                return inner(*args, **kwargs)

        return run

    wrap(module, forward)


class _Gathered:
    """Puts gathered weights in front of a module's slices, for one forward pass."""

    def __init__(self, module: torch.nn.Module, dims: Mapping[str, int], group: TensorGroup) -> None:
        self._module, self._dims, self._group = module, dims, group

    def __enter__(self) -> None:
        for key, dim in self._dims.items():
            piece = self._module._parameters[key]
            assert piece is not None
            self._module.__dict__[key] = whole_weight(piece, dim, self._group)

    def __exit__(self, *error: object) -> None:
        for key in self._dims:
            del self._module.__dict__[key]


def _divisible_dim(parameter: torch.nn.Parameter | None, ranks: int) -> int | None:
    if parameter is None:
        return None
    return next((dim for dim, size in enumerate(parameter.shape) if size >= ranks and size % ranks == 0), None)
