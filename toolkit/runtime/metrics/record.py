"""The record of a step, and the protocol of sinks that receive records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of metrics.jsonl."""

    step: int
    """Counted from 1."""
    loss: float
    """Cross-entropy averaged over the counted tokens of the global batch."""
    lr: float
    grad_norm: float
    """Global norm before clipping."""
    tokens: int
    """Counted tokens of this step, over all ranks."""
    step_seconds: float
    tokens_per_second: float
    mfu: float
    """Model FLOPs per second (6 per parameter and token, full-square attention, no recompute) over the peak."""
    memory_bytes: int
    """Peak of this rank in this step; on a CPU, in the step that was measured."""
    comm_seconds: float
    """Time this rank spent blocked in collectives."""
    data_seconds: float
    """Time this rank waited for its batch."""
    time: float = 0.0
    """When the step ended, seconds since 1970."""
    hfu: float = 0.0
    """As `mfu`, with what the backward pass computes again."""
    tokens_per_second_per_device: float = 0.0
    wall_seconds: float = 0.0
    """Since the end of the previous step: the step itself and the hooks before it."""
    parts: dict[str, float] = field(default_factory=dict)
    """`wall_seconds` of this rank by part, as in `run_dir.step_parts`; on an accelerator in detailed steps only."""
    grad_sync_seconds: float | None = None
    """Gradient synchronisation from start to end; `parts.grad_sync` is what of it was exposed."""
    memory_reserved_bytes: int = 0
    """What the accelerator's allocator held at that peak, fragments included; 0 on a CPU."""
    memory_now_bytes: int = 0
    """Held by tensors when the step ended; on a CPU, by the process."""
    compiled_graphs: int | None = None
    """Graphs that torch.compile has made on this rank so far, where `model.compile` asks for it; if it grows after the
    first steps, shapes change and layers are compiled again."""
    preference: dict[str, float] | None = None
    """Under a preference objective, means over the pairs of this step: rewards, their margin, how often the chosen
    answer has the larger one, and log-probabilities."""
    objective: dict[str, float] | None = None
    """Under another objective, means over the samples of this step: see docs/finetuning.md."""
    exchange: dict[str, float] | None = None
    """Of islands: the rhythm (`local_steps`, `fragments`, `bits`), and what the first rank's exchanges have sent and
    cost so far (`exchanges`, `sent_bytes`, `busy_seconds`, and `waited_seconds` in which training stood still)."""
    router: dict[str, float] | None = None
    """Of a mixture's routers: `loss` that they add to the cross-entropy, `balance` before its factor, mean `entropy` of
    the load (1: even), `max_over_mean` of the worst layer, `dead_experts`, without any token, of all `experts`, and the
    share of visits that were `dropped` (`train.router.capacity_factor`)."""
    router_load: list[list[float]] | None = None
    """Load of every expert over its layer's mean, layer by layer; in detailed steps."""
    skipped: int = 0
    """1: no update was made, because gradients overflowed in fp16."""
    loss_scale: float | None = None
    """What the loss was multiplied by, in fp16."""
    noise_scale_sequences: float | None = None
    """Gradient noise scale, a running mean, where `metrics.noise_scale` asks for it."""
    checkpoint_step: int = 0
    """Step of the newest complete checkpoint."""
    sample_ids: list[int] | None = None
    """Samples of this step, over all replicas, where `metrics.sample_ids` asks for them."""
    ranks: dict[str, dict[str, float]] | None = None
    """Over all ranks, every `metrics.detail_every` steps: smallest, mean, largest and their ranks."""
    collectives: dict[str, dict[str, float]] | None = None
    """Calls, bytes and seconds of this step on this rank, by kind and purpose; in detailed steps."""
    straggler: dict[str, float] | None = None
    """The straggler, if there is one: its rank, and seconds per step that it is slower; in detailed steps."""
    bubble_by_stage: list[float] | None = None
    """Share of the pipeline's time in which each stage does not compute; in detailed steps."""


class Sink(Protocol):
    """Receives records. A user's sink needs `start`, `log` and `finish` only; the other two are optional there."""

    def start(self, info: Mapping[str, Any]) -> None:
        """Called before the first step, with recipe, plan and run directory."""

    def log(self, record: Record) -> None:
        """Called after every step."""

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """Called after every evaluation, with the line of eval.jsonl; its step was logged before."""

    def rewind(self, step: int) -> None:
        """Called when the run returns to a checkpoint: steps after `step` will be logged again."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Called once at the end, whether the run succeeded or failed."""
