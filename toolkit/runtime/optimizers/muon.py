"""Muon (Jordan et al. 2024): updates of complete matrices are made orthogonal; AdamW updates everything else.

Matrices are the two-dimensional weights inside the layers, and each matrix of a stack of experts. A fused matrix, such
as queries, keys and values in one, is one matrix. Tables, heads, norms and biases are AdamW's, and so are convolutions.
Updates are scaled to AdamW's usual size (Liu et al. 2025), so that learning rate and weight decay mean the same.

Written by hand because the others are not exact here. torch 2.13's `torch.optim.Muon` takes complete matrices only and
always computes in bf16. DeepSpeed 0.19.8's replaces gradients by updates before the gradient norm is measured and
clipped, has no tensor shards, and forbids reduce-scatter under ZeRO 3. Ours can go if one of them takes flat partitions
and passes tests/runtime/engine/test_muon.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from toolkit.recipe.optimizer_sections import Muon as Settings
from toolkit.recipe.sections import Train
from toolkit.runtime.optimizers.update_rules import Layers, adamw, kept
from toolkit.runtime.optimizers.whole_matrices import Matrix, WholeMatrices

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration, with the steepest slope at 0 (Jordan et al. 2024)."""
TINY = 1e-7
"""Smallest norm by which an update is divided."""
ADAMW_SIZE = 0.2
"""Root mean square of AdamW's updates, which orthogonal ones are scaled to (Liu et al. 2025)."""
RULE = "rule"
"""Key of a parameter group: `muon` or `adamw`."""
_INSIDE = re.compile(r"(?:^|\.)\d+\.")
"""Names inside a list of layers."""
_TABLES = re.compile(r"embed|bias|position|conv", re.IGNORECASE)
"""Modules inside layers whose weights are not matrices that multiply activations."""


def is_matrix(name: str, shape: Sequence[int], settings: Settings) -> bool:
    """Whether Muon updates a parameter: a weight inside the layers, and no table."""
    if not _INSIDE.search(name) or _TABLES.search(name) or min(shape[-2:], default=0) < 2:
        return False
    if any(fnmatchcase(name, pattern) for pattern in settings.adamw):
        return False
    if len(shape) == 3:
        return ".experts." in name
    return len(shape) == 2 and name.endswith(".weight")


class Muon(torch.optim.Optimizer):
    """Two rules by parameter group; `step` does nothing before `begin` (see `LayerwiseOptimizer`)."""

    def __init__(self, parameters: Iterable[Any], train: Train, settings: Settings, lr: float) -> None:
        self._train, self._settings = train, settings
        self._matrices: WholeMatrices | None = None
        super().__init__(parameters, {"lr": lr, "weight_decay": train.weight_decay, RULE: "adamw"})

    def begin(self, matrices: WholeMatrices) -> None:
        """Take steps from now on."""
        self._matrices = matrices

    def matches(self, name: str, shape: Sequence[int]) -> bool:
        """Whether a parameter is updated as a matrix."""
        return is_matrix(name, shape, self._settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update. Collective over the ranks that share matrices."""
        if self._matrices is None:
            return
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            lr, decay = float(group["lr"]), float(group["weight_decay"])
            if group[RULE] == "muon":
                self._update(self._matrices, weights, lr, decay)
                continue
            train = replace(self._train, weight_decay=decay)
            for weight in weights:
                weight.sub_(adamw(weight, weight.grad, self.state[weight], train, Layers()), alpha=lr)

    def _update(self, matrices: WholeMatrices, weights: Sequence[torch.Tensor], lr: float, decay: float) -> None:
        settings = self._settings
        for weight in weights:
            assert weight.grad is not None
            kept(self.state[weight], "momentum_buffer", weight).lerp_(weight.grad, 1 - settings.momentum)
            weight.mul_(1 - lr * decay)

        def read(matrix: Matrix) -> torch.Tensor:
            grad = matrix.master.grad
            assert grad is not None
            momentum = matrices.view(matrix, self.state[matrix.master]["momentum_buffer"])
            return matrices.view(matrix, grad).lerp(momentum, settings.momentum) if settings.nesterov else momentum

        def write(matrix: Matrix, update: torch.Tensor) -> None:
            size = ADAMW_SIZE * math.sqrt(max(matrix.shape))
            matrices.view(matrix, matrix.master).sub_(update, alpha=lr * size)

        matrices.map(weights, read, lambda whole: orthogonal(whole, settings.iterations), write)


def orthogonal(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
    """The matrix with all its singular values near 1, by Newton-Schulz iterations; in the matrix's own data type."""
    first, second, third = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if tall else matrix
    found = found / found.norm().clamp(min=TINY)
    for _ in range(iterations):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=second, alpha=third), found, beta=first)
    return found.T if tall else found
