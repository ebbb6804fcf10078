"""Islands that train by themselves and exchange weights every so many steps.

Each island is an ordinary engine with its own ZeRO group. Ranks with the same place in their islands hold the same
fragments of the fp32 masters, so the exchange is one reduction between them, sharded as the island is; what islands
share is never gathered on one rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import deepspeed.comm as dist
import torch

from toolkit.recipe import Outer
from toolkit.runtime.clock import Clock, NoClock, part
from toolkit.runtime.data import MicroBatch
from toolkit.runtime.distributed import device
from toolkit.runtime.engine import ReplicaEngine, StepResult, Sums
from toolkit.runtime.fragments import BUFFER, WEIGHT, Fragment, Stateful
from toolkit.runtime.mesh import Mesh

MOMENTUM = "outer_momentum"
"""Kind of the outer optimizer's state in checkpoints."""
FOREIGN = "@"
"""In a kind: which island it is of, for states that islands do not share."""


class IslandEngine:
    """One rank of an island."""

    def __init__(self, inner: ReplicaEngine, mesh: Mesh, outer: Outer, last_step: int) -> None:
        self._inner, self._mesh, self._last_step = inner, mesh, last_step
        self._clock: Clock = NoClock()
        self._state = IslandState(inner.state, mesh, momentum=outer.optimizer == "nesterov")
        self._exchange = Exchange(self._state, mesh, outer)

    @property
    def replica(self) -> int:
        return self._mesh.island * self._mesh.plan.dp + self._mesh.data

    @property
    def state(self) -> Stateful:
        return self._state

    @property
    def module(self) -> torch.nn.Module:
        """The model inside the engine."""
        return self._inner.module

    def step(self, batch: Sequence[MicroBatch]) -> StepResult:
        result = self._inner.step(batch)
        done = int(self._state.counters()["scheduler_steps"])
        if done % self._mesh.plan.local_steps and done != self._last_step:
            return replace(result, tokens=result.tokens * self._mesh.plan.islands)
        with part(self._clock, "grad_sync"):
            self._exchange.run()
            return self._together(result)

    def evaluate(self, batch: Sequence[MicroBatch]) -> Sums:
        found = self._inner.evaluate(batch)
        values = torch.tensor([found.loss, found.counted, found.correct or 0], dtype=torch.float64, device=device())
        dist.all_reduce(values, group=self._mesh.island_group)
        correct = None if found.correct is None else int(values[2])
        return Sums(float(values[0]), int(values[1]), correct)

    def watch(self, clock: Clock) -> None:
        self._clock = clock
        self._inner.watch(clock)

    def _together(self, result: StepResult) -> StepResult:
        """At an exchange, loss and tokens are those of all islands; between two, of the own island."""
        sums = torch.tensor([float(result.loss) * result.tokens, result.tokens], dtype=torch.float64, device=device())
        dist.all_reduce(sums, group=self._mesh.island_group)
        tokens = int(sums[1])
        return replace(result, loss=(sums[0] / max(tokens, 1)).to(result.loss.dtype), tokens=tokens)


class Exchange:
    """Brings the islands' masters together."""

    def __init__(self, state: IslandState, mesh: Mesh, outer: Outer) -> None:
        self._state, self._mesh, self._outer = state, mesh, outer

    @torch.no_grad()
    def run(self) -> None:
        """One exchange. Collective over the ranks with the same place in their islands, then over the island."""
        masters = self._state.masters()
        found = self._mean(flat(masters))
        if self._outer.optimizer == "nesterov":
            found = self._moved(found)
        begin = 0
        for tensor in masters:
            tensor.copy_(found[begin : begin + tensor.numel()].view_as(tensor))
            begin += tensor.numel()
        self._state.refresh()

    def _mean(self, own: torch.Tensor) -> torch.Tensor:
        """Over islands. Ranks that all hold everything share the work: each exchanges its part, the island joins."""
        plan, ranks = self._mesh.plan, self._mesh.plan.dp
        if plan.zero_stage or ranks == 1:
            dist.all_reduce(own, group=self._mesh.island_group)
            return own / plan.islands
        width = -(-own.numel() // ranks)
        whole = torch.nn.functional.pad(own, (0, width * ranks - own.numel()))
        piece = whole[self._mesh.data * width : (self._mesh.data + 1) * width].clone()
        dist.all_reduce(piece, group=self._mesh.island_group)
        dist.all_gather_into_tensor(whole, piece / plan.islands, group=self._mesh.data_group)
        return whole[: own.numel()]

    def _moved(self, mean: torch.Tensor) -> torch.Tensor:
        """The mean change since the last exchange is a gradient for SGD with Nesterov momentum."""
        anchor, momentum = self._state.anchor, self._state.momentum
        change = anchor - mean
        momentum.mul_(self._outer.momentum).add_(change)
        return anchor - self._outer.lr * (change + self._outer.momentum * momentum)


class IslandState:
    """`Stateful` of an island: masters are shared by all, moments are the island's own, the outer state is shared."""

    def __init__(self, inner: Stateful, mesh: Mesh, *, momentum: bool) -> None:
        self._inner, self._mesh = inner, mesh
        self._own_kinds: Mapping[str, Collection[str]] | None = None
        masters = flat(self.masters())
        self.anchor = masters if momentum else masters[:0].clone()
        """Masters after the exchange before: what the outer optimizer moves."""
        self.momentum = torch.zeros_like(self.anchor)

    def _weights(self) -> list[Fragment]:
        return [fragment for fragment in self._inner.fragments() if fragment.kind == WEIGHT]

    def masters(self) -> list[torch.Tensor]:
        """This rank's masters, as the optimizer works on them."""
        return [fragment.tensor for fragment in self._weights()]

    def fragments(self) -> Iterator[Fragment]:
        island, begin = self._mesh.island, 0
        for fragment in self._inner.fragments():
            shared = fragment.kind in (WEIGHT, BUFFER)
            if shared and island:
                yield replace(fragment, copy=fragment.copies)  # the first island saves it
            else:
                yield fragment if shared else replace(fragment, kind=self._kind(fragment))
            if fragment.kind == WEIGHT and len(self.momentum):
                size = fragment.tensor.numel()
                state = replace(fragment, kind=MOMENTUM, tensor=self.momentum[begin : begin + size])
                yield replace(state, copy=state.copies) if island else state
                begin += size

    def _kind(self, fragment: Fragment) -> str:
        """Under its own name on the first island, and where a checkpoint of other islands is read."""
        own = f"{fragment.kind}{FOREIGN}{self._mesh.island}"
        if not self._mesh.island or (self._own_kinds and own not in self._own_kinds[fragment.name]):
            return fragment.kind
        return own

    def prepare(self, kinds: Mapping[str, Collection[str]], steps: int) -> None:
        self._own_kinds = kinds
        self._inner.prepare(kinds, steps)

    def refresh(self) -> None:
        self._inner.refresh()
        if len(self.anchor):
            self.anchor.copy_(flat(self.masters()))
        self._own_kinds = None

    def counters(self) -> dict[str, float]:
        return self._inner.counters()

    def set_counters(self, counters: dict[str, float]) -> None:
        self._inner.set_counters(counters)


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of all of them, end to end."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors]) if tensors else torch.zeros(0, device=device())
