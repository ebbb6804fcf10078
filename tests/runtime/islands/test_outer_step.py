"""The exchange between islands on real processes: what each has learned counts once, in few bits and a round late."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from toolkit.checkpoints import element_runs
from toolkit.plans.exchange import Exchange, Rhythm, exchange_of
from toolkit.plans.plan import Plan
from toolkit.recipe.batch_sections import Outer
from toolkit.runtime.checkpoint.fragments import WEIGHT, Fragment
from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.islands.outer_step import OuterStep
from toolkit.runtime.islands.quantize import BLOCK, Encoding, QuantizedMean
from toolkit.runtime.supervision.warm_pool import call_on_ranks

SIZE, ROUNDS = 1000, 6

pytestmark = pytest.mark.slow


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
    exchange = OuterStep(state, mesh, outer, exchange_of(outer, False, 2))  # type: ignore[arg-type]
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
    outer = Outer(mode="overlap", delay_steps=1)
    exchange = OuterStep(state, mesh, outer, exchange_of(outer, False, 2))  # type: ignore[arg-type]
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
    encoding = Encoding(bits)
    packed = encoding.pack(values)
    assert packed.dtype is torch.uint8
    num_bytes = values.numel() * bits // 8 + values.numel() // BLOCK * 4  # the numbers, and an fp32 scale per block
    assert packed.numel() == num_bytes == encoding.num_bytes(values.numel())
    levels = values.view(-1, BLOCK).abs().amax(dim=1) / (2 ** (bits - 1) - 1)
    wrong = (encoding.unpack(packed, values.numel()) - values).view(-1, BLOCK).abs().amax(dim=1)
    assert (wrong <= levels * 0.501).all()
    assert not encoding.unpack(encoding.pack(torch.zeros(BLOCK)), BLOCK).any()


@pytest.mark.parametrize(("density", "fewer", "lost"), [(1.0, 15.0, 0.14), (0.25, 12.0, 0.33), (0.05, 53.0, 0.76)])
def test_two_bits_keep_signs_and_sizes(density: float, fewer: float, lost: float) -> None:
    """Of normal numbers: bytes on the link against fp32, and the share of the square norm that is left for later."""
    values, encoding = torch.randn(40 * BLOCK + 17) * 3e-4, Encoding(2, density)
    packed = encoding.pack(values)
    assert packed.numel() == encoding.num_bytes(values.numel())
    assert 4 * values.numel() / packed.numel() > 0.97 * fewer  # the last block is padded
    found = encoding.unpack(packed, values.numel())
    assert float((found - values).square().sum() / values.square().sum()) < lost
    assert (found * values >= 0).all()
    sent = (found != 0).view(-1)[: 40 * BLOCK].view(-1, BLOCK)
    assert (sent.sum(dim=1) == encoding.kept).all()
    for block, row in zip(values[: 40 * BLOCK].view(-1, BLOCK).abs(), sent, strict=True):
        assert block[row].min() >= block[~row].max() if density < 1 else True
    assert not encoding.unpack(encoding.pack(torch.zeros(BLOCK)), BLOCK).any()


@pytest.mark.parametrize("encoding", [Encoding(8), Encoding(4), Encoding(2), Encoding(2, 0.05)])
def test_parts_of_a_long_change_are_encoded_as_if_alone(encoding: Encoding) -> None:
    """Longer than what is encoded at a time, and not a whole number of blocks."""
    size = 1200 * BLOCK + 17
    values = torch.randn(size)
    found = encoding.unpack(encoding.pack(values), size)
    for begin, end in ((0, 3 * BLOCK), (511 * BLOCK, 514 * BLOCK), (1199 * BLOCK, size)):
        alone = encoding.unpack(encoding.pack(values[begin:end]), end - begin)
        assert torch.equal(found[begin:end], alone)


@pytest.mark.parametrize("encoding", [Encoding(), Encoding(8), Encoding(4), Encoding(2), Encoding(2, 0.1)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_numbers_that_would_overflow_are_seen_before_they_are_decoded(encoding: Encoding, bad: float) -> None:
    size = 3 * BLOCK
    assert encoding.is_finite(encoding.pack(torch.randn(size)), size)
    packed = encoding.pack(torch.zeros(size))
    if encoding.bits == 32:
        packed.view(torch.float32)[-1] = bad
        assert encoding.is_finite(packed, size) == (bad == 3e38)
        return
    begin = size * encoding.kept // BLOCK * encoding.bits // 8  # of the scales, four bytes per block
    kind = torch.bfloat16 if encoding.bits == 2 else torch.float32
    packed[begin : begin + 4] = torch.tensor([bad, -bad][: 4 // kind.itemsize], dtype=kind).view(torch.uint8)
    assert not encoding.is_finite(packed, size)


def repeated_mean(encoding: Encoding) -> tuple[torch.Tensor, torch.Tensor]:
    """As a rank: the sum over rounds of means, and what is owed yet."""
    rank, error, total = torch.distributed.get_rank(), torch.zeros(SIZE), torch.zeros(SIZE)
    mean = QuantizedMean(torch.distributed.group.WORLD)
    for number in range(ROUNDS):
        total += mean.mean(change(rank, number), error, encoding)
    return total, error


@pytest.mark.parametrize("encoding", [Encoding(8), Encoding(4), Encoding(2), Encoding(2, 0.1)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_rounding_takes_is_given_back(encoding: Encoding, ranks: int) -> None:
    """Two ranks send each other everything; three compute the mean in parts, which are rounded again."""
    found = call_on_ranks(repeated_mean, encoding, nproc=ranks)
    expected = sum(mean_change(ranks, number) for number in range(ROUNDS))
    owed = torch.stack([error for _, error in found]).mean(dim=0)
    for total, _ in found:
        assert torch.equal(total, found[0][0])
        assert not torch.allclose(total, expected, atol=1e-4)  # it was rounded
        assert torch.allclose(total + owed, expected, atol=1e-4)  # and nothing is lost


def streamed(exchange: Exchange, then: Exchange | None) -> tuple[list[torch.Tensor], int]:
    """As a rank: a change per step, in a rhythm, and in another one from the middle on; all settled at the end."""
    rank = torch.distributed.get_rank()
    state, mesh = Weights(), Mesh(Plan(strategy="local_sgd", islands=2, local_steps=4), rank, 2)
    outer = OuterStep(state, mesh, Outer(mode="overlap"), exchange)  # type: ignore[arg-type]
    seen = []
    for number in range(1, 13):
        state.tensor.sub_(change(rank, number))
        outer.after_step(number)
        seen.append(state.tensor.clone())
        if number == 7 and then is not None:
            outer.follow(then.first())
    outer.drain()
    return [*seen, state.tensor.clone()], outer.use.sent_bytes


STREAM = Exchange(local_steps=4, fragments=4, hidden=True)


@pytest.mark.parametrize("then", [None, Exchange(local_steps=6, fragments=2, hidden=True)])
def test_fragments_in_turn_count_every_change_once(then: Exchange | None) -> None:
    """A fragment is exchanged every 4 steps and applied a step late; another rhythm in between loses nothing."""
    expected = -sum(mean_change(2, number) for number in range(1, 13))
    (first, sent), (second, _) = call_on_ranks(streamed, STREAM, then, nproc=2)
    for places in (first, second):
        assert torch.allclose(places[-1], expected, atol=1e-5)
    quarter = slice(BLOCK, 2 * BLOCK)  # the second fragment: sent after step 1, applied after step 2
    early = -mean_change(2, 1)[quarter] - change(0, 2)[quarter]
    assert torch.allclose(first[1][quarter], early, atol=1e-5)
    assert not torch.allclose(first[1][:BLOCK], -mean_change(2, 1)[:BLOCK] - change(0, 2)[:BLOCK], atol=1e-3)
    if then is None:  # 12 fragments in turn, and at the end the three that were not sent after the last step
        assert sent == pytest.approx(4 * (3 * SIZE + SIZE * 3 / 4), rel=0.05)


def test_few_bits_and_fragments_lose_nothing() -> None:
    exchange = Exchange(local_steps=4, fragments=2, bits=2, hidden=True)
    (first, sent), (second, _) = call_on_ranks(streamed, exchange, None, nproc=2)
    assert torch.equal(first[-1], second[-1])
    assert sent < 4 * SIZE * 4 / 12


def test_a_rhythm_fills_the_link_and_not_more() -> None:
    """Bits are saved first, then exchanges; everything follows the link."""
    auto = Exchange(local_steps=None, fragments=None, bits=None, hidden=True)
    assert auto.first() == Rhythm(4, 4, 2, 1)
    assert auto.chosen(fp32_seconds=0.5, step_seconds=1.0) == Rhythm(1, 1, 32, 1)
    assert auto.chosen(fp32_seconds=3.0, step_seconds=1.0) == Rhythm(1, 1, 8, 1)
    assert auto.chosen(fp32_seconds=10.0, step_seconds=1.0) == Rhythm(1, 1, 2, 1)
    assert auto.chosen(fp32_seconds=70.0, step_seconds=1.0) == Rhythm(6, 6, 2, 1)
    assert auto.chosen(fp32_seconds=700.0, step_seconds=1.0) == Rhythm(64, 16, 2, 4)
    assert auto.chosen(fp32_seconds=1e9, step_seconds=1.0).local_steps == 128
    few_bits = Exchange(local_steps=8, fragments=1, bits=None, hidden=True)
    assert few_bits.chosen(fp32_seconds=20.0, step_seconds=1.0) == Rhythm(8, 1, 8, 8)
    steps = Exchange(local_steps=None, fragments=2, bits=8, hidden=True)
    assert steps.chosen(fp32_seconds=9.0, step_seconds=1.0) == Rhythm(4, 2, 8, 2)
