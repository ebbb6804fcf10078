"""How far measured step times and memory may be from a prediction: intervals from the residuals of published rows.

Every interval spans 10 to 90%: of rows that were not fitted, four in five lie inside. `benchmarks/fit_cost_model.py`
computes the table with one source left out at a time, and prints how many rows lie inside.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.cost.execution import Execution

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
