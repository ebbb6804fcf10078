"""One order for every world: nothing is repeated, nothing skipped, whatever stops and resumes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.recorded_order import missed_and_repeated, steps_of, stopping_at, strategy
from tests.conftest import Trainer
from toolkit.errors import Preempted
from toolkit.runtime.data.sample_order import PAST_END, MixturePart, SampleOrder, joined, mixture, own_share

pytestmark = pytest.mark.slow

WORLDS = (1, 2, 4, 8)


def test_each_epoch_visits_every_sample_once_in_another_order() -> None:
    order = SampleOrder(samples=10, global_batch=4, seed=3)
    ids = np.concatenate([order.step(step) for step in range(5)])
    first, second = ids[:10], ids[10:20]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first.tolist() != second.tolist()
    assert first[:4].tolist() != SampleOrder(samples=10, global_batch=4, seed=4).step(0).tolist()


@settings(max_examples=60, deadline=None)
@given(samples=st.integers(8, 300), seed=st.integers(0, 9), grouped=st.booleans(), data=st.data())
def test_worlds_share_the_same_steps_and_a_resume_loses_nothing(
    samples: int, seed: int, grouped: bool, data: st.DataObject
) -> None:
    """Over two epochs, with stops at random points after which the world and the global batch differ."""
    lengths = np.random.default_rng(seed).integers(1, 99, samples) if grouped else None
    seen: list[int] = []
    order = SampleOrder(samples=samples, global_batch=8, seed=seed, total=2 * samples, lengths=lengths)
    step, position = 0, 0
    while position < 2 * samples:
        batch = 8 * data.draw(st.integers(1, 3))
        order = SampleOrder(samples=samples, global_batch=batch, seed=seed, total=2 * samples, lengths=lengths)
        order = order.moved(step, position)
        for _ in range(data.draw(st.integers(1, 12))):
            ids = order.step(step)
            for world in WORLDS:
                shares = [own_share(ids, replica=replica, replicas=world) for replica in range(world)]
                assert np.concatenate(shares).tolist() == ids.tolist()
            seen += [int(i) for i in ids if i != PAST_END]
            step += 1
        position = order.position(step)
    assert len(seen) == 2 * samples
    assert sorted(seen[:samples]) == sorted(seen[samples:]) == list(range(samples))


def test_the_last_batch_is_partial() -> None:
    order = SampleOrder(samples=10, global_batch=4, seed=0, total=10)
    assert (order.step(2) == PAST_END).tolist() == [False, False, True, True]
    assert sorted(np.concatenate([order.step(step) for step in range(3)]))[2:] == list(range(10))


def test_neighbours_are_of_like_length() -> None:
    lengths = np.random.default_rng(0).integers(1, 2000, 4096)
    spread = {
        name: np.mean([np.ptp(lengths[order.step(step)]) for step in range(256)])
        for name, order in {
            "grouped": SampleOrder(samples=4096, global_batch=16, seed=0, lengths=lengths),
            "shuffled": SampleOrder(samples=4096, global_batch=16, seed=0),
        }.items()
    }
    assert spread["grouped"] < 0.1 * spread["shuffled"]


def test_mixtures_draw_by_weight_and_walk_through_every_source() -> None:
    parts = mixture([100, 20], [1.0, 1.0])
    assert parts == (MixturePart(100, 60), MixturePart(20, 60))
    order = SampleOrder(samples=120, global_batch=120, seed=0, parts=parts)
    epochs = [order.step(step) for step in range(5)]
    for ids in epochs:
        assert (ids < 100).sum() == 60
        assert np.bincount(ids[ids >= 100] - 100).tolist() == [3] * 20
    large = np.concatenate([ids[ids < 100] for ids in epochs])
    assert np.bincount(large).tolist() == [3] * 100, "three passes over the large source in five epochs"


@pytest.mark.parametrize("weights", [[1.0, 2.0, 3.0], [0.001, 1.0, 1.0]])
def test_mixtures_are_as_long_as_all_sources_and_leave_none_out(weights: list[float]) -> None:
    parts = mixture([10, 11, 12], weights)
    assert abs(sum(part.drawn for part in parts) - 33) <= 1
    assert min(part.drawn for part in parts) >= 1


EPOCHS = "train={global_batch: 8, epochs: 2, lr: 0.01}"


def test_real_runs_take_the_same_samples_and_lose_none_when_stopped(train: Trainer, tmp_path: Path) -> None:
    """Two epochs, stopped twice, resumed with other processes under other strategies: as one process took them."""
    given = (EPOCHS, "metrics.sample_ids=true", "data.seq_len=60")
    one = steps_of(train(*given, strategy("zero", 1), nproc=1).run)
    for stop, name, world in [(4, "zero", 2), (9, "pipeline", 4), (None, "tensor_parallel", 2)]:
        enter = stopping_at(stop) if stop else None
        done = train(*given, strategy(name, world), nproc=world, into=tmp_path / "run", enter=enter, check=not stop)
        assert set(done.codes) == ({Preempted.exit_code} if stop else {0})
    found = steps_of(done.run)
    assert [set(step) for step in found] == [set(step) for step in one]
    assert missed_and_repeated(found, epochs=2) == (0, 0)


def test_ranks_of_a_replica_must_have_taken_the_same() -> None:
    assert joined([(1, [4, PAST_END]), (0, [2, 3]), (1, [4, PAST_END])]) == [2, 3, 4]
    with pytest.raises(RuntimeError, match=r"rank 2 of replica 1 used samples \[5\]"):
        joined([(1, [4]), (0, [2]), (1, [5])])
