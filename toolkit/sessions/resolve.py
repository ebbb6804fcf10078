"""From a recipe to everything a run needs: ranked plans, DeepSpeed config, run directory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

import strategies
from toolkit.cost.execution import of_plan
from toolkit.cost.timing import forward_time, hardware_flops, model_flops, teacher_pass_time
from toolkit.errors import BadInput, NoPlanFits, Problem
from toolkit.launching.launchers import accelerate_config
from toolkit.planner import search
from toolkit.planner.explain import caveats
from toolkit.planner.recipe_rules import keepable
from toolkit.planner.search import Decision, Option
from toolkit.plans.deepspeed_config import deepspeed_config
from toolkit.plans.job import make_job, raw_config, teacher_of
from toolkit.plans.plan import Job
from toolkit.plans.router_balance import exchange_line
from toolkit.plans.split_verdicts import Axes, Proofs, judged
from toolkit.plans.token_shares import why_whole
from toolkit.recipe.objective_sections import COMPARED
from toolkit.recipe.schema import nearest
from toolkit.recipe.sections import Recipe
from toolkit.run_dir import layout
from toolkit.run_dir.layout import RunDir
from toolkit.units import GIB
from toolkit.verdicts import Verdict

WORTH_SAYING = 1.2
"""Least gain in throughput at which islands are suggested."""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A recipe with its plans: everything known before a process starts."""

    recipe: Recipe
    job: Job
    decision: Decision

    @property
    def chosen(self) -> Option:
        """The plan to run; raises `NoPlanFits` if there is none."""
        if self.decision.chosen is None:
            raise NoPlanFits(explain(self.decision))
        return self.decision.chosen

    @property
    def deepspeed(self) -> dict[str, Any]:
        """The DeepSpeed config of the chosen plan."""
        return deepspeed_config(
            self.chosen.plan,
            self.recipe.train,
            params=round(self.job.model.params * of_plan(self.chosen.plan, self.job).trained_share),
            backend=self.job.cluster.device.backend,
            nvme_path=self.recipe.strategy.nvme_path,
        )

    def plan_json(self) -> dict[str, Any]:
        """Return plan.json: the plan, its predictions, the FLOPs behind MFU and HFU, and the memory and link limits."""
        cluster = self.job.cluster
        across = cluster.inter_bytes_per_second if cluster.nodes > 1 else cluster.intra_bytes_per_second
        return {
            **self.chosen.to_json(),
            "model_flops": model_flops(self.job),
            "hardware_flops": hardware_flops(self.chosen.plan, self.job),
            "peak_flops": cluster.device.peak_flops,
            "memory_limit_bytes": self.chosen.estimate.memory_limit_bytes,
            "link_bytes_per_second": across,
        }

    def write(self, path: Path, *, resuming: bool = False) -> RunDir:
        """Write recipe, plan and DeepSpeed config into a new run directory, or into that of a run that resumes."""
        section = self.recipe.checkpoint
        resuming = resuming or layout.can_resume(path, section.resume, section.every)
        run = RunDir(path) if resuming else layout.create(path)
        layout.write(run, self.recipe, self.plan_json(), self.deepspeed)
        return run

    def write_accelerate(self, run: RunDir) -> None:
        """Write the config with which `accelerate launch` starts the run."""
        cluster = self.job.cluster
        config = accelerate_config(run.deepspeed, self.chosen.plan.devices, cluster.device.backend, cluster.nodes)
        (run.path / "accelerate.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def resolve(
    recipe: Recipe, nproc: int | None = None, objective: str = "throughput", proofs: Proofs | None = None
) -> Resolved:
    """Plan a recipe; with the objective `cost`, also on fewer nodes of the cluster.

    `proofs`: verdicts on splits that are known; default: the user's.
    """
    registry = strategies.registry()
    name = recipe.strategy.name
    if name != "auto" and name not in registry:
        what = f"{name!r} is not a strategy; auto, {', '.join(registry)}{nearest(name, list(registry))}"
        raise BadInput(recipe.name, [Problem("strategy.name", what)])
    job = make_job(recipe, nproc)
    jobs = search.smaller_clusters(job) if objective == "cost" else [job]
    known = _known(recipe, proofs or Proofs())
    decisions = [
        search.decide(one, judged(keepable(recipe, strategies.propose(one, name)), known, one.fixed), objective)
        for one in jobs
    ]
    best = search.best_of(decisions, objective)
    return Resolved(recipe=recipe, job=jobs[best], decision=decisions[best])


