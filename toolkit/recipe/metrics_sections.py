"""Recipe sections of what is recorded, and where it goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from toolkit.recipe.schema import number


@dataclass(frozen=True, kw_only=True)
class Wandb:
    """One W&B run a job. The key comes from `wandb login` or WANDB_API_KEY, never from here."""

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
    """First and last step, e.g. [10, 12]; from 3 on."""
    ranks: tuple[int, ...] = (0,)
    """Ranks that are profiled."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What is recorded."""

    every: int = number(10, least=1)
    """Steps between two lines on the console; files get every step."""
    console: bool = True
    """Whether rank 0 shows progress."""
    detail_every: int = number(10, least=0)
    """Steps between two looks at all ranks, collectives and device counters; 0: none, and steps are not split."""
    wandb: Wandb = field(default_factory=Wandb)
    """Weights & Biases."""
    tensorboard: bool = False
    """Whether TensorBoard files are written to the run directory."""
    sinks: tuple[str, ...] = ()
    """Your own: `module:Class`, or entry points of `toolkit.sinks`; see docs/metrics.md."""
    noise_scale: bool = False
    """Whether the gradient noise scale is measured, under `data_parallel` and `zero`: what batch would be too large."""
    sample_ids: bool = False
    """Whether each record names the samples of its step, as all ranks tell them: to check the order of a run."""
    trace: Trace | None = None
    """Steps to look at operation by operation."""
