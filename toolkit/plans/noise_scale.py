"""Gradient noise scale: the batch beyond which more sequences a step hardly save steps.

Two batches of different size estimate the gradient's own square norm and its noise without bias: small ones carry more
noise (McCandlish et al., "An Empirical Model of Large-Batch Training", appendix A). Both estimates are averaged over
steps before they are divided, since a ratio of noisy numbers is biased.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.plans.plan import Plan

DECAY = 0.98
"""Of the running means: about 50 steps."""


@dataclass
class NoiseScale:
    """Running estimate from the square norms of small- and large-batch gradients."""

    decay: float = DECAY
    _signal: float = 0.0
    _noise: float = 0.0
    _weight: float = 0.0

    def add(self, small_square: float, small_batch: float, large_square: float, large_batch: float) -> None:
        """One step: mean square norm of gradients over `small_batch` sequences, and that over `large_batch`."""
        signal = (large_batch * large_square - small_batch * small_square) / (large_batch - small_batch)
        noise = (small_square - large_square) / (1 / small_batch - 1 / large_batch)
        self._signal = self.decay * self._signal + (1 - self.decay) * signal
        self._noise = self.decay * self._noise + (1 - self.decay) * noise
        self._weight = self.decay * self._weight + (1 - self.decay)

    @property
    def sequences(self) -> float | None:
        """The noise scale, in sequences; None while it can't be told."""
        if self._weight == 0 or self._signal <= 0 or self._noise <= 0:
            return None
        return self._noise / self._signal


def tells_noise(plan: Plan) -> bool:
    """Whether gradients of two batch sizes pass under a plan: whole models, several micro-batches."""
    whole = plan.tp * plan.pp * plan.sp * plan.ep * plan.islands == 1
    return whole and plan.global_batch > plan.micro_batch


def advice(sequences: float, global_batch: int) -> str:
    """What the noise scale says of a batch, in a sentence."""
    scale = round(sequences)
    if global_batch > 2 * sequences:
        what = f"past {scale:,} sequences more devices buy little: the same loss takes more data, hardly fewer steps"
    elif global_batch * 2 < sequences:
        what = f"up to {scale:,} sequences a larger batch saves steps almost in proportion"
    else:
        what = "steps saved and data spent are in balance"
    return f"gradient noise scale: {scale:,} sequences, the global batch is {global_batch:,}: {what}"
