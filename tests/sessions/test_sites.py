"""Unequal sites: each gets its own plan, and is told whether it is worth its link."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.errors import BadInput
from toolkit.recipe.file import make_recipe
from toolkit.recipe.sections import ClusterSection, Recipe
from toolkit.sessions.resolve import resolve
from toolkit.sessions.sites import plan_sites, site_of

SITES = [
    {"nodes": 4, "price_per_device_hour": 2.5},
    {"nodes": 1, "device": "A100-SXM4-80GB", "price_per_device_hour": 1.2},
    {"nodes": 1, "site_gbps": 0.01},
]


def recipe(**changes: Any) -> Recipe:
    given: dict[str, Any] = {
        "name": "sites",
        "model": {"path": "meta-llama/Llama-3.1-8B", "init": "scratch"},
        "data": {"path": "synthetic", "seq_len": 4096},
        "train": {"global_batch": 288, "steps": 100, "outer": {"mode": "async", "bits": 2}},
        "strategy": {"name": "local_sgd", "local_steps": 20},
        "cluster": {"device": "H100-SXM5-80GB", "site_gbps": 1, "sites": SITES},
    }
    return make_recipe({**given, **changes})


def test_each_site_has_a_plan_and_a_worth() -> None:
    large, small, cut_off = plan_sites(recipe())
    assert [site.resolved.chosen.plan.dp for site in (large, small, cut_off)] == [32, 8, 8]
    assert small.resolved.job.cluster.device.name == "A100-SXM4-80GB"
    assert large.tokens_per_second > 4 * small.tokens_per_second > 0
    assert large.price_per_hour == 80
    assert "take 4" in large.verdict
    assert "not worth its link" in cut_off.verdict
    # By hand: 2.125 bits of 8.03 billion numbers; the small site hears of the rounds of both others.
    assert small.update_bytes == pytest.approx(8.03e9 * 2.125 / 8, rel=1e-3)
    others = sum(site.update_bytes / site.round_seconds for site in (large, cut_off))
    assert small.link_use == pytest.approx(others / 125e6)


def test_a_site_trains_with_its_own_cluster() -> None:
    own = site_of(recipe(), 1)
    assert isinstance(own.cluster, ClusterSection)
    assert (own.cluster.device, own.cluster.sites, own.strategy.islands) == ("A100-SXM4-80GB", 3, 3)
    with pytest.raises(BadInput, match="0 to 2"):
        site_of(recipe(), None)
    with pytest.raises(BadInput, match="planned by"):
        resolve(recipe())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"strategy": {"name": "zero"}}, "unequal sites are islands"),
        ({"train": {"global_batch": 288, "steps": 1}}, "must not wait"),
        ({"strategy": {"name": "local_sgd", "islands": 2}}, "2 given for 3 sites"),
        ({"cluster": {"device": "H100-SXM5-80GB", "sites": [{"nodes": 1}, {"nodes": 2}]}}, "site_gbps"),
        ({"cluster": {"device": "H100-SXM5-80GB", "site_gbps": 1, "sites": [{"node": 1}, {}]}}, "unknown key"),
    ],
)
def test_bad_lists_of_sites(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        plan_sites(recipe(**changes))
