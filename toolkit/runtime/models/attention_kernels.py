"""Kernels of attention inside documents: none of them holds a tensor with two dimensions of the sequence length.

Every kernel takes queries, keys and values of all rows as (tokens, heads, width) and the document bounds. GPU kernels
compute all documents in one launch; elsewhere torch's SDPA runs once per run of documents of the same length.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from toolkit.runtime.models.documents import Documents

BLOCK = 128
"""Queries per block where a mask is unavoidable: a mask then has 128 rows, not one per token."""
HALF = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
"""Widest head of the flash kernels."""


@dataclass(frozen=True, eq=False)
class Request:
    """What a layer asks of its attention."""

    causal: bool = True
    window: int | None = None
    """Number of keys that a query sees, itself included; None: all."""
    scale: float | None = None
    dropout: float = 0.0
    softcap: float | None = None
    """Scores become softcap × tanh(score / softcap)."""
    sinks: torch.Tensor | None = None
    """One more score per head, which takes probability and has no value."""

    @property
    def plain(self) -> bool:
        """Whether SDPA can compute the scores."""
        return self.softcap is None and self.sinks is None

    @property
    def sides(self) -> tuple[int, int]:
        """Keys before and after each query that it sees, as flash kernels count them; -1: all."""
        return -1 if self.window is None else self.window - 1, 0 if self.causal else -1


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Documents, Request], torch.Tensor]
"""(queries, keys, values: tokens × heads × width; documents; request) → outputs: tokens × heads × width."""


def by_document(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, ask: Request
) -> torch.Tensor:
    """SDPA inside each document; neighbours of the same length are one batch. Exact on every device and type."""
    if _is_for_host_kernel(query, key, value, documents, ask):
        return _HostDocuments.apply(query, key, value, documents.runs, ask)  # type: ignore[no-any-return, no-untyped-call]
    sizes = [count * length for count, length in documents.runs]
    parts = (torch.split(tensor, sizes) for tensor in (query, key, value))
    return torch.cat([_run(q, k, v, run, ask) for run, q, k, v in zip(documents.runs, *parts, strict=True)])


def _is_for_host_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, ask: Request
) -> bool:
    """Whether torch's flash kernel for CPUs can compute every document: the choice that SDPA itself would make."""
    windowed = ask.window is not None and not (ask.causal and documents.longest <= ask.window)
    fits = ask.plain and not windowed and not ask.dropout and query.shape[-1] == value.shape[-1]
    return fits and query.device.type == "cpu" and all(t.stride(-1) == 1 for t in (query, key, value))


class _HostDocuments(torch.autograd.Function):
    """torch's flash kernel for CPUs, once per run of documents: one node of the autograd graph, not ten per run.

    The kernel is the one that SDPA calls on a CPU in torch 2.13, so results are the same, bit for bit.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        runs: list[tuple[int, int]],
        ask: Request,
    ) -> torch.Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        parts = zip(*(_cut(tensor, runs) for tensor in (query, key, value)), strict=True)
        found = [kernel(*part, 0.0, ask.causal, scale=ask.scale) for part in parts]
        output = torch.cat([out.transpose(1, 2).flatten(0, 1) for out, _ in found])
        ctx.runs, ctx.ask = runs, ask
        ctx.save_for_backward(query, key, value, output, *(spread for _, spread in found))
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        query, key, value, output, *spreads = ctx.saved_tensors
        cut = (_cut(tensor, ctx.runs) for tensor in (gradient.contiguous(), query, key, value, output))
        parts = zip(*cut, spreads, strict=True)
        found = [kernel(*part, 0.0, ctx.ask.causal, scale=ctx.ask.scale) for part in parts]
        joined = (torch.cat([each.transpose(1, 2).flatten(0, 1) for each in same]) for same in zip(*found, strict=True))
        return *joined, None, None


def _cut(tokens: torch.Tensor, runs: list[tuple[int, int]]) -> list[torch.Tensor]:
    """(tokens, heads, width) → each run of documents as a batch."""
    parts = torch.split(tokens, [count * length for count, length in runs])
    return [_batched(part, run) for part, run in zip(parts, runs, strict=True)]


def _run(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, run: tuple[int, int], ask: Request
) -> torch.Tensor:
    """Attention inside neighbouring documents of one length, as one batch."""
    inside = _inside(_batched(query, run), _batched(key, run), _batched(value, run), ask)
    return inside.transpose(1, 2).flatten(0, 1)


def _batched(tokens: torch.Tensor, run: tuple[int, int]) -> torch.Tensor:
    """(tokens, heads, width) → (documents, heads, tokens of a document, width)."""
    return tokens.view(*run, *tokens.shape[1:]).transpose(1, 2)


def _inside(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ask: Request) -> torch.Tensor:
    """Attention over documents of one length: (documents, heads, tokens, width)."""
    length = query.shape[2]
    grouped = key.shape[1] != query.shape[1]
    if ask.plain and (ask.window is None or (ask.causal and length <= ask.window)):
        return scaled_dot_product_attention(
            query, key, value, dropout_p=ask.dropout, is_causal=ask.causal, scale=ask.scale, enable_gqa=grouped
        )
    if grouped:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    blocks = []
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        low = max(0, start - ask.window + 1) if ask.window else 0
        high = end if ask.causal else length
        mask = _allowed(range(start, end), range(low, high), ask, query.device)
        parts = query[:, :, start:end], key[:, :, low:high], value[:, :, low:high]
        if ask.plain:
            blocks.append(scaled_dot_product_attention(*parts, attn_mask=mask, dropout_p=ask.dropout, scale=ask.scale))
        else:
            # Recomputed in the backward pass: the scores of all blocks together would be all pairs of tokens.
            blocks.append(checkpoint(_scored, *parts, mask, ask.sinks, ask, use_reentrant=False))
    return torch.cat(blocks, 2)


def _allowed(queries: range, keys: range, ask: Request, device: torch.device) -> torch.Tensor:
    """Which keys each query of a block sees."""
    places = torch.arange(queries.start, queries.stop, device=device)[:, None]
    others = torch.arange(keys.start, keys.stop, device=device)[None, :]
    allowed = others <= places if ask.causal else torch.ones_like(others <= places)
    return allowed if ask.window is None else allowed & (others > places - ask.window)


def _scored(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor | None,
    ask: Request,
) -> torch.Tensor:
    """Attention of a block of queries with its scores written out: for soft caps and sinks."""
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if ask.scale is None else ask.scale)
    if ask.softcap is not None:
        scores = torch.tanh(scores / ask.softcap) * ask.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, column.to(scores.dtype)], -1)
    exact = torch.float32 if scores.dtype in HALF else scores.dtype
    chances = torch.softmax(scores, -1, dtype=exact).to(value.dtype)[..., : key.shape[2]]
    return torch.nn.functional.dropout(chances, ask.dropout) @ value


def by_mask(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, ask: Request
) -> torch.Tensor:
    """Attention with a mask over all pairs, with soft caps and sinks: for generation, which has no documents."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if mask is None:  # transformers leaves out causal masks, and those of a single query, which sees all keys
        first = key.shape[2] - query.shape[2] if query.shape[2] == 1 else 0
        mask = _allowed(range(first, first + query.shape[2]), range(key.shape[2]), ask, query.device)
    return _scored(query, key, value, mask, ask.sinks, ask).transpose(1, 2).contiguous()


