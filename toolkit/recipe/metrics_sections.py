"""Recipe sections on metrics: what is recorded, and which sinks get it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from toolkit.recipe.schema import number


@dataclass(frozen=True, kw_only=True)
class Wandb:
    """One W&B run per job. The API key comes from `wandb login` or WANDB_API_KEY, never from the recipe."""

    project: str = "zero-toolkit"
    """W&B project."""
    entity: str | None = None
    """W&B team or user."""
    mode: Literal["online", "offline", "disabled"] = "offline"
    """`offline` needs no account; `wandb sync` uploads it later."""
    group: str | None = None
    """W&B group."""
    tags: tuple[str, ...] = ()
    """W&B tags."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A torch profiler trace, for Perfetto or chrome://tracing."""

    steps: tuple[int, ...]
    """First and last step, e.g. [10, 12]; the first must be at least 3."""
    ranks: tuple[int, ...] = (0,)
    """Ranks to profile."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What is recorded."""

    every: int = number(10, least=1)
    """Steps between two console lines; files get every step."""
    console: bool = True
    """Whether rank 0 shows progress."""
    detail_every: int = number(10, least=0)
    """Steps between two detailed records (all ranks, collectives, device counters); 0: none, and no step breakdown."""
    wandb: Wandb = field(default_factory=Wandb)
    """Weights & Biases."""
    tensorboard: bool = False
    """Whether TensorBoard files are written to the run directory."""
    sinks: tuple[str, ...] = ()
    """Your own sinks, which are code: `module:Class` in PYTHONPATH, or entry points of `toolkit.sinks`."""
    noise_scale: bool = False
    """Measure the gradient noise scale, which shows when a batch is too large; `data_parallel` and `zero` only."""
    sample_ids: bool = False
    """Whether each record lists the sample ids of its step, gathered from all ranks, to check the data order."""
    trace: Trace | None = None
    """Steps to profile operator by operator."""
