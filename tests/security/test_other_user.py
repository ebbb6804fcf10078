"""A user without rights, without a home, with an installation that nobody can write to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user and mount read-only"),
]

ROOT = Path(__file__).parents[2]
NOBODY = 65534
ENTER = """
set -e
space=$1; shift
for part in python packages repository; do
    mkdir -p "$space/$part"; mount --bind "$1" "$space/$part"; mount -o remount,bind,ro "$space/$part"; shift
done
cd "$space/own"
exec setpriv --reuid=65534 --regid=65534 --clear-groups env -i PATH=/usr/bin:/bin LANG=C.UTF-8 \
    LD_LIBRARY_PATH="$space/python/lib" PYTHONPATH="$space/packages:$space/repository" \
    "$space/python/bin/python3" -P -m toolkit "$@"
"""
"""In a mount namespace of its own: Python, its packages and the toolkit, all read-only, as the user `nobody`."""


@pytest.fixture
def space() -> Iterator[Path]:
    """A directory with a folder of the other user's."""
    path = Path(tempfile.mkdtemp(prefix="other-user-"))
    path.chmod(0o755)
    (path / "own").mkdir()
    os.chown(path / "own", NOBODY, NOBODY)
    yield path
    shutil.rmtree(path)


def as_nobody(space: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the toolkit as another user."""
    parts = [sys.base_prefix, sysconfig.get_path("purelib"), str(ROOT)]
    command = ["unshare", "--mount", "sh", "-c", ENTER, "sh", str(space), *parts, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_train_resume_and_report_without_rights(space: Path, recipe_mapping: dict[str, Any]) -> None:
    recipe_mapping |= {"checkpoint": {"every": 2}, "data": {"path": "synthetic", "seq_len": 32}}
    (space / "own" / "recipe.yaml").write_text(yaml.safe_dump(recipe_mapping))
    os.chown(space / "own" / "recipe.yaml", NOBODY, NOBODY)
    done = as_nobody(space, "train", "recipe.yaml", "train.steps=2", "--nproc", "2", "--run-dir", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    run = space / "own" / "run"
    assert run.stat().st_uid == NOBODY
    assert run.stat().st_mode & 0o077 == 0
    for words in (["resume", "run", "train.steps=4", "--nproc", "1"], ["verify", "run"], ["report", "run"]):
        done = as_nobody(space, *words)
        assert done.returncode == 0, done.stdout + done.stderr
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 4
