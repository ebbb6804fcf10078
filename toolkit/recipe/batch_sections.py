"""Sections of the recipe on gradients and batches: how replicas add up, how a batch grows, how islands meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from toolkit.errors import Problem
from toolkit.recipe.schema import number


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


@dataclass(frozen=True, kw_only=True)
class BatchRamp:
    """A global batch that starts small and doubles: small batches learn more from each token early on."""

    start: int = number(least=1)
    """Sequences of the first steps: `global_batch` halved once or more often."""
    stage_steps: int = number(least=1)
    """Steps at each size before the batch doubles."""


def one_bit_faults(
    optimizer: str, freeze_steps: int | None, grad_clip: float, strategy: str, zero_stage: int | None
) -> Iterator[Problem]:
    """What compression can't do without, and can't do."""
    if optimizer != "onebit_adam":
        if freeze_steps is not None:
            yield Problem("train.freeze_steps", f"unused with optimizer {optimizer}; remove it, or use onebit_adam")
        return
    if freeze_steps is None:
        yield Problem("train.freeze_steps", "required with onebit_adam: steps of plain Adam before it compresses")
    if grad_clip:
        what = f"{grad_clip:g} given; under onebit_adam no rank has the whole gradient to clip: use 0"
        yield Problem("train.grad_clip", what)
    if strategy not in ("auto", "data_parallel") or zero_stage:
        key, given = ("strategy.zero_stage", zero_stage) if zero_stage else ("strategy.name", strategy)
        what = f"{given} given; onebit_adam averages compressed momentum between whole replicas: use data_parallel"
        yield Problem(key, what)


def ramp_faults(ramp: BatchRamp | None, global_batch: int) -> Iterator[Problem]:
    """A ramp that does not arrive at the global batch."""
    if ramp is None:
        return
    times, rest = divmod(global_batch, ramp.start)
    if rest or times < 2 or times & (times - 1):
        sizes, half = [], global_batch
        while half % 2 == 0:
            half //= 2
            sizes.append(str(half))
        what = f"{ramp.start} given; doubling must lead to global_batch {global_batch}"
        yield Problem("train.batch_ramp.start", f"{what}; use {' or '.join(sizes) or 'an even global_batch'}")


def reduce_faults(section: Reduce) -> Iterator[Problem]:
    """What can't be whatever the plan."""
    if section.predivide is not None and section.scaling == "pre":
        yield Problem(
            "train.reduce.predivide", "unused with scaling pre, which divides by everything before; remove it"
        )


@dataclass(frozen=True, kw_only=True)
class Outer:
    """How islands of `local_sgd` come together after `local_steps` steps."""

    optimizer: Literal["average", "nesterov"] = "average"
    """`average`: every island goes on from the mean (local SGD); `nesterov`: the mean change is a gradient (DiLoCo)."""
    lr: float = number(0.7, above=0)
    """Outer learning rate of `nesterov`."""
    momentum: float = number(0.9, least=0, most=1)
    """Outer momentum of `nesterov`."""
    mode: Literal["wait", "overlap", "async"] = "wait"
    """`overlap`: islands train on while they exchange, and the mean counts late; `async`: nobody ever waits."""
    delay_steps: int | None = number(None, least=1)
    """`overlap`: steps after which a round's mean counts; the fewer, the nearer to synchronous training, but from the
    first that is too few for the link islands wait for it; default: `local_steps`, a round."""
    bits: Literal[32, 8, 4] = 32
    """Of a number on the link; 8 and 4 keep what rounding takes and send it later (error feedback)."""
    max_staleness: int = number(8, least=1)
    """`async`: how many rounds of others an island may miss before they wait for it."""


def outer_faults(outer: Outer | None) -> Iterator[Problem]:
    """What can't be whatever the plan."""
    if outer is not None and outer.delay_steps is not None and outer.mode != "overlap":
        yield Problem("train.outer.delay_steps", f"unused with mode {outer.mode}; remove it, or use mode overlap")
