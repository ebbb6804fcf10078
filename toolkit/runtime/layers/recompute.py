"""What layers recompute in the backward pass: nothing but element-wise work, everything, or everything from the host.

`selective` keeps the outputs of matrix products and attention: they take most of the time and the smaller half of the
bytes. `full` keeps a layer's input. `offload` keeps it in host memory. All go through transformers' own switch for
gradient checkpointing, so a layer is whatever the model calls one.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    _RECOMPUTE,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from toolkit.runtime.layers.remembered import with_notes

PRODUCTS = ("aten::mm", "aten::addmm", "aten::_grouped_mm", "aten::_scaled_mm", "bitsandbytes::gemv_4bit")
"""Matrix products of linear layers and experts. Batched ones are left out: they are the scores of eager attention."""
ATTENTION = ("attention", "attn", "flash_fwd")
"""Parts of the names of fused attention kernels: torch's own, and those of flash-attn 2 and 3."""


def recompute_layers(model: Any, mode: str = "full", *, keeps_last: bool = False) -> None:
    """Make the layers of a model recompute in the way of a plan's `recompute`; `none` leaves the model as it is.

    `keeps_last`: selective layers keep the output of their last product, too. Under ZeRO 3 it would be computed again:
    DeepSpeed 0.19.8's linear layer saves its input after the product, and the repetition ends there.
    """
    if mode == "none":
        return
    contexts = functools.partial(selective_contexts, keeps_last) if mode == "selective" else noop_context_fn
    noted = functools.partial(with_notes, contexts)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": noted})
    if mode == "offload":
        run = functools.partial(_checkpoint_on_host, HostInputs())
        for module in model.modules():
            if "_gradient_checkpointing_func" in vars(module):
                module._gradient_checkpointing_func = run


def selective_contexts(keeps_last: bool) -> tuple[Any, Any]:
    """Contexts of the forward pass of a layer and of its repetition, for torch's `checkpoint`."""
    products = _Products(keeps_last)
    forward, again = create_selective_checkpoint_contexts(products.policy)  # type: ignore[no-untyped-call]
    again.storage = _Kept(again.storage)
    return _Pass(forward, products, repeats=False), _Pass(again, products, repeats=True)


class _Kept:
    """The kept outputs of a layer, as torch's context of the repetition looks them up; others are always recomputed.

    torch 2.13 expects the same operators in the repetition as in the forward pass. ZeRO 3 gathers parameters by hooks
    inside layers, at other places in the backward pass, and torch would refuse those operators.
    """

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def get(self, operator: Any) -> Any:
        """Entries of an operator, by the number of its call."""
        return self._storage.get(operator) if is_kept(_name(operator)) else _ALWAYS


class _Always:
    """Entries of an operator whose output is never kept."""

    def get(self, _number: int) -> Any:
        """Torch's mark for an output that is computed again."""
        return _RECOMPUTE


_ALWAYS = _Always()


class _Layer(threading.local):
    """The layer that runs in this thread, if it recomputes selectively."""

    products: _Products | None = None
    repeats = False


_layer = _Layer()


def note_sum(tensor: torch.Tensor) -> None:
    """A kept product of the running layer was summed over ranks, in place: what is kept is the sum."""
    if _layer.products is not None:
        _layer.products.sums.add(tensor.untyped_storage()._cdata)


def note_scattered() -> None:
    """The last product of the running layer was reduce-scattered: it is not kept, since only a share of it is used."""
    if _layer.products is not None and _layer.products.last is not None:
        _layer.products.dropped.append(_layer.products.last)


