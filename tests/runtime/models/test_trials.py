"""Trials on tiny models: made once, remembered on disk, asked again after a failure, never a trace in the run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from toolkit.runtime.models import trials
from toolkit.runtime.supervision.warm_pool import call_on_ranks

CONFIG = {"model_type": "llama"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "user_cache", lambda: tmp_path)
    forget()


def forget() -> None:
    """As a new process would begin."""
    trials._file.cache_clear()
    trials._failed.clear()


def test_a_verdict_is_reached_once_and_survives_the_process() -> None:
    calls: list[str] = []

    def trial() -> str:
        calls.append("made")
        return "it differs"

    for _ in range(3):
        assert trials.tried("something", CONFIG, ["eager"], trial) == "it differs"
        forget()
    assert calls == ["made"]
    assert trials.tried("something", CONFIG, ["sdpa"], lambda: "") == ""


def one_of_two(root: str, marks: str) -> str:
    """As one rank: a trial that leaves a mark, and takes long enough for the other rank to ask."""
    trials.user_cache = lambda: Path(root)  # type: ignore[assignment]
    forget()

    def trial() -> str:
        with Path(marks).open("a") as file:
            file.write("made\n")
        time.sleep(0.5)
        return trials.tried("inner", CONFIG, [], lambda: "inner differs")  # the lock is held already

    return trials.tried("outer", CONFIG, [], trial)


def test_of_two_ranks_that_ask_at_once_one_makes_the_trial(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    found = call_on_ranks(one_of_two, str(tmp_path), str(marks), nproc=2, timeout_seconds=60)
    assert found == ["inner differs", "inner differs"]
    assert marks.read_text() == "made\n"


def test_a_trial_that_fails_is_made_again_by_the_next_process() -> None:
    def trial() -> str:
        raise MemoryError("no room")

    assert "no room" in trials.tried("something", CONFIG, [], trial)
    assert "no room" in trials.tried("something", CONFIG, [], lambda: "not asked")
    forget()
    assert trials.tried("something", CONFIG, [], lambda: "") == ""


def test_generators_and_gradients_are_those_of_the_caller() -> None:
    before = torch.get_rng_state()

    def trial() -> str:
        torch.manual_seed(7)
        return "" if torch.is_grad_enabled() else "no gradients"

    with torch.no_grad():
        assert trials.tried("something", CONFIG, [], trial) == ""
    assert torch.equal(torch.get_rng_state(), before)


def test_a_damaged_file_costs_time_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / trials.CACHE_NAME).write_text('{"something": [1]}')
    assert trials.tried("something", CONFIG, [], lambda: "no") == "no"
    assert "is damaged and ignored; tiny models are tried again" in capsys.readouterr().err
