"""`toolkit parity`: agrees where strategies agree, and says so with its exit code where they don't."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit.cli import main
from toolkit.errors import BadInput
from toolkit.sessions import parity

pytestmark = pytest.mark.slow


@pytest.fixture
def recipe(recipe_mapping: dict[str, Any], tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_mapping))
    return str(path)


def test_json_follows_the_contract(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["parity", recipe, "--nproc", "2", "--steps", "3", "--strategies", "data_parallel,zero-3", "--json"]
    assert main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["steps"] == len(report["reference"]) == 3
    assert report["strategies"].keys() == {"data_parallel", "zero-3"}
    for entry in report["strategies"].values():
        assert entry["ok"] is True
        assert 0 <= entry["max_rel_diff"] <= 1e-5
        assert len(entry["loss"]) == 3
        assert entry["plan"]["dp"] == 2


def test_a_strategy_that_is_off_fails_the_command(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(parity.NORM_TOLERANCE, "fp32", -1.0)  # no difference is small enough
    assert main(["parity", recipe, "--nproc", "2", "--steps", "2", "--strategies", "zero-2"]) == 1
    assert "off" in capsys.readouterr().out


def test_refused_everywhere_is_exit_3(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Three sequences can't be split over two replicas."""
    assert main(["parity", recipe, "train.global_batch=3", "--nproc", "2", "--strategies", "zero-1"]) == 3
    assert "global batch 3 can't be split" in capsys.readouterr().err


def test_axes_that_a_model_cannot_have_are_refused_rows(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--nproc", "2", "--steps", "1", "--json", "--strategies", "expert_parallel,data_parallel"]
    assert main(["parity", recipe, *given]) == 0
    found = json.loads(capsys.readouterr().out)["strategies"]
    assert [one["ok"] for one in found.values()].count(True) >= 1
    assert all("it is dense" in one["refused"] for name, one in found.items() if name.startswith("expert"))
    assert any(name.startswith("expert") for name in found)


def test_unknown_strategy() -> None:
    with pytest.raises(BadInput, match="'zoro' given; use all, or some of: data_parallel"):
        parity.cases("zoro", 2)


def test_differences_are_relative_and_strict() -> None:
    assert parity.largest_difference([2.0, 4.0], [2.0, 4.4]) == pytest.approx(0.1)
    assert parity.largest_difference([1.0], [1.0, 2.0]) == float("inf")
    assert parity.largest_difference([1.0], [float("nan")]) == float("inf")
