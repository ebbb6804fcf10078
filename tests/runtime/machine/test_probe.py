"""`toolkit probe`, for real on two processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.clusters.reader import from_file
from toolkit.cost.calibration import cluster_yaml
from toolkit.launching import environment
from toolkit.runtime.machine.network import describe
from toolkit.runtime.machine.probe import COLLECTIVES, SIZES, measure


@pytest.mark.slow
def test_two_processes_measure_and_the_planner_reads_it(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    found = measure(2, lambda *what: seen.append(what), seconds_each=0.02)
    assert seen[-1][1] == seen[-1][2] == len(seen)
    assert found.matmul_flops > 1e9
    assert found.memory_bytes_per_second > 1e8
    assert set(found.collectives) == set(COLLECTIVES)
    assert all(set(times) == set(SIZES) and min(times.values()) > 0 for times in found.collectives.values())
    path = tmp_path / "own.yaml"
    path.write_text(cluster_yaml(found, host_bytes=8 * 2**30))
    assert from_file(path).devices == 2


@pytest.mark.slow
def test_a_job_of_two_nodes_measures_inside_and_between_them(tmp_path: Path) -> None:
    """Two agents of torchrun on this host stand for two nodes."""
    out, port = tmp_path / "job.yaml", environment.free_port()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    meet = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    probe = ["-m", "toolkit", "probe", "--seconds", "0.02", "--out", str(out)]
    agents = [subprocess.Popen([*torchrun, *meet, "--node-rank", str(node), *probe]) for node in range(2)]
    assert [agent.wait(timeout=600) for agent in agents] == [0, 0]
    cluster = from_file(out)
    assert (cluster.nodes, cluster.devices_per_node) == (2, 2)
    assert cluster.inter_bytes_per_second > 0
    assert "# all_reduce between nodes:" in out.read_text()


def test_without_an_accelerator_it_says_so() -> None:
    assert describe() == ["no accelerator: processes on the CPU are measured"]
