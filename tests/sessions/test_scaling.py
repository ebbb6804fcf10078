"""Scaling curves: arithmetic worked by hand on an invented curve, and the shape of real ones."""

from __future__ import annotations

import pytest

from strategies.zero import Zero
from tests.helpers.planning import LLAMA_2_7B, cluster, job
from toolkit.cost.estimate import Estimate, Memory, Time
from toolkit.errors import BadInput
from toolkit.planner.search import Option
from toolkit.plans.plan import Plan
from toolkit.sessions.scaling import Point, curve, diminishing, efficiencies, parse_devices, scaling, with_devices


def point(devices: int, rate: float) -> Point:
    time = Time(compute=0.75, dp_comm=0.25)
    estimate = Estimate(
        memory=Memory(), time=time, memory_limit_bytes=1, host_limit_bytes=1, tokens_per_second=rate, mfu=0.5
    )
    return Point(devices, devices, Option(Plan(strategy="zero"), estimate))


@pytest.mark.parametrize(
    ("text", "sizes"), [("8..64", [8, 16, 32, 64]), ("8..100", [8, 16, 32, 64]), ("64,8,8", [8, 64]), ("3..3", [3])]
)
def test_ranges_of_devices(text: str, sizes: list[int]) -> None:
    assert parse_devices(text) == sizes


@pytest.mark.parametrize("text", ["", "a..b", "8..", "0..8", "64..8", "-1,2", "1;2"])
def test_bad_ranges_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="--devices"):
        parse_devices(text)


def test_efficiency_is_relative_to_the_best_and_never_above_one() -> None:
    points = [Point(4, 4, None, "no room"), point(8, 100), point(16, 180), point(32, 240)]
    assert efficiencies(points) == pytest.approx([0, 1, 0.9, 0.6])
    offloaded_first = [point(8, 50), point(16, 200), point(32, 320)]
    assert efficiencies(offloaded_first) == pytest.approx([0.5, 1, 0.8])


def test_returns_diminish_where_a_doubling_brings_less_than_half() -> None:
    assert diminishing([point(8, 100), point(16, 180), point(32, 240)]) == 16
    assert diminishing([point(8, 100), point(16, 180)]) is None


def test_waiting_is_what_is_exposed() -> None:
    assert point(8, 1).exposed == pytest.approx(0.25)


def test_weak_scaling_grows_the_batch_and_strong_keeps_it() -> None:
    work = job(machines=cluster(nodes=2), global_batch=64)
    assert with_devices(work, 64, weak=True).workload.global_batch == 256
    assert with_devices(work, 64, weak=False).workload.global_batch == 64
    small = with_devices(work, 4, weak=True)
    assert (small.cluster.nodes, small.cluster.devices_per_node, small.workload.global_batch) == (1, 4, 16)
    with pytest.raises(BadInput, match="12 devices can't be spread over nodes of 8"):
        with_devices(work, 12, weak=True)


def test_a_real_curve_loses_efficiency_under_strong_scaling() -> None:
    work = job(LLAMA_2_7B, global_batch=64)
    points = curve(work, [8, 16, 64, 128], lambda grown: Zero().propose(grown), weak=False)
    rates = efficiencies(points)
    assert rates[0] > 0.95
    assert max(rates) == 1
    assert rates[2] < 0.95
    assert points[3].option is None
    assert "global batch 64 can't be split over 128" in points[3].reason


def test_budgets_are_days_and_device_hours() -> None:
    result = scaling(job(LLAMA_2_7B), [8], {"zero": lambda grown: Zero().propose(grown)}, tokens=1e9, critical_batch=32)
    one = result["strategies"]["zero"][0]
    assert one["days"] * 86400 == pytest.approx(1e9 / one["tokens_per_second"])
    assert one["device_hours"] == pytest.approx(one["days"] * 24 * 8)
    assert result["critical_batch"] == {"sequences": 32, "passed_at_devices": 8}
