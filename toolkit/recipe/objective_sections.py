"""Recipe sections on objectives besides cross-entropy, and on the balance of routers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from toolkit.errors import Problem
from toolkit.recipe.schema import number

Objective = Literal["dpo", "ipo", "kto", "orpo", "simpo", "cpo", "reward", "rank", "contrastive", "distill"]
COMPARED = ("dpo", "ipo", "kto")
"""Objectives that compare the model with its weights before training, the reference."""
ANSWERS = {
    "dpo": (0.1, 0.0), "ipo": (0.1, 0.0), "kto": (0.1, 0.0), "orpo": (0.1, 1.0), "simpo": (2.0, 0.0), "cpo": (0.1, 1.0)
}  # fmt: skip
"""Objective that compares answers by their probabilities → (beta, sft_weight)."""
PROMPT_SHARE = 1 / 3
"""Share of a row of pairs that is taken to be prompts, which both answers continue: prompts as long as an answer."""
TWICE = ("kto", "contrastive")
"""Objectives that look at the whole global batch, without gradients, before they train on it."""
SCORED = ("reward", "rank")
"""Objectives that train a head with a single output, which scores a text."""
FORMATS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*ANSWERS, "reward"), ("preference",)),
    "rank": ("ranking",),
    "contrastive": ("pairs",),
    "distill": ("text", "instruction", "chat"),
}
"""Objective → data formats that it learns from."""
SETTINGS: dict[str, tuple[str, ...]] = {
    "preference": (*ANSWERS, "reward"), "rank": ("rank",), "contrastive": ("contrastive",), "distill": ("distill",)
}  # fmt: skip
"""Section under `train` → objectives that use it."""


@dataclass(frozen=True, kw_only=True)
class Preference:
    """Settings of preference objectives. A setting that the objective ignores is refused."""

    beta: float | None = number(None, above=0)
    """How strongly a difference between chosen and rejected answer counts; for `orpo` the weight of the odds ratio.
    Default: 0.1, for `simpo` 2. Not for `reward`."""
    gamma: float | None = number(None, least=0)
    """`simpo`: margin by which a chosen answer must win; default 1."""
    label_smoothing: float | None = number(None, least=0, most=0.5)
    """`dpo`, `cpo`: fraction of pairs that are assumed to be labelled the wrong way round; default 0."""
    sft_weight: float | None = number(None, least=0)
    """Weight of the chosen answer's mean cross-entropy per token; default: 1 for `orpo` and `cpo`, else 0."""
    desirable_weight: float | None = number(None, least=0)
    """`kto`: weight of answers with a true label; default 1."""
    undesirable_weight: float | None = number(None, least=0)
    """`kto`: weight of answers with a false label; default 1."""
    center_weight: float | None = number(None, least=0)
    """`reward`: weight of the squared sum of both rewards, which keeps rewards near 0; default 0."""

    def of(self, objective: Objective) -> Preference:
        """These settings with the defaults of an objective."""
        beta, sft_weight = ANSWERS.get(objective, (1.0, 0.0))
        return replace(
            self,
            beta=beta if self.beta is None else self.beta,
            gamma=1.0 if self.gamma is None else self.gamma,
            label_smoothing=self.label_smoothing or 0.0,
            sft_weight=sft_weight if self.sft_weight is None else self.sft_weight,
            desirable_weight=1.0 if self.desirable_weight is None else self.desirable_weight,
            undesirable_weight=1.0 if self.undesirable_weight is None else self.undesirable_weight,
            center_weight=self.center_weight or 0.0,
        )


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Settings of `objective: rank`."""

    loss: Literal["listwise", "pointwise"] = "listwise"
    """`listwise`: cross-entropy between the softmax of a query's scores and its labels, normalised to sum 1;
    `pointwise`: binary cross-entropy of every candidate, whose label is between 0 and 1."""


@dataclass(frozen=True, kw_only=True)
class Contrastive:
    """Settings of `objective: contrastive`."""

    temperature: float = number(0.05, above=0)
    """Similarities are divided by it."""
    pooling: Literal["mean", "last", "cls"] = "mean"
    """What stands for a text: the mean of its last hidden states, that of its last token, or that of its first."""
    similarity: Literal["cosine", "dot"] = "cosine"
    """How embeddings are compared."""
    matryoshka: tuple[int, ...] = ()
    """Sizes of embeddings: the loss is the mean over prefixes of these sizes; default: the full size alone."""
    both_ways: bool = False
    """Also choose the query among all queries, given the positive, and average both losses."""


@dataclass(frozen=True, kw_only=True)
class Distill:
    """Settings of `objective: distill`."""

    teacher: str | None = None
    """Directory or hub id of the teacher, a causal language model with the student's vocabulary."""
    teacher_config: dict[str, Any] | None = None
    """Instead of `teacher`, for trials: a Hugging Face config, whose model gets random weights."""
    kl: Literal["forward", "reverse"] = "forward"
    """`forward`: KL(teacher ‖ student), which covers all of the teacher's answers; `reverse`: KL(student ‖ teacher),
    which keeps to its likeliest ones."""
    temperature: float = number(1.0, above=0)
    """Logits of both are divided by it; the loss is multiplied by its square, so that gradients keep their size."""
    ce_weight: float = number(0.0, least=0, most=1)
    """Share of the cross-entropy of the labels in the loss."""
    top_k: int = number(32, least=1)
    """Likeliest tokens of the teacher that are kept per position; all others count as one. They take 8 bytes each in
    `data.cache`."""
    predictions: Literal["cached", "live"] = "cached"
    """When the teacher predicts: `cached` before training, once, and keeps the result in `data.cache`; `live` in every
    step, beside the student and in shards as the student's. Both give the same losses."""


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
    capacity_factor: float | None = number(None, least=1)
    """Most visits that an expert takes from a rank's micro-batch, relative to an even share; later ones are dropped, so
    the result depends on the micro-batch and differs from training without it. Evaluations drop nothing. Default: no
    limit."""
    max_over_mean: float | None = number(None, least=1)
    """Load of the busiest expert relative to the mean that the planner reckons with, as `router.max_over_mean` in
    metrics.jsonl reports it; it changes no result. Default, as measured: 1.08 with `bias_update`, else 1.36."""


