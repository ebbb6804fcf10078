"""Keeps the routers of a model balanced, and counts the load that they give to each expert.

A hook on every router attaches its balancing loss to the weights of the chosen experts: their backward pass adds the
loss's gradient. So each layer needs its own logits only, on whichever pipeline stage it is, and everything is computed
once per micro-batch, in the backward pass, even if layers are recomputed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from toolkit.errors import BadInput
from toolkit.plans.router_balance import Balance
from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.distributed.process_group import HostSum, all_sum, device
from toolkit.runtime.layers.remembered import remembered
from toolkit.runtime.mixtures.balance_loss import (
    Limit,
    Slice,
    Tokens,
    capacity,
    expert_counts,
    micro_batch_loss,
    routed_tokens,
    sequence_loss,
    within_capacity,
    z_loss,
)
from toolkit.runtime.mixtures.routers import Routed, Router, RouterTable, bias_of, find_routers, read_output
from toolkit.runtime.models.micro_batch import MicroBatch


class RouterWatch(Protocol):
    """What an engine tells about its micro-batches, and gets back after a step."""

    def begin(self, batch: Sequence[MicroBatch], scale: float) -> None:
        """Start a step on these micro-batches, still on the host; `scale` multiplies all gradients of the step."""

    def expect(self, micro: MicroBatch) -> None:
        """Called before every forward pass, with the located micro-batch on the device."""

    def finish(self) -> torch.Tensor | None:
        """After the update: move biases; the step's figures (`run_dir.router_load`), still on the device.

        Collective."""

    def attach(self) -> None:
        """Called once the engine is made."""


class NoRouters:
    """`RouterWatch` of dense models."""

    def begin(self, batch: Sequence[MicroBatch], scale: float) -> None:
        """Nothing to count."""

    def expect(self, micro: MicroBatch) -> None:
        """Nothing to count."""

    def finish(self) -> torch.Tensor | None:
        """No figures."""
        return None

    def attach(self) -> None:
        """No biases."""


class SeveralStages:
    """`RouterWatch` of the stages of one pipeline rank, each of which is told about its own forward passes."""

    def __init__(self, stages: Sequence[RouterWatch]) -> None:
        self._stages = stages

    def begin(self, batch: Sequence[MicroBatch], scale: float) -> None:
        for stage in self._stages:
            stage.begin(batch, scale)

    def expect(self, micro: MicroBatch) -> None:
        """Stages are told one by one."""

    def finish(self) -> torch.Tensor | None:
        found = [figures for stage in self._stages if (figures := stage.finish()) is not None]
        if not found:
            return None
        # The number of layers is that of the full model; everything else is 0 for layers of other stages.
        return torch.cat([found[0][:1], torch.stack(found).sum(0)[1:]])

    def attach(self) -> None:
        for stage in self._stages:
            stage.attach()


class Balancer:
    """`RouterWatch` of the routers of this rank's part of a model."""

    def __init__(
        self, routers: Sequence[Router], table: RouterTable, balance: Balance, mesh: Mesh, own: Slice, limit: Limit
    ) -> None:
        """`table`: the routers of the full model; `own`: this rank's tokens of a micro-batch."""
        self.balance, self._mesh, self._own, self._limit = balance, mesh, own, limit
        self.layers = len(table.names)
        self._numbers = {name: number for number, name in enumerate(table.names)}
        self._biases: dict[str, tuple[torch.nn.Module, str, torch.Tensor]] = {}
        self._load = torch.zeros(self.layers, table.num_experts, dtype=torch.float64, device=device())
        """Tokens of each expert in this step, layers × experts; 0 for layers of other stages."""
        self._sums = torch.zeros(3, dtype=torch.float64, device=device())
        """What this step adds to the cross-entropy, its balancing loss before its factor, and dropped visits."""
        self._routed: HostSum | None = None
        self._queue: list[int] = []
        self._micro_batches, self._scale = 1, 1.0
        self._pass: _Pass | None = None
        for router in routers:
            router.module.register_forward_hook(functools.partial(self._hook, router))

    def hold_biases(self, model: torch.nn.Module, routers: Sequence[Router]) -> None:
        """Take over the biases that choose experts, in fp32: a 16-bit bias would lose small steps."""
        for router in routers:
            found = bias_of(model, router)
            kind = type(router.module).__name__
            if found is None:
                what = f"{kind} has no bias that chooses experts; use loss: sequence instead of bias_update"
                raise BadInput("train.router.bias_update", what)
            holder, name = found
            if name not in holder._buffers:
                what = f"the bias of {kind} is a frozen parameter, which ZeRO may shard; use loss: sequence"
                raise BadInput("train.router.bias_update", what)
            self._biases[router.name] = holder, name, holder._buffers[name].detach().float().clone()  # type: ignore[union-attr]

    def attach(self) -> None:
        """Put the fp32 biases back: DeepSpeed casts buffers to the run's precision."""
        for holder, name, value in self._biases.values():
            holder._buffers[name] = value.to(device())

    def begin(self, batch: Sequence[MicroBatch], scale: float) -> None:
        counts = [routed_tokens(micro) for micro in batch]
        self._queue, self._micro_batches, self._scale = counts, len(batch), scale
        self._routed = HostSum(sum(counts), self._mesh.token_host_group, self._mesh.token_ranks)
        self._sums.zero_()
        self._load.zero_()

    def expect(self, micro: MicroBatch) -> None:
        self._limit.applies = self._limit.factor > 0 and bool(self._queue)
        total = self._queue.pop(0) if self._queue else 0  # evaluations are not counted
        self._pass = _Pass(Tokens.of(micro, total, self._own)) if total else None

    def _hook(self, router: Router, _module: Any, _arguments: Any, output: Any) -> Any:
        running = remembered(lambda: self._pass)  # in a pipeline, others have passed when a layer is recomputed
        if running is None or not torch.is_grad_enabled():
            return None
        routed = read_output(router, output)
        if routed is None:
            if not self.balance.is_active:
                return None
            kind = type(router.module).__name__
            raise BadInput("train.router", f"{kind} does not return (logits, weights, experts); use loss: none")
        if self.balance.loss == "micro_batch":
            # transformers counts the largest scores, whatever a bias has chosen. Recomputing writes the same again.
            top = routed.logits.detach().softmax(-1).topk(routed.experts.shape[-1], -1).indices
            running.chosen[router.name] = expert_counts(running.tokens, top, routed.logits.shape[-1]).sum(0)
        weights = output[routed.carrier]
        if self.balance.capacity_factor:
            weights = weights * self._kept(routed, running)
        carried = _Attached.apply(  # type: ignore[no-untyped-call]
            weights, routed.logits, routed.experts, self, router, running
        )
        return tuple(carried if place == routed.carrier else one for place, one in enumerate(output))

    def _kept(self, routed: Routed, running: _Pass) -> torch.Tensor:
        """Which visits experts take, within their capacity for this rank's tokens."""
        num_experts = routed.logits.shape[-1]
        most = self._capacity(routed, running)
        return within_capacity(routed.experts, running.tokens.counts, num_experts, most)

    def _capacity(self, routed: Routed, running: _Pass) -> int:
        own = running.tokens.total // self._sequence_ranks
        return capacity(own, routed.experts.shape[-1], routed.logits.shape[-1], self.balance.capacity_factor)

    def gradient(self, router: Router, routed: Routed, running: _Pass) -> torch.Tensor | None:
        """Count the load of one router's tokens; the gradient of its losses by its logits, None without losses."""
        num_experts = routed.logits.shape[-1]
        counts = expert_counts(running.tokens, routed.experts, num_experts)
        load = counts.sum(0)
        self._load[self._numbers[router.name], :num_experts] += load
        if self.balance.capacity_factor:
            self._sums[2] += (load - self._capacity(routed, running)).clamp_min(0).sum()
        if not self.balance.has_loss:
            return None
        with torch.enable_grad():
            logits = routed.logits.detach().to(_wide(routed.logits.dtype)).requires_grad_()
            balanced, small = self._losses(router, logits, running, counts)
            added = balanced * self.balance.weight + small * self.balance.z_loss
            self._sums[:2] += torch.stack([added.detach(), balanced.detach()])
            (found,) = torch.autograd.grad(added * (self._scale * self._mesh.token_ranks), logits)
        return found.to(routed.logits.dtype)

    def _losses(
        self, router: Router, logits: torch.Tensor, running: _Pass, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both losses of a router, as parts of their means over the global batch and all layers."""
        assert self._routed is not None
        share = 1.0 / (max(self._routed.total // self._sequence_ranks, 1) * self.layers)
        balanced = logits.sum() * 0.0
        if self.balance.loss == "sequence":
            # On a sequence rank other ranks hold tokens of the same documents.
            whole = self._over_sequence(counts)
            balanced = sequence_loss(router.scores(logits), running.tokens, whole) * share
        elif self.balance.loss == "micro_batch":
            chosen = running.over_layers(self._over_sequence)
            rows = running.tokens.total * self.layers
            balanced = micro_batch_loss(logits.softmax(-1), running.tokens, chosen, rows)
            balanced = balanced / (self._micro_batches * self._mesh.plan.dp)
        return balanced, z_loss(logits, running.tokens) * share

    @property
    def _sequence_ranks(self) -> int:
        """Ranks that share the tokens of a sequence."""
        return self._mesh.token_ranks // self._mesh.plan.dp

    def _over_sequence(self, counts: torch.Tensor) -> torch.Tensor:
        return all_sum(counts.clone(), self._mesh.sequence_group) if self._sequence_ranks > 1 else counts

    def finish(self) -> torch.Tensor | None:
        self._pass = None
        found = self._mesh.sum_over_tokens(torch.cat([self._sums, self._load.flatten()]))
        load = found[len(self._sums) :].view_as(self._load)
        for name, (holder, key, _) in self._biases.items():
            own = load[self._numbers[name]]
            bias = holder._buffers[key]
            assert bias is not None
            bias += (self.balance.bias_update * torch.sign(own.mean() - own)).to(bias.dtype)
        if self._mesh.plan.tp * self._mesh.plan.pp > 1:
            found = self._mesh.sum_over_shards(found.clone()) / self._mesh.plan.tp
        return torch.cat([found.new_full((1,), float(self.layers)), found])


class _Pass:
    """One micro-batch on its way through the routers."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.chosen: dict[str, torch.Tensor] = {}
        """Router → how many tokens have each expert among their largest scores (`micro_batch` only)."""
        self._whole: torch.Tensor | None = None

    def over_layers(self, over_sequence: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Those counts, summed over all routers; call it in the backward pass only."""
        if self._whole is None:
            self._whole = over_sequence(torch.stack(list(self.chosen.values())).sum(0))
        return self._whole


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        carrier: torch.Tensor,
        logits: torch.Tensor,
        experts: torch.Tensor,
        balancer: Balancer,
        router: Router,
        running: _Pass,
    ) -> torch.Tensor:
        ctx.save_for_backward(logits, experts)
        ctx.balancer, ctx.router, ctx.running = balancer, router, running
        return carrier.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        logits, experts = ctx.saved_tensors
        found = ctx.balancer.gradient(ctx.router, Routed(logits, experts, 0), ctx.running)
        return gradient, found if ctx.needs_input_grad[1] else None, None, None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def watch_routers(
    model: torch.nn.Module,
    balance: Balance,
    mesh: Mesh,
    table: RouterTable,
    own: Slice = lambda micro: micro,
    limit: Limit | None = None,
) -> RouterWatch:
    """Balance and count the routers of this rank's part of a model; `table`: those of the full model.

    `limit`: what its experts on several ranks are told about dropped visits."""
    if not table.names:
        if balance.is_active:
            raise BadInput("train.router", "no router of a known form was found in the model; use loss: none")
        return NoRouters()
    routers = find_routers(model)
    made = Balancer(routers, table, balance, mesh, own, limit or Limit(balance.capacity_factor))
    if balance.bias_update:
        made.hold_biases(model, routers)
    return made
