"""Result of the cost model for a plan: memory and time, each by part, and how far measured ones may be from it.

Intervals are the residuals of published rows and span 10 to 90%: of rows that were not fitted, four in five lie inside.
`benchmarks/fit_cost_model.py` computes the table with one source left out at a time, and prints how many lie inside.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter

from toolkit.cost.execution import Execution

DEVICE_SHARE = 0.99
"""Fraction of an accelerator's memory that the driver leaves to the job: 79.2 of 80 GiB on an H100 or A100."""
APART = ("host", "start", "host_start")
"""Fields of `Memory` that are not bytes of a step on the device."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the fullest device."""

    params: int = 0
    """Weights in the training precision."""
    grads: int = 0
    """Gradients."""
    optimizer: int = 0
    """fp32 master weights and optimizer moments."""
    activations: int = 0
    """Tensors that the forward pass keeps for the backward pass."""
    logits: int = 0
    """Logits and their gradient."""
    gathered: int = 0
    """Weights that ZeRO 3 has gathered at one time."""
    buffers: int = 0
    """Communication buckets."""
    overhead: int = 0
    """Device context, libraries, fragmentation."""
    host: int = 0
    """Bytes on the host of one node (offload); not part of `total`."""
    start: int = 0
    """Peak on the device until the engine exists, overhead included; not part of `total`."""
    host_start: int = 0
    """Peak on the host of one node until the engine exists; not part of `total`."""

    @property
    def total(self) -> int:
        """Bytes on the device in a step."""
        return sum(_step_bytes(self))

    @property
    def peak(self) -> int:
        """Bytes that the device must have: for a step, or for the start if that needs more."""
        return max(self.total, self.start)

    @property
    def host_peak(self) -> int:
        """Bytes that the host of a node must have."""
        return max(self.host, self.host_start)


@dataclass(frozen=True, kw_only=True)
class Time:
    """Seconds per step; communication counts only where it is not hidden by compute."""

    compute: float = 0.0
    """Forward and backward."""
    recompute: float = 0.0
    """Forward passes recomputed for the backward pass."""
    tp_comm: float = 0.0
    """Tensor-parallel collectives."""
    sp_comm: float = 0.0
    """Sequence-parallel collectives."""
    pp_bubble: float = 0.0
    """Pipeline stages waiting."""
    pp_comm: float = 0.0
    """Activations between pipeline stages."""
    dp_comm: float = 0.0
    """Gradients and ZeRO traffic."""
    optimizer: float = 0.0
    """Weight update, offload transfers included."""
    fixed: float = 0.0
    """Data loading, launches, host work."""

    def plus(self, other: Time, times: int = 1) -> Time:
        """The sum of both, part by part, with the other so many times."""
        return Time(**{f.name: getattr(self, f.name) + times * getattr(other, f.name) for f in fields(Time)})

    @property
    def total(self) -> float:
        """Seconds per step."""
        return float(sum(_step_seconds(self)))


# A search asks for totals thousands of times: the names of the parts are looked up once.
_step_bytes = attrgetter(*(field.name for field in fields(Memory) if field.name not in APART))
_step_seconds = attrgetter(*(field.name for field in fields(Time)))


@dataclass(frozen=True, kw_only=True)
class Money:
    """Cost and energy of a plan; None where the price or the power of the device is unknown."""

    per_billion_tokens: float | None
    """Price of a billion tokens, in the currency of `cluster.price_per_device_hour`."""
    run: float | None
    """Price of all steps of the run; None also if the recipe does not say how many."""
    kwh_per_billion_tokens: float | None
    """Energy of the devices at their power under load; cooling and hosts come on top."""
    run_kwh: float | None
    """Energy of the devices for all steps."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Memory and time of one plan for one job."""

    memory: Memory
    time: Time
    memory_limit_bytes: int
    """Device memory available to the job."""
    host_limit_bytes: int
    """Host memory per node available to the job."""
    step_seconds: tuple[float, float] = (0.0, 0.0)
    """Interval of the step time: 10 to 90% of runs like this one."""
    memory_bytes: tuple[float, float] = (0.0, 0.0)
    """Interval of the memory."""
    money: Money | None = None
    """What the run costs."""
    memory_margin_bytes: int = 0
    """Part of the device memory that plans leave free (`cluster.memory_margin`)."""
    tokens_per_second: float
    mfu: float
    """Model FLOPs per second (6·N + attention, no recompute) relative to the peak of the devices."""

    @property
    def fits(self) -> bool:
        """Whether the plan fits on device and host."""
        usable = self.memory_limit_bytes - self.memory_margin_bytes
        return self.memory.peak <= usable and self.memory.host_peak <= self.host_limit_bytes


COVERAGE = 0.8
"""Share of rows inside an interval."""


@dataclass(frozen=True)
class Interval:
    """Bounds of a figure relative to its prediction."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval relative to the prediction, for `± 12%`."""
        return (self.high - self.low) / 2

    def of(self, predicted: float) -> tuple[float, float]:
        """Bounds of a predicted figure."""
        return predicted * self.low, predicted * self.high


STEP_TIME = {
    "dense": Interval(0.91, 1.09),
    "network": Interval(0.92, 1.10),
    "small": Interval(0.90, 1.18),
    "deepspeed": Interval(0.86, 1.20),
    "adapters": Interval(0.92, 1.16),
    "mixture": Interval(0.84, 1.60),
}
"""Measured over predicted step time by kind of run."""
MEMORY = {"dense": Interval(0.90, 1.12), "adapters": Interval(0.88, 1.18), "mixture": Interval(0.85, 1.45)}
"""Measured over predicted memory by kind of run."""
SMALL_HIDDEN = 2048
"""Models of at most this width are limited by launches and small tiles as often as by compute."""


def kind_of(e: Execution) -> str:
    """The kind of run whose residuals say how uncertain a prediction is."""
    if e.model.experts:
        return "mixture"
    if e.lora_rank:
        return "adapters"
    if e.software.zero_copies and e.zero_stage:
        return "deepspeed"
    if e.model.hidden <= SMALL_HIDDEN:
        return "small"
    return "network" if e.cluster.nodes > 1 else "dense"


def step_interval(e: Execution) -> Interval:
    """Bounds of the step time relative to its prediction."""
    return STEP_TIME[kind_of(e)]


def memory_interval(e: Execution) -> Interval:
    """Bounds of the memory relative to its prediction."""
    return MEMORY.get(kind_of(e), MEMORY["dense"])
