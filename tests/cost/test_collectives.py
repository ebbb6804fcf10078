"""Collectives against NCCL timings, and against the ring formulas."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path
from statistics import median

import pytest

from tests.helpers.planning import cluster
from toolkit.clusters.devices import find_device
from toolkit.cost.calibration import CALIBRATION
from toolkit.cost.communication import Group, all_reduce, all_to_all, bandwidth, gather, group, send

TIMINGS = Path(__file__).parents[2] / "benchmarks" / "data" / "nccl_allreduce.csv"


def test_nccl_timings_are_met_within_a_tenth() -> None:
    errors = []
    for row in csv.DictReader(TIMINGS.open()):
        device = find_device(row["gpu"])
        if device is None or device.name.startswith("V100"):
            continue
        ranks, per_node = int(row["n_gpus"]), int(row["gpus_per_node"])
        machines = cluster(device.name, nodes=max(1, ranks // per_node), per_node=min(ranks, per_node))
        predicted = all_reduce(float(row["bytes"]), group(machines, ranks, 1), machines, CALIBRATION)
        errors.append(abs(predicted * 1e6 / float(row["time_us"]) - 1))
    assert len(errors) > 700
    assert median(errors) <= 0.10


def test_a_ring_moves_its_share() -> None:
    machines = cluster()
    size = 10e9
    time = gather(size, Group(8, 8), machines, CALIBRATION)
    assert time == pytest.approx(7 / 8 * size / (300e9 * CALIBRATION.intra), rel=0.02)
    assert all_reduce(size, Group(8, 8), machines, CALIBRATION) == pytest.approx(2 * time, rel=0.02)


def test_a_group_with_one_rank_a_node_has_one_network_card() -> None:
    machines = cluster(nodes=4)
    alone, together = group(machines, 4, 8), group(machines, 32, 1)
    assert (alone.per_node, together.per_node) == (1, 8)
    assert bandwidth(alone, machines, CALIBRATION) == pytest.approx(25e9 * CALIBRATION.inter)
    assert bandwidth(together, machines, CALIBRATION) == pytest.approx(8 * 25e9 * CALIBRATION.inter)


def test_nothing_is_sent_to_oneself() -> None:
    machines = cluster()
    for collective in (all_reduce, gather, all_to_all):
        assert collective(1e9, Group(1, 1), machines, CALIBRATION) == 0


def test_a_slow_link_between_sites_rules() -> None:
    near = cluster(nodes=4)
    far = dataclasses.replace(near, sites=2, site_bytes_per_second=1.25e9, site_latency_seconds=0.03)
    spanning, inside = group(far, 32, 1), group(far, 16, 1)
    assert (spanning.sites, inside.sites) == (2, 1)
    assert all_reduce(1e9, inside, far, CALIBRATION) == all_reduce(1e9, group(near, 16, 1), near, CALIBRATION)
    assert all_reduce(1e9, spanning, far, CALIBRATION) > 1e9 / 1.25e9


def test_sends_between_nodes_take_the_network() -> None:
    machines = cluster(nodes=2)
    inside, outside = (send(1e9, between_nodes=b, cluster=machines, cal=CALIBRATION) for b in (False, True))
    assert outside / inside == pytest.approx(300 * CALIBRATION.intra / (25 * CALIBRATION.inter), rel=0.01)


def test_no_bandwidth_takes_for_ever() -> None:
    broken = dataclasses.replace(cluster(), intra_bytes_per_second=0.0)
    assert all_reduce(1.0, Group(8, 8), broken, CALIBRATION) == math.inf
