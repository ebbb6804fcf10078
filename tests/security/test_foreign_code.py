"""Code runs only if the user asked for it: not from the current directory, not from a foreign run directory.

`test_closed_door.py` runs every launcher in a directory of planted modules.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit import api, cli
from toolkit.errors import BadInput
from toolkit.launching import launchers
from toolkit.launching.launchers import import_path
from toolkit.runtime.hosts.agent import AGENT

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_every_command_is_started_without_the_current_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "/own/modules", ""]))
    assert import_path() == {"PYTHONPATH": os.pathsep.join([str(ROOT), "/own/modules"]), "PYTHONSAFEPATH": "1"}
    for launcher in ("local", "deepspeed", "torchrun", "accelerate"):
        for command in launchers.commands(launcher, Path("run"), 2, "cpu"):
            assert command.argv[:3] == (sys.executable, "-P", "-m")
            assert command.env["PYTHONSAFEPATH"] == "1"


def pythons(path: Path) -> Iterator[str]:
    """What follows `sys.executable` in each argv of a source file; empty where it is not in a list or tuple."""
    tree = ast.parse(path.read_text())
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple):
            words = [ast.unparse(word) for word in node.elts]
            for place in [number for number, word in enumerate(words) if word == "sys.executable"]:
                found += 1
                yield words[place + 1] if place + 1 < len(words) else ""
    uses = [
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable"
    ]
    yield from [""] * (len(uses) - found)


def test_every_argv_of_python_in_the_sources_has_safe_path() -> None:
    """`-P` right after the interpreter; words that come from elsewhere are listed here, and begin with it."""
    sources = [path for name in ("toolkit", "strategies") for path in (ROOT / name).rglob("*.py")]
    found = [(path.name, word) for path in sources for word in pythons(path)]
    assert len(found) >= 5
    listed = {("agent_link.py", "*AGENT"), ("ray_cluster.py", "*words")}
    assert {each for each in found if each[1] != "'-P'"} == listed
    assert AGENT[0] == "-P"


def test_every_process_of_multiprocessing_has_safe_path() -> None:
    """It starts `python -c`, which has the current directory first on its path."""
    starts = [path for path in (ROOT / "toolkit").rglob("*.py") if "get_context(" in path.read_text()]
    assert {path.name for path in starts} == {"probe.py", "warm_pool.py"}
    for path in starts:
        text = path.read_text()
        assert "    set_safe_path()\n" in text.partition("get_context(")[0], path


def test_a_probe_imports_nothing_from_the_current_directory(tmp_path: Path) -> None:
    for name in ("selectors", "signal", "runpy", "tempfile"):  # multiprocessing imports them
        (tmp_path / f"{name}.py").write_text("open('EXECUTED', 'a')\nraise SystemExit('the wrong module')\n")
    code = "import toolkit.runtime.machine.probe as p; p.measure(1, lambda *_: None, 0.01)"
    script = tmp_path / "bin" / "script.py"  # like the command `toolkit`, it is not started with -P
    script.parent.mkdir()
    script.write_text(f"if __name__ == '__main__':\n    {code}\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("PYTHONSAFEPATH", None)
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not (tmp_path / "EXECUTED").exists()


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
