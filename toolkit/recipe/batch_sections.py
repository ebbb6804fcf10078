"""Recipe sections on gradients and batches: gradient reduction, batch ramp, exchange between islands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from toolkit.errors import Problem
from toolkit.recipe.schema import number


@dataclass(frozen=True, kw_only=True)
class Reduce:
    """How gradients are reduced across replicas. A plan that would ignore a setting is refused."""

    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Data type on the wire; default: `model.precision`. A narrower type rounds, so losses differ slightly."""
    bucket_elements: int | None = number(None, least=1)
    """Elements per reduction bucket; default: one rank's share of the model, at most 200 million."""
    scaling: Literal["pre", "post"] | None = None
    """Divide by the number of replicas before or after the sum (ZeRO 0; default `post`). ZeRO 1 to 3 divide before."""
    predivide: float | None = number(None, above=0)
    """With `post`: divide by this factor before the sum already, so that 16-bit sums do not overflow; default 1."""
    overlap: bool | None = None
    """Whether buckets are reduced during the backward pass; default: true with ZeRO on accelerators."""
    algorithm: Literal["auto", "ring", "tree", "hierarchical"] = "auto"
    """`ring`, `tree`: NCCL algorithms; `hierarchical`: first inside each host, then shards between hosts (ZeRO 0)."""


@dataclass(frozen=True, kw_only=True)
class BatchRamp:
    """A global batch that starts small and doubles: early in training, small batches learn more per token."""

    start: int = number(least=1)
    """Sequences per step at the start: `global_batch` halved one or more times."""
    stage_steps: int = number(least=1)
    """Steps at each size before the batch doubles."""


def one_bit_problems(
    optimizer: str, freeze_steps: int | None, grad_clip: float, strategy: str, zero_stage: int | None
) -> Iterator[Problem]:
    """Missing, unused and conflicting settings of the 1-bit optimizer."""
    if optimizer != "onebit_adam":
        if freeze_steps is not None:
            yield Problem("train.freeze_steps", f"unused with optimizer {optimizer}; remove it, or use onebit_adam")
        return
    if freeze_steps is None:
        yield Problem("train.freeze_steps", "required with onebit_adam: steps of plain Adam before compression starts")
    if grad_clip:
        what = f"{grad_clip:g} given; under onebit_adam no rank has the full gradient to clip; use 0"
        yield Problem("train.grad_clip", what)
    if strategy not in ("auto", "data_parallel") or zero_stage:
        key, given = ("strategy.zero_stage", zero_stage) if zero_stage else ("strategy.name", strategy)
        what = f"{given} given; onebit_adam averages compressed momentum between full replicas; use data_parallel"
        yield Problem(key, what)


def ramp_problems(ramp: BatchRamp | None, global_batch: int) -> Iterator[Problem]:
    """A batch ramp that does not lead to the global batch."""
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


def reduce_problems(section: Reduce) -> Iterator[Problem]:
    """Conflicting settings of the reduction, under any plan."""
    if section.predivide is not None and section.scaling == "pre":
        yield Problem(
            "train.reduce.predivide",
            "unused with scaling pre, which divides completely before the sum; remove it",
        )


@dataclass(frozen=True, kw_only=True)
class Outer:
    """How islands of `local_sgd` exchange weights after `local_steps` steps."""

    optimizer: Literal["average", "nesterov"] = "average"
    """`average`: islands continue from the mean (local SGD); `nesterov`: the mean change is a gradient (DiLoCo)."""
    lr: float = number(0.7, above=0)
    """Outer learning rate of `nesterov`."""
    momentum: float = number(0.9, least=0, most=1)
    """Outer momentum of `nesterov`."""
    mode: Literal["wait", "overlap", "async"] = "wait"
    """`wait`: islands wait for the exchange; `overlap`: they train on and apply the mean late; `async`: no barrier."""
    delay_steps: int | None = number(None, least=1)
    """`overlap`: steps after which the mean of a round is applied; default: `local_steps`, one round. Fewer steps keep
    islands closer to synchronous training; if the exchange takes longer, islands wait for it."""
    bits: Literal[32, 8, 4, 2, "auto"] = 32
    """Bits per number on the link; below 32, rounding errors are kept and sent later (error feedback). `auto`: as many
    as the link carries."""
    density: float = number(1.0, above=0, most=1)
    """Share of the numbers that are sent, the largest of each block of 256, with `bits: 2`; the rest is sent later."""
    fragments: int | Literal["auto"] = number(1, least=1)
    """Parts of the weights that are exchanged in turn, one every `local_steps` / `fragments` steps (streaming): the
    link is used evenly. `auto`: as many as there are local steps, at most 16."""
    max_staleness: int = number(8, least=0)
    """`async`: rounds of other islands that an island may miss before they wait for it. 0: in turns, in which every
    island does a round from the same weights; with `local_steps: 1` that is data parallel through the mailbox."""


def outer_problems(outer: Outer | None) -> Iterator[Problem]:
    """Conflicting settings of the exchange between islands, under any plan."""
    if outer is None:
        return
    if outer.delay_steps is not None and outer.mode != "overlap":
        yield Problem("train.outer.delay_steps", f"unused with mode {outer.mode}; remove it, or use mode overlap")
    if outer.density < 1 and outer.bits != 2:
        what = f"{outer.density:g} given with bits {outer.bits}; a part of the numbers is sent in 2 bits: use bits 2"
        yield Problem("train.outer.density", what)
    for key, value in (("bits", outer.bits), ("fragments", outer.fragments)):
        if value == "auto" and outer.mode != "overlap":
            what = f"auto given with mode {outer.mode}; a link is kept busy during training: use mode overlap"
            yield Problem(f"train.outer.{key}", what)
    if outer.mode == "async" and outer.fragments not in (1, "auto"):
        what = f"{outer.fragments} given; asynchronous islands exchange whole updates: use 1, or mode overlap"
        yield Problem("train.outer.fragments", what)


def interval_problems(local_steps: int | str | None, outer: Outer | None) -> Iterator[Problem]:
    """Settings that exclude an interval that the run chooses."""
    if local_steps != "auto":
        return
    mode = outer.mode if outer else "wait"
    if mode == "async":
        what = "auto given; asynchronous islands claim rounds of equal length: give a number, or use mode overlap"
        yield Problem("strategy.local_steps", what)
    elif mode != "overlap":
        what = f"auto given with mode {mode}; a link is kept busy during training: use train.outer.mode overlap"
        yield Problem("strategy.local_steps", what)
    if outer is not None and outer.delay_steps is not None:
        yield Problem("train.outer.delay_steps", "unused with local_steps auto, which chooses it; remove it")
