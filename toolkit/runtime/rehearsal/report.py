"""What a rehearsal is given and what it reports: plain data without torch, passed between processes by pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.plans.plan import Plan
from toolkit.recipe.model_section import Model
from toolkit.recipe.sections import Train

PARTS = ("params", "grads", "optimizer", "activations", "logits", "gathered", "buckets", "temporary")
"""Parts that live tensors belong to. The memory model has `buckets` and `temporary` as one part, `buffers`."""
Key = tuple[Any, ...]
"""What is counted: ("flops",), ("sync", line), ("copy", line), ("square", tensor), ("calls" or "bytes", kind, ranks,
line)."""
Moment = tuple[str, ...]
"""A place in a phase: part of the step, micro-batch, module with its layer's number left out, line."""
WIDE = " in float64"
"""Ends the line of a moment at which a copy in float64 is made, as for DeepSpeed's norms of single tensors."""


def model_part(part: str) -> str:
    """The part of the memory model that a rehearsed part belongs to."""
    return "buffers" if part in ("buckets", "temporary") else part


@dataclass(frozen=True)
class Trials:
    """What trials with real numbers say about a model."""

    reason: str
    """Why the loss needs complete logits; empty: the head computes it in blocks."""
    follows: bool
    """Whether logits are the head's output up to element-wise operations."""
    attention: str
    """Why the model keeps transformers' attention; empty if it uses the toolkit's."""
    kernels: tuple[str, ...] = ()
    """Fused operators that a plan for CPUs uses."""


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
    """Tokens of a row."""
    texts: int = 1
    """Rows of a sample."""
    rows: str = "plain"
    """What a row holds: a full sequence (`plain`), several documents (`packed`), one document and padding (`padded`),
    a text with a class (`text`), an image with a class (`image`), or a source and a target (`seq2seq`)."""
    steps: int = 2
    evaluates: bool = True
    total_steps: int = 1000
    """Steps of the learning-rate schedule."""
    trials: Trials | None = None
    """Set before ranks are rehearsed."""
    only_shapes: tuple[int, ...] = ()
    """Ranks that are run, with few layers, until they send the shapes that the next stage receives; not reported."""
    every_layer: bool = False
    """Whether all layers and micro-batches are run; otherwise long models are extrapolated from short ones."""


class Group(tuple[int, ...]):
    """Global ranks of a group. Its hash is made once: a group may have all ranks of a cluster."""

    def __hash__(self) -> int:
        found: int | None = self.__dict__.get("hash")
        if found is None:
            found = self.__dict__["hash"] = tuple.__hash__(self)
        return found


@dataclass(frozen=True, slots=True)
class Collective:
    """One call of a collective, a send or a receive."""

    kind: str
    ranks: Group
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
    device_peak_bytes: int
    host_peak_bytes: int
    cpu_seconds: float
    operators: int
    counts: dict[Key, int]
    """Events of the phase."""
    repeated: dict[Key, float]
    """Events of one micro-batch that is not the last of its step."""
    collectives: list[Collective]
    """In their order, of the longest model that was run."""
    parts: dict[str, int] = field(default_factory=dict)
    """Device bytes at the peak by part; they sum to the peak."""
    peak_at: str = ""
    largest: list[LargeTensor] = field(default_factory=list)
    moments: dict[Moment, tuple[int, ...]] = field(default_factory=dict)
    """Largest device bytes at each moment, by part in the order of `PARTS`."""

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return self.counts.get(("flops",), 0)

    @property
    def host_syncs(self) -> dict[str, int]:
        """`kind at line` → number of times that the host waits for the device."""
        return {key[1]: count for key, count in self.counts.items() if key[0] == "sync"}

    @property
    def host_copies(self) -> dict[str, int]:
        """`line` → bytes copied from host to device."""
        return {key[1]: count for key, count in self.counts.items() if key[0] == "copy"}

    @property
    def square_tensors(self) -> dict[str, int]:
        """`shape by operator at line` → number of new tensors with two dimensions of the sequence length."""
        return {key[1]: count for key, count in self.counts.items() if key[0] == "square"}

    @property
    def traffic(self) -> list[dict[str, Any]]:
        """Collectives by kind and group, with calls, bytes and lines; the largest first."""
        found: dict[Key, dict[str, Any]] = {}
        for (what, *rest), count in self.counts.items():
            if what in ("calls", "bytes"):
                kind, ranks, site = rest
                empty = {"kind": kind, "group": list(ranks), "calls": 0, "bytes": 0, "sites": {}}
                row = found.setdefault((kind, ranks), empty)
                row[what] += count
                if what == "calls":
                    row["sites"][site] = row["sites"].get(site, 0) + count
        return sorted(found.values(), key=lambda row: -row["bytes"])


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
    layers: int
    """Layers of this rank's stage."""
    ran_layers: tuple[int, ...]
    """Numbers of layers that were run; figures for `layers` are extrapolated unless it is the only one."""
    ran_micro_batches: int
    tells_lengths: bool = True
    """Whether no size of the model equals the sequence length; otherwise `square_tensors` can't be counted."""

    @property
    def extrapolated(self) -> bool:
        """Whether figures come from shorter models."""
        return self.ran_layers != (self.layers,)

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
    def square_tensors(self) -> dict[str, int] | None:
        """Tensors of the step with two dimensions of the sequence length; None if the model has such sizes itself."""
        return self.step.square_tensors if self.tells_lengths else None

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
