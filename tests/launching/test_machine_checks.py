"""The machine checks find planted problems and say how to fix them."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from toolkit import cli
from toolkit.launching import machine_checks
from toolkit.launching.environment import has_wandb_key
from toolkit.launching.machine_checks import CheckContext, cgroup_limit_bytes, examine, full_disk


def context(tmp_path: Path, **env: str) -> CheckContext:
    return CheckContext(tmp_path / "runs" / "not-made-yet", {"TORCH_EXTENSIONS_DIR": str(tmp_path / "ext"), **env})


def test_a_machine_that_trains_has_no_errors(tmp_path: Path) -> None:
    findings = examine(context(tmp_path))
    assert [finding for finding in findings if finding.level == "error"] == []
    assert {f.check for f in findings} >= {
        "versions",
        "build locks",
        "shared memory",
        "limits",
        "ports",
        "disk",
        "write speed",
        "local network",
    }


def test_a_host_where_others_reach_the_ranks_is_reported(tmp_path: Path) -> None:
    """An interface that the user has chosen is respected, so there is no private network."""
    found = examine(context(tmp_path, GLOO_SOCKET_IFNAME="eth9"), (machine_checks.local_network,))
    assert [finding.level for finding in found] == ["warning"]
    assert "other users of this host can connect" in found[0].what


def test_a_stale_lock_of_a_build_is_found(tmp_path: Path) -> None:
    lock = tmp_path / "ext" / "py311_cpu" / "shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert examine(context(tmp_path), (machine_checks.stale_locks,))[0].level == "ok", "a build may be under way"
    os.utime(lock, (time.time() - 3600, time.time() - 3600))
    found = examine(context(tmp_path), (machine_checks.stale_locks,))[0]
    assert (found.level, found.fix) == ("error", f"rm {lock}")


def test_an_old_library_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.1")
    found = examine(context(tmp_path), (machine_checks.versions,))
    assert {finding.level for finding in found} == {"error"}
    assert {finding.what.split()[0] for finding in found} == {*machine_checks.FLOORS, *machine_checks.KNOWN_HOLES}
    assert any("CVE-2026-4372" in finding.what for finding in found)


def test_a_hole_in_a_package_that_is_not_installed_is_not_reported(tmp_path: Path) -> None:
    """Nothing here has a known hole, and absent optional packages are no problem."""
    assert {finding.level for finding in examine(context(tmp_path), (machine_checks.versions,))} == {"ok"}


def test_a_host_that_does_not_answer_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("# two hosts\n127.0.0.254.invalid slots=2\n")
    assert cli.main(["doctor", "--output", str(tmp_path), "--hostfile", str(hostfile)]) == 1
    out = capsys.readouterr().out
    assert "127.0.0.254.invalid does not answer" in out
    assert "fix:" in out


def test_a_key_of_wandb_is_found_in_the_environment_and_in_netrc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not has_wandb_key({})
    assert has_wandb_key({"WANDB_API_KEY": "0" * 40})
    (tmp_path / ".netrc").write_text("machine example.com\n  login user\n  password x\n")
    assert not has_wandb_key({})
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password x\n")
    assert has_wandb_key({})
    assert "API key found" in examine(context(tmp_path), (machine_checks.wandb_login,))[0].what
    (tmp_path / ".netrc").write_text("machine\n")
    assert not has_wandb_key({}), "a damaged file is not an error"


def test_hidden_devices_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([Path("/dev/nvidia0"), Path("/dev/nvidia1")]))
    found = examine(context(tmp_path, CUDA_VISIBLE_DEVICES="0"), (machine_checks.devices,))[0]
    assert found.level == "warning"
    assert "unset CUDA_VISIBLE_DEVICES" in found.fix


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/job/step\n", {"job/memory.max": "1073741824\n", "job/step/memory.max": "max\n"}, 2**30),
        ("0::/job\n", {"job/memory.max": "max\n"}, None),
        ("4:cpu:/x\n3:memory:/job\n", {"memory/job/memory.limit_in_bytes": "536870912\n"}, 2**29),
        ("3:memory:/job\n", {"memory/job/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    ],
)
def test_the_memory_limit_of_a_control_group(
    tmp_path: Path, own: str, files: dict[str, str], limit: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "own").write_text(own)
    assert cgroup_limit_bytes(tmp_path, tmp_path / "own") == limit


def test_a_full_file_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    assert full_disk(tmp_path) == full_disk(tmp_path / "missing") == []
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=4096))
    assert full_disk(tmp_path) == [f"No space left on device: {tmp_path} has 4 KiB free"]
