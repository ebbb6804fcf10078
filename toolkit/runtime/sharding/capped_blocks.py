"""Blocks of ring attention with capped scores, which torch's flash kernels lack: 128 queries at a time, in plain torch.

Scores become cap × tanh(score / cap). The backward pass computes them again from the log-sum-exp over all keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

QUERIES = 128
"""Queries per piece: scores have as many rows, not one per token."""


def forward(
    given: tuple[torch.Tensor, ...], scale: float, cap: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) of a block's (query, key, value); key heads may be fewer."""
    query, key, value = given
    outputs, sums = [], []
    for at, scores, _ in _pieces(query, key, scale, cap, causal=causal):
        lse = scores.logsumexp(-1)
        chances = (scores - lse[..., None]).exp_()
        outputs.append((chances @ _repeated(value[:, :, : at.stop] if causal else value, query)).to(query.dtype))
        sums.append(lse)
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def backward(
    given: tuple[torch.Tensor, ...], scale: float, cap: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of a block. `given`: gradient, query, key, value, and output and log-sum-exp over all keys."""
    gradient, query, key, value, output, lse = given
    wide = torch.promote_types(query.dtype, torch.float32)
    of_key, of_value = (torch.zeros(each.shape, dtype=wide, device=each.device) for each in (key, value))
    of_query = torch.empty(query.shape, dtype=wide, device=query.device)
    lost = (gradient.to(wide) * output.to(wide)).sum(-1, keepdim=True)
    for at, scores, slope in _pieces(query, key, scale, cap, causal=causal):
        seen = slice(0, at.stop if causal else None)
        slopes, chances = gradient[:, :, at].to(wide), (scores - lse[:, :, at, None]).exp_()
        of_value[:, :, seen] += _summed(chances.transpose(-1, -2) @ slopes, value)
        values = _repeated(value[:, :, seen].to(wide), query)
        of_scores = chances * (slopes @ values.transpose(-1, -2) - lost[:, :, at]) * slope * scale
        of_query[:, :, at] = of_scores @ _repeated(key[:, :, seen].to(wide), query)
        of_key[:, :, seen] += _summed(of_scores.transpose(-1, -2) @ query[:, :, at].to(wide), key)
    return of_query, of_key, of_value


def _pieces(
    query: torch.Tensor, key: torch.Tensor, scale: float, cap: float, *, causal: bool
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Places of some queries, their capped scores, and the slope of the cap there."""
    wide = torch.promote_types(query.dtype, torch.float32)
    for start in range(0, query.shape[2], QUERIES):
        at = slice(start, min(start + QUERIES, query.shape[2]))
        keys = _repeated(key[:, :, : at.stop] if causal else key, query).to(wide)
        share = torch.tanh(query[:, :, at].to(wide) @ keys.transpose(-1, -2) * (scale / cap))
        scores = share * cap
        if causal:
            later = (
                torch.arange(at.stop, device=query.device) > torch.arange(start, at.stop, device=query.device)[:, None]
            )
            scores = scores.masked_fill(later, float("-inf"))
        yield at, scores, 1 - share.square()


def _repeated(heads: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Key or value heads, one per query head."""
    return heads.repeat_interleave(query.shape[1] // heads.shape[1], 1)


def _summed(gradient: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Gradients of repeated heads, summed for each head that was repeated."""
    rows, several, *rest = gradient.shape
    return gradient.view(rows, heads.shape[1], several // heads.shape[1], *rest).sum(2)
