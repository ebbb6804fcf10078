"""`toolkit report`: the reader on damaged and long files, the terminal output, and the page in a browser."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.damaged_reports import attempt
from benchmarks.harness.browser import dom
from toolkit.cli import main
from toolkit.errors import BadInput
from toolkit.reports.curves import POINTS, extremes, means
from toolkit.reports.reader import read_run
from toolkit.reports.run_page import render

PARTS = {"data": 0.001, "forward": 0.03, "backward": 0.05, "grad_sync": 0.015, "optimizer": 0.003, "other": 0.001}


def record(step: int, **other: Any) -> dict[str, Any]:
    found = {
        "step": step, "loss": 5.0 / step, "lr": 1e-3, "grad_norm": 1.0, "tokens": 256, "step_seconds": 0.1,
        "tokens_per_second": 2560.0, "mfu": 0.4, "hfu": 0.5, "memory_bytes": 2**20, "comm_seconds": 0.01,
        "wall_seconds": 0.1, "time": 1.7e9 + step / 10, "parts": PARTS, "skipped": 0,
    }  # fmt: skip
    if step % 10 == 0:
        stats = {"min": 0.08, "mean": 0.09, "max": 0.12, "min_rank": 0, "max_rank": 1}
        found |= {
            "ranks": {"busy_seconds": stats, "memory_bytes": stats},
            "collectives": {"all_reduce/grad_sync": {"calls": 3, "bytes": 4096, "seconds": 0.012}},
            "straggler": {"rank": 1, "seconds": 0.03},
        }
    return {**found, **other}


def write_run(path: Path, records: list[dict[str, Any]], name: str = "tiny", tail: str = "") -> Path:
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records) + tail)
    (path / "recipe.yaml").write_text(f"name: {name!r}\ntrain: {{steps: {len(records)}}}\n")
    time = {"compute": 0.07, "dp_comm": 0.01, "optimizer": 0.004, "fixed": 0.001, "total": 0.085}
    plan = {"strategy": "zero", "dp": 2, "zero_stage": 2, "micro_batch": 4, "grad_accum": 1, "time": time}
    (path / "plan.json").write_text(json.dumps(plan | {"memory": {"total": 2**20}}))
    summary = {"status": "done", "memory_bytes_by_rank": [2**20, 2**21], "explanation": "links are slow"}
    summary["memory_parts"] = {"weights": {"predicted": 2**20, "measured": 3 * 2**19}}
    (path / "summary.json").write_text(json.dumps(summary))
    events = [{"time": 1.7e9, "step": 0, "kind": "start", "text": "started with 2 ranks, zero"}]
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "first", [record(step) for step in range(1, 41)], name="</script><b>tiny")


def test_damaged_files_are_reported_or_refused_without_a_crash(run: Path, tmp_path: Path) -> None:
    """A small share of `python -m benchmarks.damaged_reports`."""
    generator = random.Random(4)
    tries = [attempt(run, tmp_path, generator) for _ in range(25)]
    assert [(one.damage, one.argv[2:], one.outcome, one.text[-1000:]) for one in tries if not one.ok] == []
    assert {one.outcome for one in tries} == {"exit code 0", "exit code 2"}


def test_a_line_on_its_way_is_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path / "torn", [record(1), record(2)], tail='{"step": 3, "lo')
    assert read_run(path).steps.tolist() == [1, 2]


def test_a_broken_line_in_the_middle_costs_that_line_only(tmp_path: Path) -> None:
    path = write_run(tmp_path / "broken", [record(1)], tail='{"step": 2, "lo\n' + json.dumps(record(3, loss=1)) + "\n")
    found = read_run(path)
    assert found.steps.tolist() == [1, 3]
    assert found.rank_steps.tolist() == []
    assert found.scalars["loss"].tolist() == [5.0, 1.0]


def test_of_many_looks_at_all_ranks_the_slowest_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.reports.reader.MOST_DETAILED", 20)
    slow = {"busy_seconds": {"min": 0.1, "mean": 0.5, "max": 9.0, "min_rank": 0, "max_rank": 7}}
    records = [record(step) for step in range(1, 1001)]
    records[699]["ranks"] = slow
    for tail in ("", '{"step": 2, "lo\n' + json.dumps(record(1010)) + "\n"):  # as it should be, and with a broken line
        found = read_run(write_run(tmp_path / f"long{len(tail)}", records, tail=tail))
        assert len(found.rank_steps) < 40
        place = found.rank_steps.tolist().index(700)
        assert found.ranks["busy_seconds"]["max"][place] == 9.0
        assert found.ranks["busy_seconds"]["max_rank"][place] == 7
        assert found.ranks["memory_bytes"]["mean"][0] == 0.09


def test_losses_that_are_no_numbers_are_gaps(tmp_path: Path) -> None:
    path = write_run(tmp_path / "nan", [record(1), record(2, loss=math.nan), record(3, grad_norm=math.inf)])
    page = render([read_run(path)])
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert data["runs"][0]["curves"]["loss"]["y"] == [5.0, None, pytest.approx(5 / 3, rel=1e-5)]


def test_records_of_older_runs_are_read(tmp_path: Path) -> None:
    old = ("step", "loss", "lr", "grad_norm", "tokens", "step_seconds", "tokens_per_second", "mfu", "memory_bytes")
    path = write_run(tmp_path / "old", [{key: record(step)[key] for key in old} for step in range(1, 5)])
    assert main(["report", str(path)]) == 0
    render([read_run(path)])


@pytest.mark.parametrize("empty", [True, False])
def test_what_is_no_run_is_refused(tmp_path: Path, empty: bool, capsys: pytest.CaptureFixture[str]) -> None:
    if empty:
        (tmp_path / "metrics.jsonl").write_text("")
    assert main(["report", str(tmp_path)]) == BadInput.exit_code
    assert str(tmp_path) in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--html", str(run / "nowhere" / "page.html")]) == BadInput.exit_code
    assert "can't be written" in capsys.readouterr().err


def test_the_terminal_shows_predictions_parts_ranks_and_stragglers(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run)]) == 0
    shown = capsys.readouterr().out
    for text in ("forward and backward", "gradient synchronisation", "all_reduce/grad_sync", "rank 1", "done", "1.50"):
        assert text in shown, text


def test_islands_are_shown_over_time(tmp_path: Path) -> None:
    """Two asynchronous islands, one of which has dropped updates of the other; times that are missing are gaps."""
    records = []
    for step in range(1, 21):
        island = step % 2
        exchange = {"island": island, "islands": 2, "rounds": step // 4, "staleness": 1, "sent_bytes": 1000 * step,
                    "busy_seconds": 0.01 * step, **({"dropped_updates_of_0": 3} if island else {})}  # fmt: skip
        records.append(record(step, exchange=exchange, **({"time": None} if step == 7 else {})))
    page = render([read_run(write_run(tmp_path / "islands", records))])
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    first, second = data["runs"][0]["islands"]
    assert (first["island"], first["steps"], first["ignored"]) == (0, 10, "")
    assert second["ignored"] == "dropped updates of 0: 3"
    assert second["sent"] == 19000
    assert None in second["minutes"]
    assert render(
        [read_run(write_run(tmp_path / "odd", [record(1, exchange={"island": "x", "time": [1]}), record(2)]))]
    )


def test_objectives_and_evaluations_are_curves(tmp_path: Path) -> None:
    figures = {1: {"margin": 0.1}, 3: {"margin": 0.3, "accuracy": 0.75}}
    path = write_run(tmp_path / "dpo", [record(step, preference=figures.get(step)) for step in range(1, 5)])
    held_out = [{"step": 2, "loss": 0.7, "accuracy": 0.5}, {"step": 4, "loss": 0.6, "accuracy": 1.0, "tokens": 9}]
    (path / "eval.jsonl").write_text("".join(json.dumps(one) + "\n" for one in held_out) + '{"step": 5, "lo')
    found = read_run(path)
    assert found.figures["preference.margin"].tolist() == pytest.approx([0.1, math.nan, 0.3, math.nan], nan_ok=True)
    page = render([found])
    curves = json.loads(page.split('id="data">')[1].split("</script>")[0])["runs"][0]["curves"]
    assert curves["preference.accuracy"]["y"] == [None, None, 0.75, None]
    assert curves["eval.loss"] == {"x": [2, 4], "y": [0.7, 0.6]}
    titles = dom(page, "", tmp_path)
    assert all(title in titles for title in ("Rewards", "Accuracy"))
    assert "Ranking and retrieval" not in titles.partition("<script")[0]


def test_rare_parts_count_with_their_share_of_each_step(tmp_path: Path) -> None:
    rare = {**PARTS, "evaluate": 1.0}
    path = write_run(
        tmp_path / "rare", [record(step, parts=rare if step % 10 == 0 else PARTS) for step in range(1, 44)]
    )
    found = read_run(path).mean_parts()
    assert found["evaluate"] == pytest.approx(4 / 40)
    assert found["forward"] == pytest.approx(PARTS["forward"])


def test_several_runs_are_compared(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_run(tmp_path / "second", [record(step, loss=1.0) for step in range(1, 4)])
    assert main(["report", str(run), str(other)]) == 0
    shown = capsys.readouterr().out
    assert "first" in shown
    assert "second" in shown
    assert "train.steps" in shown


@pytest.mark.slow
def test_the_page_in_a_browser(run: Path, tmp_path: Path) -> None:
    page = render([read_run(run)])
    assert len(page.encode()) < 8e6
    assert not re.search(r"""<(script|link|img)[^>]+(src|href)\s*=""", page)
    assert "</script><b>" not in page
    shown = dom(page, "", tmp_path)
    assert shown.count('class="main-svg"') >= 2 * 8  # plotly makes two a chart, at least
    assert "links are slow" in shown
    text = re.sub(r"<[^>]+>", " ", shown.split('id="stragglers"')[1].split("</table>")[0])
    assert "rank 1" in text
    assert "30.0 ms" in text
    assert "1.50 ×" in shown.split('id="memory-parts"')[1].split("</table>")[0]
    assert (
        "1.14 ×" in shown.split('id="predictions"')[1].split("</table>")[0]
    )  # 80 ms of forward and backward, 70 predicted


@pytest.mark.slow
def test_the_page_of_several_runs_in_a_browser(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "second", [record(step, loss=1.0) for step in range(1, 4)])
    shown = dom(render([read_run(run), read_run(other)]), "", tmp_path)
    assert "train.steps" in shown.split('id="differing"')[1].split("</table>")[0]
    assert "second" in shown.split('id="side-by-side"')[1].split("</table>")[0]


def test_extremes_survive_thinning() -> None:
    values = np.sin(np.arange(1_000_000) / 1000)
    values[123_456], values[777_777], values[500_000] = 50.0, -50.0, math.nan
    kept = extremes(values)
    assert len(kept) < 2 * POINTS
    assert {0, 123_456, 777_777, 500_000, 999_999} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()
    assert means(np.full(10_001, 2.0)).tolist() == pytest.approx([2.0] * (POINTS // 4))
