"""Hostile hostfiles, names and values: nothing is executed, nothing is started, one clear message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit.cli import main

CANARY = "CANARY"
TOUCH = f"touch {CANARY}"
HOSTFILES = {
    "a command after a name": f"host; {TOUCH} slots=2",
    "a command as a name": f"$({TOUCH.replace(' ', '${IFS}')}) slots=2",
    "backquotes": f"`{TOUCH.replace(' ', '${IFS}')}` slots=2",
    "a pipe": f"host|{TOUCH.replace(' ', '${IFS}')} slots=1",
    "an option of ssh": f"-oProxyCommand={TOUCH.replace(' ', '${IFS}')} slots=1",
    "a long option": "--flag slots=1",
    "a command after the slots": f"host slots=2; {TOUCH}",
    "a command as the slots": f"host slots=$({TOUCH})",
    "letters of other alphabets": "hоst-1 slots=1",
    "a letter that turns the text round": "host\u202e1 slots=1",
    "a zero byte": "host\0 slots=1",
    "an escape of the terminal": "host\x1b[2J slots=1",
    "digits of other alphabets": "host slots=٣",
    "a path": "../../etc/passwd slots=1",
    "a user with an option": "-l@host slots=1",
    "a wildcard": "host* slots=1",
    "the same host twice": "host slots=1\nhost slots=1",
    "no slots": "host slots=0",
    "less than no slots": "host slots=-1",
    "too many slots": "host slots=999999",
    "far too many slots": f"host slots={'9' * 400}",
    "no number": "host",
    "another word": "host max_slots=4",
    "nothing": "",
    "comments only": "# host slots=4\n",
    "not text": "host\udcff slots=1",
    "different hosts": "one slots=1\ntwo slots=2",
}
VALUES = {
    "a command in the name": f"name='; {TOUCH}'",
    "a command as the name": f"name=$({TOUCH})",
    "backquotes in the name": f"name=`{TOUCH}`",
    "a newline in the name": f'name="run\\n{TOUCH}"',
    "an option as the name": "name=--flag",
    "a short option as the name": "name=-rf",
    "a path as the name": "name=../../elsewhere",
    "a hidden name": "name=.hidden",
    "letters of other alphabets in the name": "name=ünïcode",
    "an endless name": f"name={'x' * 300}",
    "an empty name": "name=''",
    "an escape of the terminal": 'name="\\e[2J"',
    "a command as the data": f"data.path=$({TOUCH})",
    "an option as the data": "data.path=--flag",
    "a command as the model": f"model={{path: '; {TOUCH}'}}",
    "a command as the tokenizer": f"data={{path: '$({TOUCH})', tokenizer: '$({TOUCH})'}}",
    "a command as the strategy": f"strategy.name='$({TOUCH})'",
    "a command as the cluster": f"cluster='; {TOUCH}'",
    "a command as the optimizer": f"train.optimizer='; {TOUCH}'",
    "a command as a number": f"train.steps='$({TOUCH})'",
    "an object of Python": f"name=!!python/object/apply:os.system ['{TOUCH}']",
    "a key of Python": "train.__class__=1",
    "a command as a key": f"$({TOUCH})=1",
    "no key": "--=1",
    "a password in an address": "data.path=https://user:planted-secret@host/data.jsonl",
    "a token": "metrics.wandb.project=hf_plantedsecretplantedsecretplantedsecret",
    "a cloud key": "output=AKIAPLANTEDSECRET01Q",
}


@pytest.fixture
def recipe(recipe_mapping: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_mapping))
    return path


def refuse(capsys: pytest.CaptureFixture[str], tmp_path: Path, *argv: str) -> str:
    before = sorted(tmp_path.rglob("*"))
    try:
        code = main(list(argv))
    except SystemExit as stop:  # the parser's own refusal
        code = int(stop.code or 0)
    shown = capsys.readouterr()
    assert code == 2, shown.err
    assert len(shown.err.strip()) > 20
    assert "Traceback" not in shown.err
    assert all(letter.isprintable() or letter == "\n" for letter in shown.err), "the terminal would obey it"
    assert "planted" not in shown.err + shown.out
    assert sorted(tmp_path.rglob("*")) == before, "something was started or executed"
    return shown.err


@pytest.mark.parametrize("text", HOSTFILES.values(), ids=HOSTFILES)
def test_hostfiles(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_bytes(text.encode("utf-8", "surrogateescape"))
    refuse(capsys, tmp_path, "train", str(recipe), "--hostfile", str(hostfile))


@pytest.mark.parametrize("override", VALUES.values(), ids=VALUES)
def test_values(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str) -> None:
    refuse(capsys, tmp_path, "train", str(recipe), override, "--nproc", "2")


@pytest.mark.parametrize("what", [key for key, value in VALUES.items() if value.startswith("name=")])
def test_names_in_launch_files(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    out = ["--for", "slurm", "--out", str(tmp_path / "out")]
    refuse(capsys, tmp_path, "emit", str(recipe), VALUES[what], "--nproc", "2", *out)


@pytest.mark.parametrize(
    "options",
    [
        ("--include", f"$({TOUCH})"),
        ("--include", "host:0,7"),
        ("--include", "host:0,0"),
        ("--include", "host@host"),
        ("--include", "other"),
        ("--exclude", "host"),
        ("--exclude", "host:x"),
        ("--include", "host", "--exclude", "host"),
        ("--nproc", "2"),
    ],
    ids=" ".join,
)
def test_choices_of_hosts(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("host slots=2\n")
    refuse(capsys, tmp_path, "train", str(recipe), "--hostfile", str(hostfile), *options)


def test_choices_need_a_hostfile(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--hostfile" in refuse(capsys, tmp_path, "train", str(recipe), "--include", "host")
    assert "can't be read" in refuse(capsys, tmp_path, "train", str(recipe), "--hostfile", "no/such/file")


@pytest.mark.parametrize(("launcher", "times"), [("local", 4), ("torchrun", 2), ("deepspeed", 1)])
def test_a_dry_run_shows_the_commands_of_every_host(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], launcher: str, times: int
) -> None:
    (tmp_path / "hosts").write_text("one slots=2\ntwo slots=2\n")
    argv = ["train", str(recipe), "--hostfile", "hosts", "--launcher", launcher, "--run-dir", "run", "--dry-run"]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert shown.count("-m toolkit.worker --run-dir") + shown.count("--module toolkit.worker --run-dir") == times
    assert "one" in shown
    assert not (tmp_path / "run").exists()


def test_emitted_scripts_hold_no_secret(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "planted-secret")
    for target in ("deepspeed", "accelerate", "torchrun", "slurm", "k8s"):
        assert main(["emit", str(recipe), "--nproc", "2", "--for", target, "--out", str(tmp_path / target)]) == 0
    assert [path for path in tmp_path.rglob("*") if path.is_file() and b"planted" in path.read_bytes()] == []
    assert "planted" not in capsys.readouterr().out
