"""The border between planning and running."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolkit import run_dir
from toolkit.errors import BadInput
from toolkit.recipe_file import make_recipe
from toolkit.resolve import resolve


def test_what_is_written_is_what_a_worker_reads(recipe_mapping: dict[str, Any], tmp_path: Path) -> None:
    resolved = resolve(make_recipe(recipe_mapping, ["strategy.zero_stage=2", "strategy.name=zero"]), 2)
    order = run_dir.read(resolved.write(tmp_path / "run"))
    assert order.plan == resolved.chosen.plan
    assert order.recipe == resolved.recipe
    assert order.deepspeed == resolved.deepspeed
    assert order.predicted_step_seconds == resolved.chosen.estimate.time.total
    assert order.predicted_memory_bytes == resolved.chosen.estimate.memory.total


def test_an_existing_run_is_not_touched(recipe_mapping: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("precious")
    with pytest.raises(BadInput, match="already exists"):
        resolve(make_recipe(recipe_mapping), 2).write(tmp_path / "run")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_fresh_names_never_collide(tmp_path: Path) -> None:
    paths = []
    for _ in range(3):
        path = run_dir.new_run_path(str(tmp_path), "demo")
        path.mkdir()
        paths.append(path)
    assert len(set(paths)) == 3


def test_not_a_run_directory(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a run directory"):
        run_dir.read(run_dir.RunDir(tmp_path))
