"""Cached verdicts of the float64 split proof: planning refuses splits that failed it, without importing torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.models.tiny_sizes import WINDOW, Sizes, tiny_sizes
from toolkit.plans.plan import Plan, Refusal
from toolkit.recipe.model_section import ONE_RESULT, Model
from toolkit.resources import user_cache
from toolkit.verdicts import Verdict, VerdictFile, installed

CACHE_NAME = "proofs.json"
MOST_STAGES = 3
"""A first, a middle and a last stage; further stages are like the middle one."""
MOST_RING, MOST_EXCHANGES = 4, 2
"""Ring ranks, and ranks at each place of a ring: with more, only the chunks are shorter."""
MOST_EXPERT_RANKS = 2
"""How experts are found and called does not depend on how many ranks hold them."""
_LIBRARIES = ("transformers", "torch", "zero-toolkit")


@dataclass(frozen=True)
class Axes:
    """The axes of a plan that a proof depends on."""

    tp: int
    pp: int
    sp: int
    tensor_by: str = "slices"
    sequence_sharded: bool = False
    cp: int = 1
    ep: int = 1
    weights_later: bool = False
    """Whether gradients of weights are computed apart from those of inputs (zero bubble)."""

    @classmethod
    def of(cls, plan: Plan) -> Axes:
        """The axes of a plan; larger numbers of stages, ring ranks and expert ranks count as the `MOST_` of each."""
        return cls(
            tp=plan.tp,
            pp=min(plan.pp * plan.chunks, MOST_STAGES),
            sp=min(plan.sp, MOST_EXCHANGES) if plan.cp > 1 else plan.sp,
            tensor_by=plan.tensor_by,
            sequence_sharded=plan.sequence_sharded,
            cp=min(plan.cp, MOST_RING),
            ep=min(plan.ep, MOST_EXPERT_RANKS),
            weights_later=plan.schedule == "zero_bubble",
        )

    @property
    def split(self) -> bool:
        """Whether the model is split at all."""
        return self.tp * self.pp * self.sp * self.cp * self.ep > 1


class Proofs:
    """The cache file of split verdicts."""

    def __init__(self, path: Path | None = None) -> None:
        self._file = VerdictFile(path or user_cache() / CACHE_NAME, "splits are proved again")

    def get(self, config: Mapping[str, Any], section: Model, axes: Axes) -> Verdict | None:
        """The cached verdict on a recipe's model, given its raw config, under these axes; None if there is none."""
        return self._file.get(_key(config, section, axes))

    def put(self, config: Mapping[str, Any], section: Model, axes: Axes, verdict: Verdict) -> None:
        """Store a verdict."""
        self._file.put(_key(config, section, axes), verdict)


def judged(
    proposals: Iterable[Plan | Refusal], verdict: Callable[[Axes], Verdict | None], fixed: Collection[str] = ()
) -> Iterator[Plan | Refusal]:
    """The proposals; plans whose split is known to be wrong become refusals.

    If shares of tokens are wrong, the same plan with complete residuals follows, unless the recipe has `fixed` that.
    """
    known: dict[Axes, Verdict | None] = {}
    for proposal in proposals:
        while isinstance(proposal, Plan) and (axes := Axes.of(proposal)).split:
            if axes not in known:
                known[axes] = verdict(axes)
            found = known[axes]
            if found is None or found.ok:
                break
            refused = Refusal(proposal.strategy, found.reason, proposal)
            if not proposal.sequence_sharded or "sequence_sharded" in fixed:
                proposal = refused
                break
            yield refused
            proposal = replace(proposal, sequence_sharded=False)
        yield proposal


def _key(config: Mapping[str, Any], section: Model, axes: Axes) -> str:
    """Cache key: model type, task, flags, library versions and tiny sizes. Sizes do not change how a model splits."""
    flags = {key: value for key, value in config.items() if isinstance(value, bool | str)}
    libraries = installed(_LIBRARIES)
    how: list[Any] = [section.attention, section.task, asdict(axes)]
    if section.lora is not None:
        how.append(["lora", section.lora.targets])
    if section.task in ONE_RESULT:
        how.append("a loss above 0")  # earlier proofs of one score, and of embeddings, compared nothing
    window = WINDOW if config.get("sliding_window", WINDOW) else 0  # null turns it off
    what = json.dumps([flags, how, libraries, tiny_sizes(Sizes()), window], sort_keys=True)
    return f"{config.get('model_type')}:{hashlib.sha256(what.encode()).hexdigest()[:16]}"
