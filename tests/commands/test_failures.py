"""One way to fail: every exception of a command is one message with an exit code, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit import cli
from toolkit.cli import main

SECRET = "planted-secret-value"  # noqa: S105 - it is planted


@pytest.fixture
def recipe(recipe_mapping: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**recipe_mapping, "output": str(tmp_path / "runs")}))
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """A command that raises what the test puts into the list."""
    raised: list[BaseException] = []

    class Broken:
        @staticmethod
        def add_arguments(parser: Any) -> None:
            parser.add_argument("words", nargs="*")

        @staticmethod
        def run(args: Any) -> int:
            raise raised[0]

    monkeypatch.setattr(cli, "_module", lambda command: Broken)
    return raised


def process(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toolkit", *argv]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, timeout=60)


def test_an_unexpected_error_is_one_message_with_a_crash_log(
    home: Path, broken: list[BaseException], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    broken.append(RuntimeError(f"unexpected: {SECRET}"))
    assert main(["keys", "metrics.api_key=another-secret", "train.lr=1"]) == 1
    shown = capsys.readouterr().err
    assert "RuntimeError: unexpected: (hidden)" in shown
    assert "Traceback" not in shown
    (log,) = (home / ".cache" / "zero-toolkit" / "crashes").iterdir()
    assert str(log) in shown
    text = log.read_text()
    assert all(part in text for part in ("Traceback", "train.lr=1", "torch: ", "version: zero-toolkit"))
    assert SECRET not in text
    assert "another-secret" not in text
    assert log.stat().st_mode & 0o077 == 0, "other users could read the log"


def test_debug_shows_the_traceback(
    home: Path, broken: list[BaseException], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLKIT_DEBUG", "1")
    broken.append(RuntimeError("unexpected"))
    assert main(["keys"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_crash_log_is_written_without_a_home_directory(
    broken: list[BaseException], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", "/dev/null/nowhere")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    broken.append(RuntimeError("unexpected"))
    assert main(["keys"]) == 1
    assert list(tmp_path.rglob("crash-*.log"))


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (OSError(30, "Read-only file system", "/some/where"), 2, "/some/where: it is on a read-only file system"),
        (PermissionError(13, "Permission denied", b"/some/where"), 2, "/some/where: permission denied"),
        (OSError(28, "No space left on device", "/some/where"), 2, "the disk is full"),
        (OSError(28, "No space left on device"), 2, "a file could not be written: the disk is full"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_that_the_user_can_cure(
    broken: list[BaseException], capsys: pytest.CaptureFixture[str], error: BaseException, code: int, words: str
) -> None:
    broken.append(error)
    assert main(["keys"]) == code
    shown = capsys.readouterr().err
    assert words in shown
    assert len(shown.strip().splitlines()) == 1


def test_a_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m toolkit keys | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_ascii_terminal(recipe: Path) -> None:
    done = process("plan", str(recipe), "--nproc", "2", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "?" in done.stdout
    done = process("train", str(recipe), "data.path=ünïcode/*", PYTHONIOENCODING="ascii")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["rendezvous", "mailbox"])
@pytest.mark.parametrize("port", ["99999", "-1", "65536"])
def test_ports_out_of_range(command: str, port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--port", port]) == 2
    assert f"--port: {port} given; 0 to 65535 is required" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_directory_with_markup_in_its_name(recipe: Path, tmp_path: Path) -> None:
    path = tmp_path / "a[" / "b] ünï"
    done = process("train", str(recipe), "--nproc", "1", "train.steps=1", "--run-dir", str(path))
    assert done.returncode == 0, done.stderr
    assert str(path) in done.stdout.replace("\n", "")
    assert main(["report", str(path)]) == 0


def test_a_read_only_place(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """/proc can't be written to by root either."""
    for argv in (
        ["train", str(recipe), "--nproc", "1", "--run-dir", "/proc/run"],
        ["emit", str(recipe), "--nproc", "1", "--for", "torchrun", "--out", "/proc/out"],
        ["plan", str(recipe), "--nproc", "1", "--html", "/proc/plan.html"],
        ["scale", str(recipe), "--devices", "1,2", "--html", "/proc/scale.html"],
    ):
        assert main(argv) == 2, argv
        assert "/proc/" in capsys.readouterr().err


@pytest.mark.slow
def test_without_home_with_a_umask_and_a_path_of_spaces_and_unicode(recipe: Path, tmp_path: Path) -> None:
    place = tmp_path / "ein Weg – mit ünïcode"
    place.mkdir()
    (place / "recipe.yaml").write_bytes(recipe.read_bytes())
    code = "import os, sys; os.umask(0o077); from toolkit.cli import main; sys.exit(main(sys.argv[1:]))"
    env = {key: value for key, value in os.environ.items() if key not in ("HOME", "USER", "LOGNAME")}
    argv = ["train", str(place / "recipe.yaml"), "--nproc", "1", "train.steps=1", "--run-dir", str(place / "run")]
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (place / "run" / "summary.json").is_file()
    assert not [path for path in (place / "run").rglob("*") if path.stat().st_mode & 0o077]
