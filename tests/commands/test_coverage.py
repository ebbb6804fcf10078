"""`toolkit coverage`: the table it writes, and the cache it continues from."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.cli import main
from toolkit.commands.coverage import markdown
from toolkit.runtime.proofs.coverage import Result
from toolkit.runtime.supervision.warm_pool import call_on_ranks
from toolkit.sessions.parity import Row

pytestmark = pytest.mark.slow

OK = Result(status="ok", loss_difference=1e-7, norm_difference=2e-7)
LATE = Result(status="timeout", reason="no answer within 240 s")
ROWS = {
    "llama": Row("4 layers", {"zero-3": OK, "pipeline": OK}),
    "hrm_text": Row("6 layers", {"zero-3": OK, "pipeline": Result(status="refused", reason="layers run six times")}),
    "odd": Row("", {case: Result(status="untrainable", reason="no forward") for case in ("zero-3", "pipeline")}),
    "slow": Row("", dict.fromkeys(("zero-3", "pipeline"), LATE)),
}


def test_the_page_counts_what_trains_and_gives_reasons_for_the_rest() -> None:
    page = markdown(ROWS)
    what = "2 of them gave a reference in one process; in 1 it failed, and in 1 it gave no answer in time."
    assert "Tiny configs of 4 causal-LM types" in page
    assert what in page
    assert "| zero-3 | 2 | 0 | 0 | 0 | 0 |" in page
    assert "| pipeline | 1 | 0 | 1 | 0 | 0 |" in page
    assert "Not complete" not in page
    assert "| hrm_text | 1e-07 | refused | 6 layers |" in page
    assert "- `hrm_text`, pipeline: refused: layers run six times" in page
    assert "- `odd`: no forward" in page
    assert "- `slow`: no answer within 240 s" in page


def test_a_strategy_that_gives_no_answer_in_time_is_no_mismatch() -> None:
    """The type has a reference, so it counts as trained."""
    page = markdown({**ROWS, "gpt2": Row("4 layers", {"zero-3": OK, "pipeline": LATE})})
    assert "3 of them gave a reference" in page
    assert "| pipeline | 1 | 0 | 1 | 0 | 1 |" in page
    assert "- `gpt2`, pipeline: timeout: no answer within 240 s" in page


def test_the_page_names_types_that_were_not_scanned_and_results_beyond_the_limits() -> None:
    noisy = Row("4 layers", {"zero-3": replace(OK, reason="within rounding: a nudge"), "pipeline": OK})
    page = markdown({**ROWS, "cpmant": noisy}, known=[*ROWS, "cpmant", "gpt2", "bloom"])
    assert "**Not complete: 2 of 7 types were not scanned:** bloom, gpt2." in page
    assert "| zero-3 | 3 | 1 | 0 | 0 | 0 |" in page


def test_a_page_can_be_written_without_running_anything(tmp_path: Path) -> None:
    """Of two rows of a type the later one counts."""
    result = {"reason": "", "loss_difference": 1e-7, "norm_difference": 1e-7}
    rows = [
        {
            "type": "llama",
            "seed": 3,
            "code": "a",
            "sizes": "4 layers",
            "cases": {"zero-3": {**result, "status": status}},
        }
        for status in ("mismatch", "ok")
    ]
    out, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["coverage", "--seed", "3", "--out", str(out), "--stored", "--markdown", str(page)]) == 0
    assert "| zero-3 | 1 | 0 | 0 | 0 | 0 |" in page.read_text()
    assert "types were not scanned" in page.read_text()
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.parametrize(("status", "code"), [("refused", 0), ("mismatch", 1)])
def test_known_results_are_not_run_again(
    status: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {"zero-3": {"status": status, "reason": "because", "loss_difference": None, "norm_difference": None}}
    cache = tmp_path / "cache.jsonl"
    line = {"type": "llama", "seed": 3, "sizes": "4 layers", "cases": cases}
    other = {**line, "seed": 4, "cases": {}}
    cache.write_text(f"{json.dumps(line)}\n{json.dumps(other)}\n")
    assert main(["coverage", "--types", "llama", "--seed", "3", "--out", str(cache), "--json"]) == code
    assert json.loads(capsys.readouterr().out)["llama"]["zero-3"]["status"] == status


def test_only_a_rank_that_was_still_running_is_late() -> None:
    (late,) = call_on_ranks(time.sleep, 60, nproc=1, timeout_seconds=2.0)
    assert (late.late, late.reason) == (True, "no answer within 2 s")
    (ended,) = call_on_ranks(os.abort, nproc=1)
    assert (ended.late, ended.reason) == (False, "ended without an answer")


def test_an_unknown_type_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coverage", "--types", "lama"]) == 2
    assert "llama" in capsys.readouterr().err