def router_problems(router: Router | None) -> Iterator[Problem]:
    """Settings of the router that would be ignored."""
    if router is not None and router.loss == "none" and router.weight is not None:
        yield Problem("train.router.weight", "unused with loss none; remove it, or use loss sequence")


def objective_problems(objective: Objective | None, given: Mapping[str, Any], data_format: str) -> Iterator[Problem]:
    """Objectives without their data, data without an objective, and settings that an objective ignores.

    `given`: the sections of `SETTINGS` by name, None where the recipe has none.
    """
    for section, objectives in SETTINGS.items():
        if given[section] is not None and objective not in objectives:
            why = "without train.objective" if objective is None else f"with train.objective {objective}"
            yield Problem(f"train.{section}", f"unused {why}; it is for {', '.join(objectives)}")
    if objective is None:
        needed = [name for name, formats in FORMATS.items() if formats == (data_format,)]
        if needed:
            yield Problem("train.objective", f"required with data.format {data_format}: one of {', '.join(needed)}")
        return
    if data_format not in FORMATS[objective]:
        wanted = " or ".join(FORMATS[objective])
        yield Problem("train.objective", f"{objective} needs data.format {wanted}, not {data_format}")
    teacher = given["distill"]
    if objective == "distill" and (teacher is None or (teacher.teacher is None) == (teacher.teacher_config is None)):
        yield Problem("train.distill", "one of teacher (a directory or hub id) and teacher_config is required")
    yield from _unused(objective, given["preference"])


def reference_problems(objective: Objective | None, reference: str | None) -> Iterator[Problem]:
    """A reference that nothing reads."""
    if reference is not None and objective not in COMPARED:
        yield Problem("train.reference", f"unused: only {', '.join(COMPARED)} compare with a reference; remove it")


_USED = {
    "beta": tuple(ANSWERS), "gamma": ("simpo",), "label_smoothing": ("dpo", "cpo"), "center_weight": ("reward",),
    "sft_weight": ("dpo", "ipo", "orpo", "simpo", "cpo"), "desirable_weight": ("kto",), "undesirable_weight": ("kto",),
}  # fmt: skip
"""Key of `train.preference` → objectives that use it."""


def _unused(objective: Objective, settings: Preference | None) -> Iterator[Problem]:
    for key, objectives in _USED.items():
        if settings is not None and getattr(settings, key) is not None and objective not in objectives:
            yield Problem(f"train.preference.{key}", f"unused with objective {objective}; remove it")
