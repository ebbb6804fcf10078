"""Gradient noise scale: the batch size beyond which more sequences per step hardly save steps.

The square norms of gradients over two batch sizes give unbiased estimates of the true square norm and of the noise
(McCandlish et al., "An Empirical Model of Large-Batch Training", appendix A). Both estimates are averaged over steps
before their ratio is computed, because a ratio of noisy numbers is biased.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.plans.plan import Plan

DECAY = 0.98
"""Decay of the running means: they cover about 50 steps."""


@dataclass
class NoiseScale:
    """Running estimate from the square norms of small- and large-batch gradients."""

    decay: float = DECAY
    _signal: float = 0.0
    _noise: float = 0.0
    _weight: float = 0.0

    def add(self, small_square: float, small_batch: float, large_square: float, large_batch: float) -> None:
        """Add one step: the mean square norms of gradients over `small_batch` and over `large_batch` sequences."""
        signal = (large_batch * large_square - small_batch * small_square) / (large_batch - small_batch)
        noise = (small_square - large_square) / (1 / small_batch - 1 / large_batch)
        self._signal = self.decay * self._signal + (1 - self.decay) * signal
        self._noise = self.decay * self._noise + (1 - self.decay) * noise
        self._weight = self.decay * self._weight + (1 - self.decay)

    @property
    def sequences(self) -> float | None:
        """The noise scale, in sequences; None until it can be estimated."""
        if self._weight == 0 or self._signal <= 0 or self._noise <= 0:
            return None
        return self._noise / self._signal


def tells_noise(plan: Plan) -> bool:
    """Whether a plan sees gradients of two batch sizes: several micro-batches per step, each seen as a whole.

    Tensor shards add up. Pipeline stages that share a weight see parts of its gradient, whose squares do not.
    """
    added_up = plan.pp * plan.token_parts * plan.ep * plan.islands == 1 and plan.tensor_by == "slices"
    return added_up and plan.global_batch > plan.micro_batch


def advice(sequences: float, global_batch: int) -> str:
    """A sentence on what the noise scale means for a batch size."""
    scale = round(sequences)
    if global_batch > 2 * sequences:
        what = f"past {scale:,} sequences more devices buy little: the same loss takes more data, hardly fewer steps"
    elif global_batch * 2 < sequences:
        what = f"up to {scale:,} sequences a larger batch saves steps almost in proportion"
    else:
        what = "steps saved and data spent are in balance"
    return f"gradient noise scale: {scale:,} sequences, the global batch is {global_batch:,}: {what}"
