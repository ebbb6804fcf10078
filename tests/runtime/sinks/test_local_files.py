"""Cutting metrics.jsonl on resume loses nothing in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolkit.runtime.sinks.local_files import EventSink, keep_until


def test_a_broken_line_in_the_middle_is_reported_and_kept_in_a_copy(tmp_path: Path) -> None:
    path, said = tmp_path / "metrics.jsonl", list[str]()
    before = b'{"step": 1}\n{"step": 2, "lo\n\xff\n{"step": 3}\n{"step": 4}\n{"step": 5, "l'
    path.write_bytes(before)
    assert keep_until(path, 3, said.append) == [{"step": 1}, {"step": 3}]
    (line,) = said
    assert "2 lines can't be read and are left out (line 2, 3)" in line
    copy = tmp_path / "metrics.jsonl.damaged-1"
    assert str(copy) in line
    assert copy.read_bytes() == before
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]


def test_a_last_line_cut_short_is_dropped_without_a_word(tmp_path: Path) -> None:
    path, said = tmp_path / "metrics.jsonl", list[str]()
    path.write_bytes(b'{"step": 1}\n{"step": 2, "l')
    assert keep_until(path, 9, said.append) == [{"step": 1}]
    assert said == []


@pytest.mark.parametrize(
    ("before", "kinds"), [(b"", ["start"]), (b'{"kind": "start"}\n{"kind": "che', ["start", "resume"])]
)
def test_an_event_after_one_that_was_cut_short_has_a_line_of_its_own(
    tmp_path: Path, before: bytes, kinds: list[str]
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(before)
    sink = EventSink(path)
    sink.start({})
    lines = path.read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines if line.endswith("}")] == kinds
