"""Rehearse the chosen plan before a launch: a plan that does not fit is refused, and the next one is tried."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from toolkit.errors import NotRehearsable, RankFailed
from toolkit.plans.plan import Plan, Refusal
from toolkit.resources import user_cache
from toolkit.runtime.rehearsal.report import PARTS
from toolkit.sessions.rehearse import Rehearsal, rehearse, spec_of, verdict
from toolkit.sessions.resolve import Resolved
from toolkit.sessions.start import under
from toolkit.units import GIB
from toolkit.verdicts import Verdict, VerdictFile, installed

CACHE_NAME = "rehearsals.json"
LIBRARIES = ("torch", "deepspeed", "transformers", "zero-toolkit")
WITHOUT_EFFECT = ("steps", "epochs", "lr", "warmup", "schedule", "seed", "weight_decay", "betas", "eval_every")
"""Keys of `train` and of DeepSpeed's optimizer that do not change what a rank holds or sends."""
Report = Callable[[str], object]


def rehearsed(resolved: Resolved, report: Report, cache: Path | None = None) -> Resolved:
    """The job under the best plan that fits in rehearsal; without one, the decision has no chosen plan.

    Plans for CPUs are not rehearsed: their device is the machine itself, and a run's first step tells as much.
    """
    while resolved.decision.chosen is not None and resolved.job.cluster.device.backend != "cpu":
        found = known_verdict(resolved, cache)
        if found is None:
            report(f"rehearsing {resolved.chosen.plan.describe()}; --no-rehearse leaves it out")
            found = _judge(resolved, cache)
        report(f"rehearsal: {found.reason}")
        if found.ok:
            break
        resolved = _without_chosen(resolved, found.reason)
    return resolved


def known_verdict(resolved: Resolved, cache: Path | None = None) -> Verdict | None:
    """The verdict of an earlier rehearsal of the chosen plan with the same model, batch and library versions."""
    return _file(cache).get(_key(resolved))


def _judge(resolved: Resolved, cache: Path | None) -> Verdict:
    """Rehearse, and store the verdict. What can't be rehearsed passes, with the reason."""
    try:
        result = rehearse(resolved, _ranks(resolved.chosen.plan))
    except NotRehearsable as error:
        return Verdict(True, f"not possible: {error}")
    except RankFailed as error:
        return Verdict(True, f"failed, so nothing is known about the plan: {str(error).splitlines()[0]}")
    found = Verdict(result.fits and not result.mismatches, _reason(result))
    _file(cache).put(_key(resolved), found)
    return found


def _ranks(plan: Plan) -> str:
    """The first rank, and the first of a pipeline's last stage: the fullest ones. `toolkit rehearse` takes more."""
    return f"0,{plan.devices - plan.devices // plan.pp}" if plan.pp > 1 else "0"


def _reason(result: Rehearsal) -> str:
    """One line: the verdict, and what takes the bytes or which calls differ."""
    if result.mismatches:
        return f"collectives differ: {result.mismatches[0].what}"
    fullest = max(result.roles, key=result.needed_bytes)
    phase = max(fullest.phases, key=lambda phase: phase.device_peak_bytes)
    parts = ", ".join(f"{part} {phase.parts[part] / GIB:.1f}" for part in PARTS if phase.parts[part] > 0.05 * GIB)
    return f"{verdict(result)}; at the peak, in GiB: {parts or 'less than 0.1 each'}"


def _without_chosen(resolved: Resolved, reason: str) -> Resolved:
    """The job with its chosen plan refused and the next one that fits chosen, which a later resume keeps."""
    decision, refused = resolved.decision, resolved.chosen
    ranked = tuple(option for option in decision.ranked if option is not refused)
    refusal = Refusal(refused.plan.strategy, f"{refused.plan.describe()} {reason} (rehearsed)", refused.plan)
    chosen = next((option for option in ranked if option.estimate.fits), None)
    left = replace(decision, chosen=chosen, ranked=ranked, refused=(refusal, *decision.refused))
    resolved = replace(resolved, decision=left)
    return under(resolved, chosen) if chosen else resolved


def _file(cache: Path | None) -> VerdictFile:
    return VerdictFile(cache or user_cache() / CACHE_NAME, "plans are rehearsed again")


def _key(resolved: Resolved) -> str:
    """Cache key: all that a rank is rehearsed from, and the versions of the code that it runs."""
    spec = asdict(spec_of(resolved, resolved.chosen.plan))
    optimizer = spec["deepspeed"].get("optimizer") or {}
    for section in (spec["train"], optimizer.get("params", {})):
        for key in WITHOUT_EFFECT:
            section.pop(key, None)
    limit = resolved.chosen.estimate.memory_limit_bytes
    what = json.dumps([spec, limit, installed(LIBRARIES)], sort_keys=True, default=str)
    return f"{resolved.chosen.plan.strategy}:{hashlib.sha256(what.encode()).hexdigest()[:16]}"
