"""How a mixture's routers are balanced: what the recipe says, and otherwise what the model's config asks for.

And into how many parts the exchange of tokens between experts is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.errors import Problem
from toolkit.recipe.objective_sections import Router

WEIGHT_KEYS = ("router_aux_loss_coef", "aux_loss_coef", "aux_loss_alpha", "moe_loss_weight")
"""Keys of Hugging Face configs for the weight of a balancing loss."""
Z_KEYS = ("router_z_loss_coef", "router_z_loss_weight")
WEIGHT = 1e-3
"""Weight where neither recipe nor config gives one: the default of most configs."""

BIASED_LOAD, BALANCED_LOAD = 1.08, 1.36
"""Load of the busiest expert relative to the mean if a bias or a loss balances it, in the worst layer:
`python -m benchmarks.mixtures balance`, over 100,000 tokens, since single steps of its 2,048 tokens are noisier than
real ones."""

MOST_PARTS = 4
"""Parts of a rank's experts that exchange and compute in turns: of the exchange about 1 / parts is not overlapped."""


def exchange_parts(own_experts: int) -> int:
    """Parts that a rank's experts are cut into if they exchange between nodes.

    Inside a node exchanges slow down the products beside them by about as much as they hide (`Calibration`), and the
    parts' gradients must be copied into one."""
    return max(parts for parts in range(1, MOST_PARTS + 1) if own_experts % parts == 0)


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Resolved settings; the default leaves routers alone."""

    loss: str = "none"
    """`none`, `sequence` or `micro_batch`."""
    weight: float = 0.0
    """Factor of the balancing loss, 0 without one."""
    z_loss: float = 0.0
    """Factor of the mean squared log-sum-exp of the router's logits."""
    bias_update: float = 0.0
    """Step of the experts' biases after every update."""
    capacity_factor: float = 0.0
    """Most visits of an expert relative to an even share; 0: no limit."""
    asked: float = 0.0
    """Weight that the config asks for."""
    max_over_mean: float = 1.0
    """Load of the busiest expert relative to the mean, for the planner."""

    def expert_slots(self, experts: int, visits: int) -> float:
        """Rows that experts on several ranks get, full or empty, per visit of a token: an expert has at most one slot
        per token; 1 without a limit."""
        return min(self.capacity_factor, experts / visits) if self.capacity_factor and visits else 1.0

    def busiest_rank(self, own_experts: float) -> float:
        """Load of the busiest of several ranks relative to the mean: the loads of a rank's experts, taken to be
        independent, make up for each other."""
        return 1.0 + (self.max_over_mean - 1.0) / math.sqrt(own_experts)

    @property
    def has_loss(self) -> bool:
        """Whether routers get gradients besides those of the cross-entropy."""
        return self.weight > 0 or self.z_loss > 0

    @property
    def is_active(self) -> bool:
        """Whether anything changes what routers do besides the cross-entropy."""
        return self.has_loss or self.bias_update > 0 or self.capacity_factor > 0


def balance_of(section: Router | None, config: Mapping[str, Any]) -> Balance:
    """Settings of a recipe, completed by a model's config as it is written; a type's defaults do not count."""
    given = section or Router()
    asked = _first(config, WEIGHT_KEYS)
    if not asked and config.get("output_router_logits") is True:
        asked = WEIGHT
    z_loss = _first(config, Z_KEYS) if given.z_loss is None else given.z_loss
    loss = given.loss or ("sequence" if asked or given.weight else "none")
    weight = 0.0 if loss == "none" else given.weight or asked or WEIGHT
    return Balance(
        loss=loss, weight=weight, z_loss=z_loss, bias_update=given.bias_update or 0.0,
        capacity_factor=given.capacity_factor or 0.0, asked=asked, max_over_mean=_expected_load(given),
    )  # fmt: skip


def _expected_load(given: Router) -> float:
    """What the planner reckons with: no expert takes more visits than its capacity."""
    measured = BIASED_LOAD if given.bias_update else BALANCED_LOAD
    return min(given.max_over_mean or measured, given.capacity_factor or math.inf)


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> float:
    text = config.get("text_config")
    found = [section.get(key) for section in (config, text) if isinstance(section, Mapping) for key in keys]
    numbers = [float(value) for value in found if isinstance(value, int | float) and not isinstance(value, bool)]
    return next((value for value in numbers if value > 0), 0.0)


def balance_problems(
    section: Router | None, config: Mapping[str, Any], experts: int, precision: str
) -> Iterator[Problem]:
    """Settings for a dense model, and what fp16 can't do."""
    balance = balance_of(section, config)
    if config.get("output_router_logits") is True and not experts:
        what = "true given, but the model is dense and has no router losses; set it to false"
        yield Problem("model.config.output_router_logits", what)
    if section is not None and not experts:
        yield Problem("train.router", "given, but the model has no experts: it is dense; remove this key")
    elif experts and balance.has_loss and precision == "fp16":
        what = f"fp16 given with a router loss ({balance.loss}): its gradients do not follow fp16's loss scale"
        yield Problem("model.precision", f"{what}; use bf16, or train.router: {{loss: none, z_loss: 0}}")


def balance_lines(balance: Balance, experts_per_visit: float = math.inf) -> Iterator[str]:
    """What users should know about the balancing of a mixture, a sentence each.

    `experts_per_visit`: experts over visits of a token."""
    if balance.loss == "sequence":
        yield (
            f"routers are balanced by the loss of every sequence (train.router: sequence, weight {balance.weight:g}): "
            "the same under every split"
        )
    if balance.loss == "micro_batch":
        yield (
            f"train.router.loss micro_batch (weight {balance.weight:g}) is transformers' own definition: the result "
            "depends on micro_batch; sequence does not"
        )
    if 0 < experts_per_visit <= balance.capacity_factor:
        yield (
            f"train.router.capacity_factor {balance.capacity_factor:g} has room for every token in every expert: "
            "nothing is dropped, and the result is that without a limit"
        )
    elif balance.capacity_factor:
        yield (
            f"train.router.capacity_factor {balance.capacity_factor:g} drops visits to full experts: the result "
            "depends on micro_batch and differs from that without a limit; router.dropped in metrics.jsonl is the share"
        )
    if balance.loss == "none" and balance.asked and not balance.bias_update:
        yield (
            f"the model's config asks for a router loss of weight {balance.asked:g}, and train.router.loss is none: "
            "tokens may collapse onto a few experts"
        )


def exchange_line(balance: Balance, waits: int, slots: float) -> str:
    """What the exchange of expert parallel costs the host or the network.

    `waits`: mixture layers of a stage times micro-batches; `slots`: `Balance.expert_slots`."""
    if balance.capacity_factor:
        return (
            f"every expert has as many slots, full or empty: exchanges have fixed sizes, which are {slots:g} times "
            "those of even loads, and the host never waits for them"
        )
    return (
        f"the host waits for the device {waits} times per step, once per mixture layer and micro-batch: without a "
        "limit only the routers know the sizes of an exchange; train.router.capacity_factor fixes them"
    )
