"""Operators that a ledger does not just run, above all those that read numbers: every place that may has an answer.

A number that is read decides a branch, so a wrong answer would rehearse another run: a 1 for DeepSpeed's overflow flag
skips every update, and optimizer states are never made. A read at an unknown place ends the rehearsal with its name.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor

from toolkit.runtime.rehearsal.fake_device import is_on_device, waits

aten = torch.ops.aten
SKIPPED = (
    "/torch/",
    "/deepspeed/comm/",
    "/deepspeed/utils/nvtx",
    "contextlib",
    "typing_extensions",
    "toolkit/runtime/rehearsal/",
)
LAYER_DROP = ("bart", "blenderbot", "blenderbot_small", "marian", "mbart", "mvp", "pegasus", "plbart")
"""Model types that draw for every layer whether to leave it out; a rehearsal runs all layers."""
KNOWN: dict[tuple[str, str], int | float | bool] = {
    ("deepspeed/runtime/pipe/engine.py", "__init__"): 1,
    ("deepspeed/runtime/utils.py", "clip_tensors_by_global_norm"): True,
    ("deepspeed/runtime/utils.py", "get_weight_norm"): 1.0,
    ("deepspeed/runtime/utils.py", "has_overflow"): 0,
    ("deepspeed/runtime/utils.py", "has_overflow_serial"): False,
    ("deepspeed/runtime/utils.py", "is_invalid_grad_norm"): 0,
    ("deepspeed/runtime/utils.py", "_has_inf_or_nan"): 0,
    ("deepspeed/runtime/zero/stage3.py", "complete_grad_norm_calculation_for_cpu_offload"): 1.0,
    ("deepspeed/runtime/zero/stage3.py", "has_overflow"): 0,
    ("deepspeed/runtime/zero/stage3.py", "_has_inf_or_nan"): 0,
    ("deepspeed/runtime/zero/stage_1_and_2.py", "has_overflow"): 0,
    ("deepspeed/runtime/zero/stage_1_and_2.py", "complete_grad_norm_calculation_for_cpu_offload"): 1.0,
    ("deepspeed/runtime/zero/stage_1_and_2.py", "_has_inf_or_nan"): 0,
    ("deepspeed/runtime/zero/stage_1_and_2.py", "update_offload_overflow_tracker"): False,
    ("toolkit/runtime/distributed/process_group.py", "total"): 1,
    ("toolkit/runtime/engine/gradient_norm.py", "clip_by_all"): 1.0,
    ("toolkit/runtime/engine/protocol.py", "__init__"): 1.0,
    ("toolkit/runtime/engine/protocol.py", "<dictcomp>"): 1.0,
    ("toolkit/runtime/engine/protocol.py", "_read"): 1.0,
    ("toolkit/runtime/engine/replica.py", "evaluate"): 1.0,
    ("toolkit/runtime/engine/training_state.py", "<listcomp>"): 1,
    ("toolkit/runtime/islands/engine.py", "evaluate"): 1.0,
    ("toolkit/runtime/mixtures/balance_loss.py", "routed_tokens"): 1,
    ("toolkit/runtime/models/head_loss.py", "_skips_prompts"): False,
    ("toolkit/runtime/models/micro_batch.py", "counted"): 1,
    ("toolkit/runtime/pipeline/boundaries.py", "<genexpr>"): False,
    ("toolkit/runtime/pipeline/engine.py", "evaluate"): 1,
    ("toolkit/runtime/sharding/shard_model.py", "<listcomp>"): False,
    ("toolkit/runtime/sharding/shard_model.py", "finish"): False,
    **{(f"transformers/models/{kind}/modeling_{kind}.py", "forward"): False for kind in LAYER_DROP},
    ("transformers/masking_utils.py", "_ignore_bidirectional_mask_sdpa"): False,
    ("transformers/masking_utils.py", "_ignore_causal_mask_sdpa"): False,
    ("transformers/masking_utils.py", "find_packed_sequence_indices"): False,
}
"""(end of the file's path, function) → the number that it gets."""


class UnknownRead(RuntimeError):
    """The host reads a number at a place without a known answer."""


def number(dtype: torch.dtype) -> int | float | bool:
    """The number for the code that reads now."""
    frame: Any = sys._getframe(1)
    while frame is not None and not _short(frame.f_code.co_filename):
        frame = frame.f_back
    path, function = _short(frame.f_code.co_filename), frame.f_code.co_name
    for (known, name), answer in KNOWN.items():
        if function == name and path.endswith(known):
            return answer
    raise UnknownRead(f"the host reads a number of type {dtype} in {path}:{frame.f_lineno} ({function})")


@functools.cache
def _short(path: str) -> str:
    """A file as it is shown; empty for files that are passed over."""
    if path[0] == "<" or any(part in path for part in SKIPPED):
        return ""
    short = path.split("site-packages/")[-1]
    return short[short.rfind("toolkit/") :] if "/toolkit/" in short else short


def call_site(depth: int = 1) -> str:
    """The nearest lines outside torch, DeepSpeed's communication layer and this package."""
    frame: Any = sys._getframe(1)
    found: list[str] = []
    while frame is not None and len(found) < depth:
        short = _short(frame.f_code.co_filename)
        if short:
            found.append(f"{short}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)


def answer_lists() -> None:
    """Let `tolist` of fake tensors give numbers."""

    def numbers(self: torch.Tensor) -> Any:
        if is_on_device(self):
            waits.notify("tolist")
        return _nested(tuple(self.shape), number(self.dtype))

    fake: Any = FakeTensor
    fake.tolist = numbers


def _nested(shape: tuple[int, ...], value: Any) -> Any:
    return [_nested(shape[1:], value) for _ in range(shape[0])] if shape else value


def answer_packed_question(packed: bool) -> None:
    """Whether rows hold several documents depends on numbers: answered from the recipe.

    transformers also takes fake tensors for tensors that are traced, and then always builds whole masks.
    """
    import transformers.utils.import_utils as imports

    from toolkit.runtime.models import attention

    imports.is_fake_tensor = lambda tensor: False
    find = attention._find_packed

    def answer(position_ids: torch.Tensor) -> torch.Tensor | None:
        if is_on_device(position_ids):
            waits.notify("packed rows?")
        return find(position_ids) if packed else None

    attention._find_packed = answer  # asked only where the bounds of documents are not known on the host


class Counts(Protocol):
    """What these operators tell a ledger."""

    def wait(self, kind: str) -> None:
        """The host waits for the device."""

    def copied(self, source: Any, target: str, blocking: bool) -> None:
        """A tensor is copied to a type of device."""

    def add_flops(self, count: int) -> None:
        """Floating-point operations."""


def _scalar(ledger: Counts, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if not isinstance(tensor, FakeTensor):
        return NotImplemented
    if is_on_device(tensor):
        ledger.wait("item")
    return tensor.constant.item() if tensor.constant is not None else number(tensor.dtype)


def _equal(ledger: Counts, args: Any, kwargs: Any) -> Any:
    if is_on_device(args[0]):
        ledger.wait("equal")
    return bool(number(torch.bool))


def _nonzero(ledger: Counts, args: Any, kwargs: Any) -> Any:
    """As many rows as there can be."""
    if is_on_device(args[0]):
        ledger.wait("nonzero")
    return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.long)


def _to_copy(ledger: Counts, args: Any, kwargs: Any) -> Any:
    if kwargs.get("device") is not None:
        ledger.copied(args[0], torch.device(kwargs["device"]).type, not kwargs.get("non_blocking"))
    return NotImplemented


def _copy(ledger: Counts, args: Any, kwargs: Any) -> Any:
    if isinstance(args[0], FakeTensor) and isinstance(args[1], torch.Tensor):
        waiting = not ((len(args) > 2 and args[2]) or kwargs.get("non_blocking"))
        ledger.copied(args[1], args[0].fake_device.type, waiting)
    return NotImplemented


def _grouped_product(ledger: Counts, args: Any, kwargs: Any) -> Any:
    """torch 2.13's shape function of grouped products refuses what is not bf16; its kernels do not."""
    left, right = args[:2]
    if left.dtype == torch.bfloat16:
        return NotImplemented
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    groups = (offsets.shape[0],) if left.dim() == right.dim() == 2 else left.shape[:-2] if right.dim() == 3 else ()
    ledger.add_flops(2 * left.numel() * right.shape[-1])
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]))