def kept_result(compute: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """The result of many operators, of which a layer that recomputes selectively keeps nothing but the result."""
    products = _layer.products
    if products is None:
        return compute()
    if _layer.repeats:
        return products.results.pop(0)
    products.keeps = False
    try:
        found = compute()
    finally:
        products.keeps = True
    products.results.append(tuple(tensor.detach() for tensor in found))
    return found


def is_summed(tensor: torch.Tensor) -> bool:
    """Whether a layer is repeated and this product is already the sum over ranks: it must not be summed again."""
    products = _layer.products
    return products is not None and _layer.repeats and tensor.untyped_storage()._cdata in products.sums


def keeps_products() -> bool:
    """Whether the running layer keeps its products, so that a sum in place must not look like a change of them."""
    return _layer.products is not None


class _Products:
    """Decides for each operator of one forward pass of a layer whether its output is kept."""

    def __init__(self, keeps_last: bool) -> None:
        self.keeps_last = keeps_last
        self.calls: dict[Any, int] = {}
        self.sums: set[int] = set()
        """Storages of kept products that were summed over ranks."""
        self.keeps = True
        """Whether outputs of operators are kept; a `kept_result` is kept as a whole."""
        self.results: list[tuple[torch.Tensor, ...]] = []
        self.dropped: list[tuple[Any, int]] = []
        """Products that are computed again."""
        self.last: tuple[Any, int] | None = None
        """The last product and how many calls of its operator came before it."""

    def policy(self, _context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        """Keep what is expensive to compute. torch calls this after every operator of the forward pass."""
        number = self.calls[operator] = self.calls.get(operator, -1) + 1
        name = _name(operator)
        if name in PRODUCTS:
            self.last = operator, number
        keeps = self.keeps and is_kept(name)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _name(operator: Any) -> str:
    """`aten::mm` of an operator of torch; the plain name of a higher-order one, as of flex attention."""
    is_plain = isinstance(operator, torch._ops.OpOverload)
    return operator.name().split(".")[0] if is_plain else str(operator)


@functools.cache
def is_kept(name: str) -> bool:
    """Whether an operator is a matrix product or the forward pass of a fused attention kernel."""
    return name in PRODUCTS or ("::" in name and any(part in name for part in ATTENTION) and "backward" not in name)


class _Pass:
    """A pass of a layer: enters torch's context and marks the layer as the one that runs in this thread.

    At the end of the forward pass some outputs are let go, to be computed again where they are needed: that of the
    layer's last product, which nothing in its backward pass reads (the repetition ends where it begins), and those that
    the layer has changed in place since (gpt-oss adds biases so), which torch refuses to use. torch 2.13 has no public
    way to take an entry back; if `storage` is renamed `tests/runtime/layers/test_recompute.py` fails.
    """

    def __init__(self, inner: Any, products: _Products, *, repeats: bool) -> None:
        self._inner, self._products, self._repeats = inner, products, repeats
        self._before: tuple[_Products | None, bool] = (None, False)

    def __enter__(self) -> None:
        self._before = _layer.products, _layer.repeats
        _layer.products, _layer.repeats = self._products, self._repeats
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        _layer.products, _layer.repeats = self._before
        if not self._repeats and error[0] is None:
            self._let_go()
        return self._inner.__exit__(*error)

    def _let_go(self) -> None:
        storage, last = self._inner.storage, self._products.last
        for operator, number in self._products.dropped:
            storage[operator][number] = _RECOMPUTE
        if last is not None and not self._products.keeps_last:
            storage[last[0]][last[1]] = _RECOMPUTE
        for entries in storage.values():
            changed = [place for place, entry in entries.items() if entry is not _RECOMPUTE and _is_changed(entry)]
            entries.update(dict.fromkeys(changed, _RECOMPUTE))


def _is_changed(entry: Any) -> bool:
    """Whether one of the tensors that an operator gave was changed in place afterwards."""
    kept = [one for one in tree_leaves(entry) if isinstance(one.val, torch.Tensor)]
    return any(one.val._version != one.version for one in kept)


class HostInputs:
    """Layer inputs in pinned host memory; copies run on a stream of their own.

    An input leaves while its layer computes. When a layer fetches its input, that of the layer before it starts to come
    back, so that it arrives while this layer is recomputed. On a CPU both are plain copies.
    """

    def __init__(self) -> None:
        make = get_accelerator().Stream  # None on a CPU
        self._stream = None if make is None else make()
        self._newest: weakref.ref[_Parked] | None = None

    def pack(self, tensor: torch.Tensor) -> Any:
        """Move a layer's hidden states to the host; other arguments, which layers share, stay."""
        if not (tensor.requires_grad and tensor.is_floating_point()):
            return tensor
        parked = _Parked(self._stream, tensor.detach(), self._newest)
        self._newest = weakref.ref(parked)
        return parked

    def unpack(self, kept: Any) -> torch.Tensor:
        """Bring hidden states back, and start with those of the layer before."""
        return kept.take() if isinstance(kept, _Parked) else kept


class _Parked:
    """One layer's input while it is on the host."""

    def __init__(self, stream: Any, tensor: torch.Tensor, before: weakref.ref[_Parked] | None) -> None:
        self._stream, self._before, self._place = stream, before, tensor.device
        self._fetched: torch.Tensor | None = None
        self._arrived: Any = None
        if stream is None:
            self._host: torch.Tensor | None = tensor.clone()
            return
        stream.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(stream):
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)

    def fetch(self) -> None:
        """Start to copy the tensor back, unless that has begun or is done."""
        if self._fetched is not None or self._host is None:
            return
        if self._stream is None:
            self._fetched = self._host
            return
        with get_accelerator().stream(self._stream):
            self._fetched = self._host.to(self._place, non_blocking=True)
            self._arrived = get_accelerator().Event()
            self._arrived.record(self._stream)

    def take(self) -> torch.Tensor:
        """The tensor on its device; the host's copy is freed."""
        self.fetch()
        found, self._fetched = self._fetched, None
        assert found is not None
        if self._arrived is not None:
            now = get_accelerator().current_stream()
            now.wait_event(self._arrived)
            found.record_stream(now)
        self._host = None
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch()
        return found


def _checkpoint_on_host(inputs: HostInputs, function: Callable[..., Any], *args: Any) -> Any:
    """Run a layer; only its input is kept, in host memory."""
    with saved_tensors_hooks(inputs.pack, inputs.unpack):
        return checkpoint(
            function, *args, use_reentrant=False, context_fn=functools.partial(with_notes, noop_context_fn)
        )
