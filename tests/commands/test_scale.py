"""`toolkit scale` with a critical batch: given, measured by a run, or neither."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolkit.cli import main

DEMO = ["scale", "recipes/demo.yaml", "strategy.name=zero", "--devices", "1,2", "--nproc", "2"]


def test_a_run_s_noise_scale_says_where_more_devices_stop_paying(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"noise_scale_sequences": 6.4}))
    assert main([*DEMO, "--noise-from", str(tmp_path), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["critical_batch"]
    assert measured["sequences"] == 6
    assert measured["passed_at_devices"] == 1
    assert "past 6 sequences more devices buy little" in measured["advice"]
    assert main([*DEMO, "--critical-batch", "100000"]) == 0
    assert "a larger batch saves steps almost in proportion" in " ".join(capsys.readouterr().out.split())


def test_a_run_without_a_noise_scale_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DEMO, "--noise-from", str(tmp_path)]) == 2
    assert "metrics.noise_scale=true" in capsys.readouterr().err
