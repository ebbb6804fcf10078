"""The border between planning and running."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import BadInput
from toolkit.recipe.file import make_recipe
from toolkit.run_dir import layout
from toolkit.sessions.resolve import resolve


def test_what_is_written_is_what_a_worker_reads(recipe_mapping: dict[str, Any], tmp_path: Path) -> None:
    resolved = resolve(make_recipe(recipe_mapping, ["strategy.zero_stage=2", "strategy.name=zero"]), 2)
    order = layout.read(resolved.write(tmp_path / "run"))
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
        path = layout.new_run_path(str(tmp_path), "demo")
        path.mkdir()
        paths.append(path)
    assert len(set(paths)) == 3


def test_not_a_run_directory(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a run directory"):
        layout.read(layout.RunDir(tmp_path))


def test_a_new_run_directory_is_private(tmp_path: Path) -> None:
    """Logs and checkpoints may hold data. A directory that exists keeps the permissions that its owner gave it."""
    run = layout.create(tmp_path / "runs" / "new")
    assert run.path.stat().st_mode & 0o077 == 0
    (tmp_path / "shared").mkdir(mode=0o755)
    (tmp_path / "shared").chmod(0o755)
    assert layout.create(tmp_path / "shared").path.stat().st_mode & 0o777 == 0o755
