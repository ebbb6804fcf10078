"""The pages of `toolkit plan --html` and `toolkit scale --html`, opened in a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from benchmarks.harness.browser import dom
from strategies.hybrid import Hybrid
from strategies.pipeline import Pipeline
from strategies.zero import Zero
from tests.helpers.planning import LLAMA_3_8B, cluster, job
from toolkit.planner.search import Decision, decide
from toolkit.plans.plan import Job, Plan
from toolkit.reports.plan_page import recipe_for, render
from toolkit.reports.template import fill
from toolkit.sessions.scaling import scaling

RECIPE = {"name": "</script><b>sft", "model": {"path": "llama-3-8b"}, "strategy": {"name": "auto"}}
WORK = job(LLAMA_3_8B, cluster("H100-SXM5-80GB", nodes=2), global_batch=64, seq_len=4096)


@pytest.fixture(scope="module")
def decision() -> Decision:
    return decide(WORK, [*Zero().propose(WORK), *Pipeline().propose(WORK), *Hybrid().propose(WORK)])


@pytest.fixture(scope="module")
def page(decision: Decision) -> str:
    return render(decision, WORK, yaml.safe_dump(RECIPE))


def test_the_page_is_one_file_without_network(page: str) -> None:
    assert not re.search(r"""(src|href)\s*=\s*["']""", page)
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "</script><b>" not in page


def test_clicking_a_plan_shows_its_bars_timeline_and_recipe(page: str, decision: Decision, tmp_path: Path) -> None:
    place = next(i for i, option in enumerate(decision.ranked[:200]) if option.plan.pp > 1)
    option = decision.ranked[place]
    shown = dom(page, f"document.querySelectorAll('#plans tbody tr')[{place}].click()", tmp_path)
    name = re.search(r'<h2 id="name"[^>]*>([^<]*)<', shown)
    assert name
    assert name[1] == option.plan.describe()
    total = f"total {option.estimate.memory.total / 2**30:.1f} GiB"
    assert total in shown
    assert f"limit {option.estimate.memory_limit_bytes / 2**30:.1f} GiB" in shown
    assert shown.count('data-part="') > 6
    stages = set(re.findall(r'data-stage="(\d+)"', shown))
    assert len(stages) == min(option.plan.pp, 8)
    recipe = re.search(r'<pre id="recipe">(.*?)</pre>', shown, re.S)
    assert recipe
    fixed = yaml.safe_load(recipe[1].replace("&lt;", "<").replace("&gt;", ">"))["strategy"]
    assert (fixed["name"], fixed["pp"], fixed["micro_batch"]) == (
        option.plan.strategy,
        option.plan.pp,
        option.plan.micro_batch,
    )


def test_refusals_are_listed(page: str, decision: Decision, tmp_path: Path) -> None:
    shown = dom(page, "", tmp_path)
    assert decision.refused
    table = shown.split('id="refused"')[1]
    assert table.count("<tr>") == 1 + len(decision.refused)


def test_a_page_without_plans_says_so(tmp_path: Path) -> None:
    nothing = Decision(None, (), (), 0)
    assert "No plan fits." in dom(render(nothing, WORK, yaml.safe_dump(RECIPE)), "", tmp_path)


def test_the_recipe_fixes_what_the_plan_says() -> None:
    plan = Plan(strategy="hybrid", dp=2, tp=2, pp=4, zero_stage=1, zero_group=2, micro_batch=1, grad_accum=32)
    fixed = yaml.safe_load(recipe_for(plan, RECIPE))
    assert fixed["name"] == RECIPE["name"]
    assert fixed["strategy"] == {
        "name": "hybrid", "dp": 2, "tp": 2, "pp": 4, "zero_stage": 1, "micro_batch": 1, "grad_accum": 32,
        "recompute": "none",
    }  # fmt: skip


def test_scaling_curves_are_drawn(tmp_path: Path) -> None:
    def propose(grown: Job) -> object:
        return Zero().propose(grown)

    result = scaling(WORK, [8, 16, 32], {"zero": propose}, tokens=1e12, critical_batch=100)  # type: ignore[dict-item]
    json.dumps(result, allow_nan=False)
    shown = dom(fill("scale.html", {**result, "title": "a curve"}), "", tmp_path)
    assert shown.count("<polyline") == 2
    assert "passes the critical batch of 100 sequences" in shown
    assert shown.count("<circle") == 6


PHONE = "<style>html, body { width:390px }</style></head>"
"""Makes a page as narrow as a phone, whatever the browser's smallest window is."""


def test_pictures_fit_a_phone_with_labels_of_full_size(page: str, tmp_path: Path) -> None:
    shown = dom(page.replace("</head>", PHONE), "pick(0)", tmp_path)
    widths = [float(width) for width in re.findall(r'<svg width="([\d.]+)"', shown)]
    assert widths
    assert max(widths) <= 390
    assert "viewBox" not in shown, "a scaled picture shrinks its labels"
    assert 'data-part="margin"' in shown


def test_scaling_has_round_ticks_and_fits_a_phone(tmp_path: Path) -> None:
    result = scaling(WORK, [8, 16, 32], {"zero": Zero().propose})
    page = fill("scale.html", {**result, "title": "curve"}).replace("</head>", PHONE)
    shown = dom(page, "", tmp_path)
    labels = re.findall(r'text-anchor="end">([^<]*)<', shown)
    rates = [label for label in labels if "%" not in label]
    assert rates
    assert all(re.fullmatch(r"[125]0*([.,]\d+)*( M)?", label.replace(",", "")) for label in rates), rates
    assert {"0%", "50%", "100%"} <= set(labels) or {"0%", "25%"} <= set(labels)
    assert max(float(width) for width in re.findall(r'<svg width="([\d.]+)"', shown)) <= 390
