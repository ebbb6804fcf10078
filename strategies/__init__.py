"""The strategies and their registry: a literal table, plus entry points of the group `toolkit.strategies`.

May import `toolkit.plans` and `toolkit.recipe.axes`; no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points

from strategies.base import Proposal, Strategy
from strategies.data_parallel import DataParallel
from strategies.expert_parallel import ExpertParallel
from strategies.hybrid import Hybrid
from strategies.local_sgd import DIFFERS, LocalSgd
from strategies.pipeline import Pipeline
from strategies.sequence_parallel import SequenceParallel
from strategies.tensor_parallel import TensorParallel
from strategies.zero import Zero
from toolkit.plans.plan import Job, Plan, Refusal

STRATEGIES: dict[str, Strategy] = {
    "data_parallel": DataParallel(),
    "zero": Zero(),
    "tensor_parallel": TensorParallel(),
    "pipeline": Pipeline(),
    "hybrid": Hybrid(),
    "sequence_parallel": SequenceParallel(),
    "expert_parallel": ExpertParallel(),
    "local_sgd": LocalSgd(),
}


def registry() -> dict[str, Strategy]:
    """Built-in strategies and those of installed packages; a package can't replace a built-in name."""
    points = [point for point in entry_points(group="toolkit.strategies") if point.name not in STRATEGIES]
    return {**STRATEGIES, **{point.name: point.load()() for point in points}}


def get(name: str) -> Strategy:
    """The strategy of that name; raises `KeyError` if there is none."""
    return STRATEGIES[name] if name in STRATEGIES else registry()[name]


def propose(job: Job, name: str = "auto") -> Iterator[Proposal]:
    """Proposals of one strategy, or of all with `auto`."""
    chosen = list(registry().values()) if name == "auto" else [get(name)]
    for strategy in chosen:
        for proposal in strategy.propose(job):
            if name == "auto" and isinstance(proposal, Plan) and proposal.islands > 1:
                yield Refusal(proposal.strategy, DIFFERS, proposal)
            else:
                yield proposal
