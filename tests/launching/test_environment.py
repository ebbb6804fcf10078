"""The environment of workers: pure functions over the variables that they are given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.errors import BadInput
from toolkit.launching.environment import (
    ONEDNN_ISA,
    broken_tiles,
    cores_near,
    device_ordinal,
    device_settings,
    exported,
    read_cpuinfo,
)

LOGS = Path("/runs/one/logs")


def test_a_worker_gets_the_allocator_and_the_flight_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    assert "TORCH_FR_BUFFER_SIZE" in device_settings(os.environ, LOGS), "of a real process"
    assert device_settings({}, LOGS) == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": "/runs/one/logs/nccl-rank-",
    }


@pytest.mark.parametrize(
    ("given", "left_alone"),
    [
        ("PYTORCH_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"),
    ],
)
def test_what_the_user_has_set_is_kept(given: str, left_alone: str) -> None:
    """Under the older name, too: two settings of one thing would contradict each other."""
    assert left_alone not in device_settings({given: "mine"}, LOGS)


def test_settings_of_torch_triton_and_the_network_reach_other_hosts() -> None:
    sent = {
        "PYTORCH_ALLOC_CONF": "a",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "FI_PROVIDER": "efa",
        "TRITON_CACHE_DIR": "/cache",
        "NCCL_IB_HCA": "mlx5",
        "https_proxy": "http://proxy",
    }
    kept = {"CUDA_VISIBLE_DEVICES": "0,1", "PATH": "/bin", "HOME": "/home/me"}
    assert exported({**sent, **kept}) == sent


def test_one_visible_device_is_number_zero_for_every_task() -> None:
    assert [device_ordinal(rank, 8) for rank in range(8)] == list(range(8))
    assert [device_ordinal(rank, 1) for rank in range(8)] == [0] * 8
    with pytest.raises(BadInput, match="local rank 4 needs a device of its own, and this process sees 4"):
        device_ordinal(4, 4)


@pytest.mark.parametrize(
    ("listed", "allowed", "cores"),
    [
        ("0-3,8-11", range(16), {0, 1, 2, 3, 8, 9, 10, 11}),
        ("4", range(16), {4}),
        ("0-3", range(2, 6), {2, 3}),
        ("0-3", range(8, 12), {8, 9, 10, 11}),
        ("", range(4), {0, 1, 2, 3}),
        ("nonsense", range(4), {0, 1, 2, 3}),
    ],
)
def test_a_rank_stays_on_the_cores_of_its_device(listed: str, allowed: range, cores: set[int], tmp_path: Path) -> None:
    device = tmp_path / "bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "local_cpulist").write_text(f"{listed}\n")
    assert cores_near("0000:1B:00.0", allowed, tmp_path) == cores


def test_a_device_that_the_system_does_not_know_may_use_all_cores(tmp_path: Path) -> None:
    assert cores_near("0000:ff:00.0", {0, 1}, tmp_path) == {0, 1}


def cpuinfo(flags: str, level: int) -> str:
    return f"processor\t: 0\nmodel name\t: Xeon\ncpuid level\t: {level}\nflags\t\t: fpu {flags} sse2\n"


def test_amx_counts_as_broken_only_if_its_tiles_are_not_described(tmp_path: Path) -> None:
    assert broken_tiles(cpuinfo("amx_bf16 amx_tile", 0x1C))
    assert not broken_tiles(cpuinfo("amx_bf16 amx_tile", 0x1D))
    assert not broken_tiles(cpuinfo("avx512_bf16", 0x16))
    assert not broken_tiles("processor : 0\nFeatures : asimd\n"), "another architecture"
    two = tmp_path / "cpuinfo"
    two.write_text(cpuinfo("avx2", 0x16) + "\n" + cpuinfo("amx_tile", 0x1C))
    assert "amx_tile" not in read_cpuinfo(two), "the first processor is enough"
    assert read_cpuinfo(tmp_path / "missing") == ""


@pytest.mark.slow
def test_a_16_bit_matmul_works_after_an_import_of_the_interface() -> None:
    """On any machine; without the setting, oneDNN ends the process where AMX is broken."""
    code = "import toolkit.api, torch; a = torch.ones(64, 64, dtype=torch.bfloat16); print(float((a @ a)[0, 0]))"
    env = {key: value for key, value in os.environ.items() if key != ONEDNN_ISA}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "64.0"), done.stderr
