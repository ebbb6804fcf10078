"""Cluster files: those that ship, and what is said of bad ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from toolkit.clusters.reader import from_file, from_section, read_cluster
from toolkit.cost.calibration import CALIBRATION, cluster_yaml, fit_links
from toolkit.cost.communication import all_reduce, group
from toolkit.errors import BadInput
from toolkit.recipe.sections import ClusterSection
from toolkit.resources import CONFIGS

SHIPPED = sorted((CONFIGS / "clusters").glob("*.yaml"))
WANTED = {
    "dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200", "aws-p4d", "aws-p5", "8xl40s", "mi300x", "laptop-cpu",
    "two-provider-wan",
}  # fmt: skip


def test_the_usual_clusters_ship() -> None:
    assert {path.stem for path in SHIPPED} >= WANTED


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_clusters_can_be_read_and_say_where_they_come_from(path: Path) -> None:
    found = read_cluster(path.stem)
    assert found.devices >= 1
    assert found.intra_bytes_per_second > 0
    assert path.read_text().startswith("# ")


def test_the_wan_is_slow_between_sites_only() -> None:
    wan = read_cluster("two-provider-wan")
    inside = all_reduce(1e9, group(wan, 32, 1), wan, CALIBRATION)
    across = all_reduce(1e9, group(wan, 64, 1), wan, CALIBRATION)
    assert across > 50 * inside


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device: H100-SXM\n", "'H100-SXM' is not a known kind; nearest: H100-SXM5-80GB"),
        ("device: abacus\n", "'abacus' is not a known kind"),
        ("device: L40S\ninter_gbps_per_device: 0\n", "inter_gbps_per_device: 0 given; more than 0 is required"),
        ("device: L40S\nintra_gb_per_second: -1\n", "intra_gb_per_second: -1 given"),
        ("device: L40S\nnodes: 3\nsites: 2\nsite_gbps: 1\n", "2 sites given; must divide the 3 nodes"),
        ("device: L40S\nnodes: 2\nsites: 2\n", "site_gbps: required with sites"),
        ("device: L40S\nbandwith: 3\n", "unknown key"),
        ("- a\n", ""),
    ],
)
def test_bad_cluster_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        from_file(path)
    assert message in str(caught.value)


def test_measured_rates_replace_the_kinds() -> None:
    section = ClusterSection(
        device="L40S", matmul_tflops=123.0, memory_gb_per_second=500.0, memory_gib=40.0, latency_us=33.0
    )
    found = from_section(section, "own")
    assert found.device.matmul_flops == 123e12
    assert found.device.memory_bytes_per_second == 500e9
    assert found.device.memory_bytes == 40 * 2**30
    assert found.latency_seconds == pytest.approx(33e-6)


def test_a_probed_cluster_gives_the_measured_times_back(tmp_path: Path) -> None:
    times = {4096: 300e-6, 32 * 2**20: 60e-3}
    path = tmp_path / "own.yaml"
    measured = SimpleNamespace(
        device="cpu", backend="cpu", nodes=1, processes=4, memory_bytes=0, matmul_flops=5e10,
        memory_bytes_per_second=4e9, collectives={"all_reduce": times}, between={},
    )  # fmt: skip
    path.write_text(cluster_yaml(measured, host_bytes=16 * 2**30))
    found = from_file(path)
    assert found.devices == 4
    assert found.device.matmul_flops == pytest.approx(5e10)
    for size, seconds in times.items():
        assert all_reduce(size, group(found, 4, 1), found, CALIBRATION) == pytest.approx(seconds, rel=0.15)
    assert fit_links(times, 4).gb_per_second > 0
