"""What a rehearsal is given and what it reports: plain data without torch, passed between processes by pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.plans.plan import Plan
from toolkit.recipe.sections import Model, Train

PARTS = ("params", "grads", "optimizer", "activations", "logits", "gathered", "buffers")
"""Parts of the memory model that live tensors belong to; `overhead` is no tensor."""


@dataclass(frozen=True, kw_only=True)
class RehearsalSpec:
    """Everything that one rank is rehearsed from."""

    model: Model
    """Model section with an inline config: nothing is read from a checkpoint."""
    train: Train
    plan: Plan
    deepspeed: Mapping[str, Any]
    backend: str
    """Backend of the plan's device: `cpu` uses DeepSpeed's own CPU accelerator, others the fake one."""
    device_name: str
    device_memory_bytes: int
    local_size: int
    """Ranks per host."""
    seq_len: int
    packed: bool = False
    """Whether a row holds several documents, which transformers reads from position ids."""
    steps: int = 2
    evaluates: bool = True
    total_steps: int = 1000
    """Steps of the learning-rate schedule."""
    defect: str = ""
    """Defect to plant, `RANK:MODULE:FUNCTION`; a test of the matching calls it with the engine. Empty: none."""


@dataclass(frozen=True)
class Collective:
    """One call of a collective, a send or a receive."""

    kind: str
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    dtype: str
    numel: int
    bytes: int
    peer: int | None
    """Root of a broadcast or reduce; the other end of a send or receive."""
    site: str
    """Nearest line outside torch and DeepSpeed's communication layer."""


@dataclass(frozen=True)
class LargeTensor:
    """A live tensor at the peak."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    part: str
    where: str
    """Module path or line, and operator, that made it."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Bytes and events of one phase: the start, a step, an evaluation, a save."""

    name: str
    device_before_bytes: int
    device_peak_bytes: int
    host_peak_bytes: int
    cpu_seconds: float
    operators: int
    flops: int
    host_syncs: dict[str, int]
    """`kind at line` → number of times that the host waits for the device."""
    host_copies: dict[str, int]
    """`line` → bytes copied from host to device."""
    collectives: list[Collective]
    parts: dict[str, int] = field(default_factory=dict)
    """Device bytes at the peak by part; they sum to the peak."""
    peak_at: str = ""
    largest: list[LargeTensor] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class RoleReport:
    """What one rehearsed rank did."""

    rank: int
    stage: int
    tensor: int
    data: int
    phases: list[Phase]
    optimizer: str
    """Class of DeepSpeed's optimizer wrapper."""
    saved_bytes: int
    """Bytes that this rank writes into a checkpoint."""
    wall_seconds: float
    cpu_seconds: float
    resident_bytes: int
    """Peak resident memory of the process that rehearsed."""
    sent: list[Any] = field(default_factory=list)
    """Shapes and types that a pipeline stage sends to the next one."""

    def phase(self, name: str) -> Phase:
        """The last phase of this name."""
        return next(phase for phase in reversed(self.phases) if phase.name == name)

    @property
    def start(self) -> Phase:
        """Building the engine."""
        return self.phase("start")

    @property
    def step(self) -> Phase:
        """The last step: optimizer states exist, as in every later one."""
        return self.phase("step")

    @property
    def device_peak_bytes(self) -> int:
        """Largest peak of all phases."""
        return max(phase.device_peak_bytes for phase in self.phases)


@dataclass(frozen=True)
class RoleFailed:
    """A rank that could not be rehearsed."""

    rank: int
    reason: str
    refused: bool
    """Whether the reason names something that can't be faked."""
    details: str = ""
