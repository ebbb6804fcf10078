"""Liger's kernels in Triton's interpreter, in a process of its own; and what happens without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.parallel import model
from toolkit.cli import main
from toolkit.errors import BadInput
from toolkit.runtime.layers import fused_kernels

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("interpreted_kernels.py")
PACKAGES = Path(sys.prefix) / "liger"
"""liger-kernel and Triton, apart from all other packages: `make .venv/liger`."""


@pytest.mark.slow
def test_kernels_give_the_results_of_the_plain_model() -> None:
    """SwiGLU and RMSNorm of Llama; GeGLU and the shifted norm of Gemma 2, with soft caps."""
    assert PACKAGES.is_dir(), "liger-kernel is missing: run `make .venv/liger`"
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(PACKAGES)])}
    done = subprocess.run([sys.executable, SCRIPT, "llama", "gemma2"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [set(row["kernels"]) for row in rows] == [{"rope", "rms_norm", "swiglu"}, {"rope", "rms_norm", "geglu"}]
    assert all(row["difference"] < 1e-5 for row in rows), rows


def test_asked_for_and_not_there_is_bad_input(
    tmp_path: Path, recipe_mapping: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BadInput, match="liger given; "):
        fused_kernels.kernels_of(replace(model("llama"), kernels="liger"))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_mapping))
    assert main(["train", str(recipe), "model.kernels=liger", "--nproc", "1", "--run-dir", str(tmp_path / "run")]) == 2
    assert "model.kernels" in capsys.readouterr().err
