"""Sections of the recipe on gradients and batches: how replicas add up, and how a batch grows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from toolkit.errors import Problem
from toolkit.schema import number


@dataclass(frozen=True, kw_only=True)
class Reduce:
    """How the gradients of replicas are added up. What a plan would not use is refused."""

    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Type on the wire; default: `model.precision`. A narrower one than that rounds: the result differs a little."""
    bucket_elements: int | None = number(None, least=1)
    """Elements that are reduced at a time; default: one rank's share of the model, at most 200 million."""
    scaling: Literal["pre", "post"] | None = None
    """Divide by the replicas before or after the sum; for ZeRO 0, `post` by default. ZeRO always divides before."""
    predivide: float | None = number(None, above=0)
    """With `post`: part of the division that comes before the sum, so that 16 bits do not overflow; default 1."""
    overlap: bool | None = None
    """Whether buckets travel beside the backward pass; default: with ZeRO on accelerators."""
    algorithm: Literal["auto", "ring", "tree", "hierarchical"] = "auto"
    """`ring`, `tree`: NCCL's; `hierarchical`: inside each host first, then shards between hosts (ZeRO 0)."""


def reduce_faults(section: Reduce) -> Iterator[Problem]:
    """What can't be whatever the plan."""
    if section.predivide is not None and section.scaling == "pre":
        yield Problem(
            "train.reduce.predivide", "unused with scaling pre, which divides by everything before; remove it"
        )
