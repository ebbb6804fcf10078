"""`toolkit probe`, for real on two processes."""

from __future__ import annotations

from pathlib import Path

from toolkit.cluster_reader import from_file
from toolkit.probe_file import cluster_yaml
from toolkit.runtime.probe import COLLECTIVES, SIZES, measure
from toolkit.runtime.topology import describe


def test_two_processes_measure_and_the_planner_reads_it(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    found = measure(2, lambda *what: seen.append(what), seconds_each=0.02)
    assert seen[-1][1] == seen[-1][2] == len(seen)
    assert found.matmul_flops > 1e9
    assert found.memory_bytes_per_second > 1e8
    assert set(found.collectives) == set(COLLECTIVES)
    assert all(set(times) == set(SIZES) and min(times.values()) > 0 for times in found.collectives.values())
    path = tmp_path / "own.yaml"
    path.write_text(cluster_yaml(host_bytes=8 * 2**30, **vars(found)))
    assert from_file(path).devices == 2


def test_without_an_accelerator_it_says_so() -> None:
    assert describe() == ["no accelerator: processes on the CPU are measured"]
