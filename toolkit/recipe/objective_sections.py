"""Recipe sections on objectives besides cross-entropy: preference tuning, and the balance of routers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from toolkit.errors import Problem
from toolkit.recipe.schema import number

Objective = Literal["dpo", "ipo", "orpo", "simpo", "cpo"]
COMPARED = ("dpo", "ipo")
"""Objectives that compare the model with its weights before training, the reference."""
_DEFAULTS = {"dpo": (0.1, 0.0), "ipo": (0.1, 0.0), "orpo": (0.1, 1.0), "simpo": (2.0, 0.0), "cpo": (0.1, 1.0)}
"""Objective → (beta, sft_weight)."""


@dataclass(frozen=True, kw_only=True)
class Preference:
    """Settings of preference objectives. A setting that the objective ignores is refused."""

    beta: float | None = number(None, above=0)
    """How strongly a difference between chosen and rejected answer counts; for `orpo` the weight of the odds ratio.
    Default: 0.1, for `simpo` 2."""
    gamma: float | None = number(None, least=0)
    """`simpo`: margin by which a chosen answer must win; default 1."""
    label_smoothing: float | None = number(None, least=0, most=0.5)
    """`dpo`, `cpo`: fraction of pairs that are assumed to be labelled the wrong way round; default 0."""
    sft_weight: float | None = number(None, least=0)
    """Weight of the chosen answer's mean cross-entropy per token; default: 1 for `orpo` and `cpo`, else 0."""

    def of(self, objective: Objective) -> Preference:
        """These settings with the defaults of an objective."""
        beta, sft_weight = _DEFAULTS[objective]
        return replace(
            self,
            beta=beta if self.beta is None else self.beta,
            gamma=1.0 if self.gamma is None else self.gamma,
            label_smoothing=self.label_smoothing or 0.0,
            sft_weight=sft_weight if self.sft_weight is None else self.sft_weight,
        )


@dataclass(frozen=True, kw_only=True)
class Router:
    """How the routers of a mixture of experts are kept balanced; see docs/mixtures.md."""

    loss: Literal["none", "sequence", "micro_batch"] | None = None
    """Balancing loss that is added to the cross-entropy. `sequence`: each sequence balances its own tokens, with the
    same result under every split; `micro_batch`: transformers' definition, whose result depends on the micro-batch.
    Default: `sequence` if the model's config asks for a router loss, else `none`."""
    weight: float | None = number(None, above=0)
    """Factor of the balancing loss; default: the config's (`router_aux_loss_coef`), else 0.001."""
    z_loss: float | None = number(None, least=0)
    """Factor of the mean squared log-sum-exp of the router's logits, which keeps them small; default: the config's
    (`router_z_loss_coef`), else 0."""
    bias_update: float | None = number(None, least=0)
    """Balancing without a loss: after each update the bias of every expert moves by this much, up if the expert had
    fewer tokens of the global batch than the mean, down if it had more. For routers with such a bias, as DeepSeek-V3's
    (there 0.001); default: 0."""


def router_problems(router: Router | None) -> Iterator[Problem]:
    """Settings of the router that would be ignored."""
    if router is not None and router.loss == "none" and router.weight is not None:
        yield Problem("train.router.weight", "unused with loss none; remove it, or use loss sequence")


def objective_problems(objective: Objective | None, settings: Preference | None, data_format: str) -> Iterator[Problem]:
    """Objectives without their data, data without an objective, and settings that an objective ignores."""
    if objective is None:
        if data_format == "preference":
            names = ", ".join(_DEFAULTS)
            yield Problem("train.objective", f"required with data.format preference: one of {names}")
        if settings is not None:
            yield Problem("train.preference", "unused without train.objective; set it, or remove this key")
        return
    if data_format != "preference":
        yield Problem("train.objective", f"{objective} needs data.format preference, not {data_format}")
    used = {"gamma": ("simpo",), "label_smoothing": ("dpo", "cpo")}
    for key, objectives in used.items():
        if settings is not None and getattr(settings, key) is not None and objective not in objectives:
            yield Problem(f"train.preference.{key}", f"unused with objective {objective}; remove it")