def islands_gain(resolved: Resolved) -> str:
    """Say what islands would gain over the chosen plan on a cluster of several sites; empty if too little."""
    recipe, chosen = resolved.recipe, resolved.decision.chosen
    if recipe.strategy.name != "auto" or chosen is None or resolved.job.cluster.sites == 1:
        return ""
    proposals = keepable(recipe, strategies.propose(resolved.job, "local_sgd"))
    found = search.decide(resolved.job, proposals).chosen
    if found is None or found.estimate.tokens_per_second < WORTH_SAYING * chosen.estimate.tokens_per_second:
        return ""
    gain = found.estimate.tokens_per_second / chosen.estimate.tokens_per_second
    return (
        f"the link between sites is the bottleneck: {found.plan.describe()} would reach "
        f"{found.estimate.tokens_per_second:,.0f} tokens/s, {gain:.1f} times the chosen plan; its result differs from "
        "synchronous training; choose it with strategy.name=local_sgd"
    )


def proven(
    resolved: Resolved,
    again: Callable[[], Resolved],
    prove: Callable[[Axes], Verdict],
    report: Callable[[str], object],
    proofs: Proofs | None = None,
) -> Resolved:
    """Prove the chosen split; if it fails, remember that, plan again without it, and repeat.

    `again` plans the same recipe with the verdicts recorded so far, in `proofs` or in the user's cache.
    """
    recipe, config = resolved.recipe, raw_config(resolved.recipe.model)
    proofs = proofs or Proofs()
    while resolved.decision.chosen is not None:
        axes = Axes.of(resolved.chosen.plan)
        if not axes.split or proofs.get(config, recipe.model, axes) is not None:
            break
        report("checking the split on a tiny model of the same type")
        proofs.put(config, recipe.model, axes, prove(axes))
        resolved = again()
    return resolved


def _known(recipe: Recipe, proofs: Proofs) -> Callable[[Axes], Verdict | None]:
    """Return a look-up of the split verdicts recorded for the recipe's model."""
    config = raw_config(recipe.model)
    return lambda axes: proofs.get(config, recipe.model, axes)


def explain(decision: Decision) -> str:
    """Say why no plan fits: one line per strategy and reason, the most frequent first."""
    reasons: dict[tuple[str, str], int] = {}
    for refusal in decision.refused:
        key = (refusal.strategy, refusal.reason)
        reasons[key] = reasons.get(key, 0) + 1
    shown = sorted(reasons.items(), key=lambda item: -item[1])[:8]
    lines = [f"no plan fits: {decision.considered} considered"]
    return "\n".join(lines + [f"  {strategy}: {reason}" for (strategy, reason), _ in shown])


EARLY_STEPS = 8
"""Most steps between exchanges at which islands from random weights stay near synchronous training."""
TOO_EARLY = (
    "islands that begin with random weights and seldom exchange gain little from one another: use "
    "strategy.local_steps=4 with train.outer.bits=2, or train inside one site first and resume from there with "
    "checkpoint.resume"
)
ADAPTS = (
    "the run measures its steps and the link between islands, and chooses how often, in how many fragments and bits to "
    "exchange; the plan shows where it begins"
)


def plan_notes(resolved: Resolved) -> list[str]:
    """Return what a person should know about the chosen plan."""
    chosen, gain = resolved.decision.chosen, islands_gain(resolved)
    model, balance = resolved.job.model, resolved.job.workload.balance
    per_visit = model.experts / max(model.experts_per_token, 1)
    about = caveats(chosen.plan, resolved.recipe.train, balance, per_visit) if chosen else []
    fresh = resolved.recipe.model.init == "scratch" and resolved.recipe.checkpoint.resume in ("auto", "none")
    apart = chosen is not None and chosen.plan.islands > 1
    early = [TOO_EARLY] if chosen and apart and fresh and chosen.plan.local_steps > EARLY_STEPS else []
    adapts = [ADAPTS] if apart and resolved.job.workload.exchange.adapts else []
    details = (
        *_update_rules(resolved), *_objective_notes(resolved), *_whole_residuals(resolved), *_exchange(resolved),
    )  # fmt: skip
    return [*([gain] if gain else []), *early, *adapts, *about, *details]