def _reduce_scatter_copies(args: Any) -> list[torch.Tensor]:
    """gloo (torch 2.13) sums a reduce-scatter in a copy of its input."""
    return [args[1].clone()]


def _promoted(args: Any) -> list[torch.Tensor]:
    """torch (2.13) copies operands to cast them to their common type, where CUDA's kernels cast elements."""
    common = torch.result_type(*args[:2])
    operands = (one for one in args[:2] if isinstance(one, torch.Tensor))
    return [torch.empty_like(one, dtype=common) for one in operands if one.dtype != common]


def _promoted_in_place(args: Any) -> list[torch.Tensor]:
    """Copies of an operator that writes into its first operand: a result of another type is one, too."""
    copies = _promoted(args)
    return copies if args[0].dtype == torch.result_type(*args[:2]) else [*copies, torch.empty_like(copies[0])]


def _attention_workspace(args: Any) -> list[torch.Tensor]:
    """torch 2.13's flash kernel for CPUs: scores of a block and their gradients per thread; rows of the gradient."""
    gradient, query, key = args[:3]
    tokens = query.shape[2]
    block = (256 if tokens >= 768 else 64 if tokens >= 192 else 32) * min(512, key.shape[2])
    scores = [query.new_empty(2 * torch.get_num_threads() * block, dtype=torch.float32)]
    if query.dtype != torch.float32:
        scores.append(torch.empty_like(scores[0], dtype=query.dtype))
    rows = gradient.transpose(1, 2)
    return scores if rows.is_contiguous() else [*scores, rows.contiguous()]


ARITHMETIC = (aten.add, aten.sub, aten.mul, aten.div)
ARITHMETIC_IN_PLACE = (aten.add_, aten.sub_, aten.mul_, aten.div_)
INSIDE = {
    **{operator.Tensor: _promoted for operator in ARITHMETIC},
    **{operator.Tensor: _promoted_in_place for operator in ARITHMETIC_IN_PLACE},
    torch.ops.c10d._reduce_scatter_base_.default: _reduce_scatter_copies,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_workspace,
}
"""Operators that allocate more than their results on a CPU."""
ANSWERS = {
    aten._local_scalar_dense.default: _scalar,
    aten.equal.default: _equal,
    aten.nonzero.default: _nonzero,
    aten._grouped_mm.default: _grouped_product,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
}
"""Operators whose result is a number that the host reads, that move bytes between host and device, or that torch
2.13 can't run on fake tensors."""