def torch_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, ask: Request
) -> torch.Tensor:
    """torch's flash kernel of variable length: all documents in one launch, key heads not repeated."""
    grouped = key.shape[1] != query.shape[1]
    bounds, longest = documents.bounds, documents.longest
    return varlen_attn(  # type: ignore[return-value]
        query, key, value, bounds, bounds, longest, longest, scale=ask.scale, window_size=ask.sides, enable_gqa=grouped
    )


def flash_attention_2(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, ask: Request
) -> torch.Tensor:
    """The kernel of the package flash-attn."""
    bounds, longest = documents.bounds, documents.longest
    output: torch.Tensor = _package("flash_attn")(
        *(query, key, value, bounds, bounds, longest, longest),
        dropout_p=ask.dropout,
        softmax_scale=ask.scale,
        causal=ask.causal,
        window_size=ask.sides if ask.window else (-1, -1),
        softcap=ask.softcap or 0.0,
    )
    return output


def flash_attention_3(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, ask: Request
) -> torch.Tensor:
    """The kernel of flash-attn 3 (package flash_attn_interface), for Hopper GPUs."""
    bounds, longest = documents.bounds, documents.longest
    output: Any = _package("flash_attn_interface")(
        *(query, key, value, bounds, bounds, longest, longest),
        softmax_scale=ask.scale,
        causal=ask.causal,
        window_size=ask.sides if ask.window else (-1, -1),
        softcap=ask.softcap or 0.0,
    )
    # Betas of flash-attn 3 return (output, log-sum-exp).
    first: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return first


@functools.cache
def _package(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = importlib.import_module(name).flash_attn_varlen_func
    return found


def attend(
    choice: Choice, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, ask: Request
) -> torch.Tensor:
    """Attention inside documents: (rows, heads, tokens, width) → (rows, tokens, heads, width)."""
    rows, width = query.shape[0], value.shape[-1]
    if width < query.shape[-1]:
        # Kernels take one width for all three; SDPA's math kernel, which takes any, would hold all scores.
        value = pad(value, (0, query.shape[-1] - width))
    kernel = by_document if choice.why_not(query, ask) else choice.kernel
    if kernel is by_document and documents.runs == [(rows, query.shape[2])]:  # plain rows: nothing to split and join
        return _inside(query, key, value, ask).transpose(1, 2)[..., :width]
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    if (branches := documents.branches) is None:
        output = kernel(q, k, v, documents, ask)
    else:
        q, k, v = (branches.complete(tensor) for tensor in (q, k, v))
        output = branches.once(kernel(q, k, v, branches.documents, ask))
    return output.view(rows, -1, *output.shape[1:])[..., :width]


@dataclass(frozen=True)
class Choice:
    """A kernel and what it can't do."""

    kernel: Kernel
    package: str | None = None
    """Package that must be installed."""
    needs_gpu: bool = True
    dropout: bool = False
    softcap: bool = False

    def why_not(self, query: torch.Tensor, ask: Request) -> str:
        """Why this kernel can't take a call; empty if it can."""
        if not self.needs_gpu:
            return ""
        if query.dtype not in HALF:
            return f"flash kernels take bf16 and fp16, not {str(query.dtype).removeprefix('torch.')}"
        if query.shape[-1] > LARGEST_HEAD or query.shape[-1] % 8:
            return f"flash kernels do not take heads of width {query.shape[-1]}"
        lacking = {
            "dropout": ask.dropout > 0 and not self.dropout,
            "a soft cap": ask.softcap is not None and not self.softcap,
            "sinks": ask.sinks is not None,
        }
        return ", ".join(f"the kernel has no {name.removeprefix('a ')}" for name, true in lacking.items() if true)


CHOICES = {
    "by_document": Choice(by_document, needs_gpu=False),
    "varlen": Choice(torch_varlen),
    "flash_attention_2": Choice(flash_attention_2, package="flash_attn", dropout=True, softcap=True),
    "flash_attention_3": Choice(flash_attention_3, package="flash_attn_interface", softcap=True),
}
"""Kernels by name."""