def _exchange(resolved: Resolved) -> Iterator[str]:
    """Say what the exchange of tokens between experts costs besides its traffic."""
    chosen, model, balance = resolved.decision.chosen, resolved.job.model, resolved.job.workload.balance
    if chosen is None or chosen.plan.ep == 1:
        return
    waits = math.ceil(model.moe_layers / chosen.plan.pp) * chosen.plan.grad_accum
    yield exchange_line(balance, waits, balance.expert_slots(model.experts, model.experts_per_token))


def _objective_notes(resolved: Resolved) -> Iterator[str]:
    """Say what an objective or frozen weights change that neither the recipe nor the prediction shows."""
    recipe = resolved.recipe
    if recipe.train.objective == "contrastive":
        yield "contrastive computes embeddings twice, and both must agree: the model's dropout is off"
    yield from _first_pass(resolved)
    if recipe.model.freeze:
        yield "model.freeze: frozen weights are predicted as if they were trained; a step needs less memory and time"


def _first_pass(resolved: Resolved) -> Iterator[str]:
    """Say what a pass over the data takes that comes before the first step, or what a live model adds to each step."""
    train, job, chosen = resolved.recipe.train, resolved.job, resolved.decision.chosen
    if chosen is None or train.objective not in (*COMPARED, "distill"):
        return
    if train.reference == "live":
        of = "the adapters" if resolved.recipe.model.lora else "the weights"
        each = forward_time(chosen.plan, job).total
        yield f"the live reference keeps a copy of {of}, and adds {each:.3g} s to every step; cached adds none"
    elif train.has_live_teacher:
        assert job.workload.teacher is not None
        yield f"the live teacher keeps {job.workload.teacher.params / 1e9:.3g}B parameters beside the student's"
    elif train.distill is None:
        used = chosen.estimate.memory
        where = f"in less than {(used.total - used.grads) / GIB:.1f} GiB per device"
        yield _before(f"the reference, {where},", forward_time(chosen.plan, job).total, train.steps)
    else:
        teacher = teacher_of(train)
        size = f"{teacher.params * of_plan(chosen.plan, job).element_bytes / GIB:.1f} GiB"
        who = f"the teacher, complete on each rank ({size} of weights),"
        yield _before(who, teacher_pass_time(chosen.plan, job, teacher).total, train.steps)


def _before(who: str, each: float, steps: int | None) -> str:
    """What a pass before training takes; each sample is computed once, so more steps than the data has cost nothing."""
    most = f", at most {each * steps / 60:.3g} minutes" if steps else ""
    return (
        f"before the first step {who} computes every sample once: {each:.3g} s per global batch{most}; a second run on "
        "the same data does not repeat it"
    )


def _update_rules(resolved: Resolved) -> Iterator[str]:
    """Say which share of the parameters each of several update rules gets, and where packed states are not exact."""
    model, section, chosen = resolved.job.model, resolved.recipe.model, resolved.decision.chosen
    if chosen is not None and resolved.recipe.train.states == "8bit" and chosen.plan.tp > 1:
        yield (
            "8-bit states have blocks of 256 elements: tensor shards of columns that are not cut at multiples of that "
            "have blocks of their own, and losses differ slightly from one process's"
        )
    if resolved.recipe.train.optimizer == "muon":
        share = 1.0 if section.lora else sum(model.layer_params) / model.params
        yield (
            f"muon makes the updates of about {share:.1%} of the trained parameters orthogonal, the matrices of "
            "layers; AdamW updates the rest"
        )


def _whole_residuals(resolved: Resolved) -> Iterator[str]:
    """Say why tensor ranks hold complete residuals, if the recipe does not ask for that."""
    job, chosen = resolved.job, resolved.decision.chosen
    if chosen is None or chosen.plan.tp == 1 or chosen.plan.sequence_sharded or "sequence_sharded" in job.fixed:
        return
    shared = replace(Axes.of(chosen.plan), sequence_sharded=True)
    refused = (one.reason for one in resolved.decision.refused if one.plan and Axes.of(one.plan) == shared)
    reason = why_whole(job, chosen.plan.tp, chosen.plan.token_parts) or next(refused, "")
    yield f"every tensor rank holds the residuals of all tokens: {reason}"
