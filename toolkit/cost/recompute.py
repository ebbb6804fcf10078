"""What the backward pass of a step recomputes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from toolkit.models.spec import ModelSpec
from toolkit.plans.plan import Plan


@dataclass(frozen=True)
class Recompute:
    """What the backward pass recomputes, as shares of a layer's forward pass."""

    matmul: float = 0.0
    attention: float = 0.0
    stream: float = 0.0
    traffic: float = 0.0
    """Share of tensor-parallel collectives that is repeated."""
    mlp_up: float = 0.0
    """Share of the first matmul of the MLP alone."""
    kept: float = 1.0
    """Share of a layer's activations that is kept for the backward pass, in addition to its input."""
    keeps_products: bool = False
    """Whether the outputs of matrix products and attention are kept, instead of a share of everything."""
    inputs_on_host: bool = False
    """Whether layer inputs are kept in host memory instead of on the device."""
    repeats_exchange: bool = False
    """Whether tokens are sent to experts and back again, even if tensor-parallel collectives are not repeated."""
    repeats_experts: bool = False
    """Whether the last product of experts is computed again: of `keeps_products` the last one of a layer is left out,
    but the gradient of a router's weights needs it."""

    @property
    def exchanged(self) -> float:
        """Share of the exchanges of experts that is repeated."""
        return 1.0 if self.repeats_exchange else self.traffic


RECOMPUTE = {
    "none": Recompute(),
    "full": Recompute(1, 1, 1, 1, kept=0.0),
    "selective": Recompute(stream=1, keeps_products=True),
    "offload": Recompute(1, 1, 1, 1, kept=0.0, inputs_on_host=True),
}
"""Values of a plan's `recompute`."""
CORE_ATTENTION = Recompute(attention=1, kept=1.0)
"""Megatron's selective recompute: the scores of attention only."""
REPEATED_TRAFFIC = 0.75
"""Two gathers and one reduce-scatter, of two each in a forward pass (rehearsed)."""


def planned(plan: Plan, model: ModelSpec) -> Recompute:
    """What a plan's backward pass recomputes.

    With shares of tokens, selective layers gather their inputs again, and repeat the product after attention: of its
    reduce-scatter only a share would be kept. With experts they repeat both exchanges, and the experts' last product
    where it is the layer's last one (rehearsed for Qwen3 30B): under ZeRO 3 that is kept, and experts that every token
    visits come after the routed ones.
    """
    found = RECOMPUTE[plan.recompute]
    if not found.keeps_products:
        return found
    active = max(model.layer_active_params)
    if plan.sequence_sharded:
        projection = model.heads * model.head_dim * model.hidden
        found = replace(found, traffic=REPEATED_TRAFFIC, matmul=projection / active)
    if model.experts:
        again = plan.zero_stage < 3 and not model.shared_ffn
        down = model.experts_per_token * model.expert_ffn * model.hidden if again else 0
        found = replace(found, repeats_exchange=True, repeats_experts=again, matmul=found.matmul + down / active)
    return replace(found, matmul=min(1.0, found.matmul))
