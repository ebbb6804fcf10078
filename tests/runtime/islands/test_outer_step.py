"""The exchange between islands on real processes: what each has learned counts once, in few bits and a round late."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from toolkit.checkpoints import element_runs
from toolkit.plans.plan import Plan
from toolkit.recipe.batch_sections import Outer
from toolkit.runtime.checkpoint.fragments import WEIGHT, Fragment
from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.islands.engine import OuterStep
from toolkit.runtime.islands.quantize import BLOCK, QuantizedMean, pack, unpack
from toolkit.runtime.supervision.warm_pool import call_on_ranks

SIZE, ROUNDS = 1000, 6


class Weights:
    """A state of one tensor."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(SIZE)

    def fragments(self) -> Any:
        yield Fragment(name="w", kind=WEIGHT, shape=(SIZE,), region=element_runs.flat(0, SIZE), tensor=self.tensor)

    def refresh(self) -> None:
        """Nothing is derived."""


def change(island: int, number: int) -> torch.Tensor:
    """What an island learns in a round."""
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * island + number))


def trained(outer: Outer, islands: int, dp: int) -> list[torch.Tensor]:
    """As a rank: rounds of known changes, all settled at the end."""
    rank = torch.distributed.get_rank()
    mesh = Mesh(Plan(strategy="local_sgd", islands=islands, dp=dp, local_steps=2), rank, islands * dp)
    state = Weights()
    exchange = OuterStep(state, mesh, outer)  # type: ignore[arg-type]
    seen = []
    for number in range(ROUNDS):
        state.tensor.sub_(change(mesh.island, number))
        exchange.run()
        seen.append(state.tensor.clone())
    exchange.drain()
    return [*seen, state.tensor.clone()]


def caught_up(islands: int) -> list[torch.Tensor]:
    """As a rank: every round is two changes, and the last round's mean counts after the first."""
    rank = torch.distributed.get_rank()
    mesh = Mesh(Plan(strategy="local_sgd", islands=islands, local_steps=2), rank, islands)
    state = Weights()
    exchange = OuterStep(state, mesh, Outer(mode="overlap", delay_steps=1))  # type: ignore[arg-type]
    seen = []
    for number in range(ROUNDS):
        state.tensor.sub_(change(mesh.island, number))
        exchange.catch_up()
        seen.append(state.tensor.clone())
        state.tensor.sub_(change(mesh.island, 50 + number))
        exchange.run()
    exchange.drain()
    return [*seen, state.tensor.clone()]


def test_a_mean_may_count_some_steps_into_the_next_round() -> None:
    """From there on an island is ahead by what it has learned since the exchange began, and by nothing else."""
    rounds = [mean_change(2, number) + mean_change(2, 50 + number) for number in range(ROUNDS)]
    for rank, (*seen, end) in enumerate(call_on_ranks(caught_up, 2, nproc=2)):
        for number, place in enumerate(seen):
            shared = sum(rounds[:number], torch.zeros(SIZE))
            assert torch.allclose(place, -shared - change(rank, number), atol=1e-5)
        assert torch.allclose(end, -sum(rounds), atol=1e-5)


def mean_change(islands: int, number: int) -> torch.Tensor:
    return torch.stack([change(island, number) for island in range(islands)]).mean(dim=0)


@pytest.mark.parametrize(("islands", "dp"), [(2, 2), (3, 1)])
def test_every_change_counts_once(islands: int, dp: int) -> None:
    """Late or not; between two exchanges an island is ahead by its own last round, and by nothing else."""
    expected = -sum(mean_change(islands, number) for number in range(ROUNDS))
    for mode in ("wait", "overlap"):
        found = call_on_ranks(trained, Outer(mode=mode), islands, dp, nproc=islands * dp)  # type: ignore[arg-type]
        for rank, (*_, late, end) in enumerate(found):
            assert torch.allclose(end, expected, atol=1e-5)
            last = ROUNDS - 1
            own = mean_change(islands, last) - change(rank // dp, last) if mode == "overlap" else 0.0
            assert torch.allclose(late, expected + own, atol=1e-5)


def test_momentum_moves_a_round_late() -> None:
    outer = Outer(optimizer="nesterov", lr=0.5, momentum=0.8, mode="overlap")
    *_, end = call_on_ranks(trained, outer, 2, 1, nproc=2)[1]
    shared, momentum = torch.zeros(SIZE), torch.zeros(SIZE)
    for number in range(ROUNDS):
        momentum = 0.8 * momentum + mean_change(2, number)
        shared = shared - 0.5 * (mean_change(2, number) + 0.8 * momentum)
    assert torch.allclose(end, shared, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_packing_is_within_half_a_level(bits: int) -> None:
    values = torch.randn(8 * BLOCK) * torch.logspace(-3, 3, 8).repeat_interleave(BLOCK)
    packed = pack(values, bits)
    assert packed.dtype is torch.uint8
    num_bytes = values.numel() * bits // 8 + values.numel() // BLOCK * 4  # the numbers, and an fp32 scale per block
    assert packed.numel() == num_bytes
    levels = values.view(-1, BLOCK).abs().amax(dim=1) / (2 ** (bits - 1) - 1)
    assert ((unpack(packed, values.numel(), bits) - values).view(-1, BLOCK).abs().amax(dim=1) <= levels * 0.501).all()
    assert not unpack(pack(torch.zeros(BLOCK), bits), BLOCK, bits).any()


def repeated_mean(bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As a rank: the sum over rounds of means, and what is owed yet."""
    rank, error, total = torch.distributed.get_rank(), torch.zeros(SIZE), torch.zeros(SIZE)
    mean = QuantizedMean(bits, torch.distributed.group.WORLD, error)
    for number in range(ROUNDS):
        total += mean.mean(change(rank, number))
    return total, error


@pytest.mark.parametrize("bits", [8, 4])
def test_what_rounding_takes_is_given_back(bits: int) -> None:
    found = call_on_ranks(repeated_mean, bits, nproc=3)
    expected = sum(mean_change(3, number) for number in range(ROUNDS))
    owed = torch.stack([error for _, error in found]).mean(dim=0)
    for total, _ in found:
        assert torch.equal(total, found[0][0])
        assert not torch.allclose(total, expected, atol=1e-4)  # it was rounded
        assert torch.allclose(total + owed, expected, atol=1e-4)  # and nothing is lost
