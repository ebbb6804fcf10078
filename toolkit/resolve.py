"""From a recipe to an order: plan, DeepSpeed config, run directory. A root: it joins planning and registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import strategies
from toolkit import planner, run_dir
from toolkit.deepspeed_config import deepspeed_config
from toolkit.errors import BadInput, NoPlanFits, Problem
from toolkit.job import make_job, raw_config
from toolkit.plan import Job, Plan, Refusal
from toolkit.planner import Decision, Option
from toolkit.proofs import Axes, Proofs, Verdict, judged
from toolkit.recipe import Recipe
from toolkit.run_dir import RunDir
from toolkit.schema import nearest
from toolkit.timing import model_flops


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Everything that is known before a process starts."""

    recipe: Recipe
    job: Job
    decision: Decision

    @property
    def chosen(self) -> Option:
        """The plan to run; `NoPlanFits` if there is none."""
        if self.decision.chosen is None:
            raise NoPlanFits(explain(self.decision))
        return self.decision.chosen

    @property
    def deepspeed(self) -> dict[str, Any]:
        """The DeepSpeed config of the chosen plan."""
        return deepspeed_config(
            self.chosen.plan,
            self.recipe.train,
            params=self.job.model.params,
            backend=self.job.cluster.device.backend,
            nvme_path=self.recipe.strategy.nvme_path,
        )

    def plan_json(self) -> dict[str, Any]:
        """plan.json: the PLAN of the contract, and the bases of MFU."""
        return {
            **self.chosen.to_json(),
            "model_flops": model_flops(self.job),
            "peak_flops": self.job.cluster.device.peak_flops,
        }

    def write(self, path: Path, *, go_on: bool = False) -> RunDir:
        """A run directory with the order in it: a new one, or that of a run that goes on."""
        section = self.recipe.checkpoint
        go_on = go_on or run_dir.can_go_on(path, section.resume, section.every)
        run = RunDir(path) if go_on else run_dir.create(path)
        run_dir.write(run, self.recipe, self.plan_json(), self.deepspeed)
        return run


def resolve(recipe: Recipe, nproc: int | None = None, objective: str = "throughput") -> Resolved:
    """Plan a recipe; for the objective `cost` also on smaller parts of the cluster."""
    registry = strategies.registry()
    name = recipe.strategy.name
    if name != "auto" and name not in registry:
        what = f"{name!r} is not a strategy; auto, {', '.join(registry)}{nearest(name, list(registry))}"
        raise BadInput(recipe.name, [Problem("strategy.name", what)])
    job = make_job(recipe, nproc)
    jobs = planner.smaller_clusters(job) if objective == "cost" else [job]
    known = _known(recipe)
    decisions = [
        planner.decide(one, judged(_keepable(recipe, strategies.propose(one, name)), known), objective) for one in jobs
    ]
    best = planner.best_of(decisions, objective)
    return Resolved(recipe=recipe, job=jobs[best], decision=decisions[best])


def proven(
    resolved: Resolved, again: Callable[[], Resolved], prove: Callable[[Axes], Verdict], say: Callable[[str], object]
) -> Resolved:
    """A decision whose chosen split is proven: what fails is remembered, and planning goes on without it."""
    recipe, config = resolved.recipe, raw_config(resolved.recipe.model)
    while resolved.decision.chosen is not None:
        axes = Axes.of(resolved.chosen.plan)
        if not axes.split or Proofs().get(config, recipe.model.attention, axes) is not None:
            break
        say("trying the split on a small twin of the model, in float64")
        Proofs().put(config, recipe.model.attention, axes, prove(axes))
        resolved = again()
    return resolved


def _keepable(recipe: Recipe, proposals: Iterable[Plan | Refusal]) -> Iterator[Plan | Refusal]:
    """Proposals, without those that can't save what the recipe asks to save."""
    for proposal in proposals:
        if isinstance(proposal, Plan) and proposal.ep > 1 and recipe.checkpoint.every > 0:
            reason = (
                "AutoEP keeps experts under names of its own, which our checkpoints do not know; use checkpoint.every 0"
            )
            yield Refusal(proposal.strategy, reason, proposal)
        else:
            yield proposal


def _known(recipe: Recipe) -> Callable[[Axes], Verdict | None]:
    """What earlier runs have proven of the recipe's model."""
    proofs, config = Proofs(), raw_config(recipe.model)
    return lambda axes: proofs.get(config, recipe.model.attention, axes)


def explain(decision: Decision) -> str:
    """Why no plan fits: one line a strategy and reason, the most frequent first."""
    reasons: dict[tuple[str, str], int] = {}
    for refusal in decision.refused:
        key = (refusal.strategy, refusal.reason)
        reasons[key] = reasons.get(key, 0) + 1
    shown = sorted(reasons.items(), key=lambda item: -item[1])[:8]
    lines = [f"no plan fits: {decision.considered} considered"]
    return "\n".join(lines + [f"  {strategy}: {reason}" for (strategy, reason), _ in shown])
