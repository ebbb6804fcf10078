"""Code runs only if the user asked for it: not from the current directory, not from a foreign run directory.

`test_closed_door.py` runs every launcher in a directory of planted modules.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit import api, cli
from toolkit.errors import BadInput
from toolkit.launching import launchers
from toolkit.launching.launchers import import_path

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_every_command_is_started_without_the_current_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "/own/modules", ""]))
    assert import_path() == {"PYTHONPATH": os.pathsep.join([str(ROOT), "/own/modules"]), "PYTHONSAFEPATH": "1"}
    for launcher in ("local", "deepspeed", "torchrun", "accelerate"):
        for command in launchers.commands(launcher, Path("run"), 2, "cpu"):
            assert command.argv[:3] == (sys.executable, "-P", "-m")
            assert command.env["PYTHONSAFEPATH"] == "1"


@pytest.fixture
def run(recipe_mapping: dict[str, Any], tmp_path: Path) -> Path:
    """A run directory of another user, with code in its recipe."""
    path = tmp_path / "run"
    path.mkdir()
    recipe_mapping["model"]["trust_remote_code"] = True
    recipe_mapping["metrics"]["sinks"] = ["evil.module:Sink"]
    (path / "recipe.yaml").write_text(yaml.safe_dump(recipe_mapping))
    path.chmod(0o777)
    return path


def test_code_of_a_foreign_run_directory_needs_consent(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["resume", str(run), "--nproc", "1"]) == 2
    err = capsys.readouterr().err
    assert "model.trust_remote_code: true in" in err
    assert "--trust-remote-code" in err
    assert "metrics.sinks: evil.module:Sink in" in err
    assert "--allow-sinks" in err
    assert cli.main(["resume", str(run), "--nproc", "1", "--trust-remote-code"]) == 2
    err = capsys.readouterr().err
    assert "model.trust_remote_code" not in err
    assert "metrics.sinks: evil.module:Sink in" in err


def test_the_same_from_a_notebook(run: Path) -> None:
    with pytest.raises(BadInput, match="allow-sinks"):
        api.resume(run, trust_remote_code=True, nproc=1)
    with pytest.raises(BadInput, match="trust-remote-code"):
        api.resume(run, allow_sinks=True, nproc=1)


def test_own_sinks_are_named_and_run(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run.chmod(0o755)
    assert cli.main(["resume", str(run), "--nproc", "1", "--trust-remote-code"]) == 2
    said = capfd.readouterr()
    assert "is code that will run: evil.module:Sink" in " ".join(said.out.split())
    assert "the current directory is not searched" in said.err
