"""The time model against numbers worked by hand, and against what must hold between plans."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.helpers.planning import GPT_3_175B, LLAMA_2_7B, LLAMA_3_405B, cluster, decoder, job
from toolkit.clusters.devices import DEVICES
from toolkit.cost.calibration import CALIBRATION, CONSTANTS
from toolkit.cost.operators import PROLOGUE, Rates, gemm_seconds, power_share
from toolkit.cost.timing import model_flops, step_time
from toolkit.plans.exchange import Exchange
from toolkit.plans.plan import Plan

A100, H100 = DEVICES["A100-SXM4-80GB"], DEVICES["H100-SXM5-80GB"]


def test_at_most_25_constants_are_fitted() -> None:
    assert len(CONSTANTS) <= 25


def test_a_large_matmul_runs_at_the_calibrated_share_of_the_measured_rate() -> None:
    """8192 × 8192 outputs are 2,048 tiles of 256 × 128: 19 waves of 108 instead of 18.96."""
    seconds = gemm_seconds(8192, 8192, 8192, Rates(), A100, CALIBRATION)
    waves, filled = 19 / (2048 / 108), (8192 + PROLOGUE) / 8192
    assert seconds == pytest.approx(2 * 8192**3 * waves * filled / (271.2e12 * CALIBRATION.matmul))


def test_narrow_matmuls_lose_tiles_and_waves() -> None:
    """Fewer tiles than multiprocessors leave a part of the device idle; splitting the inner side helps in part."""
    wide, narrow = (gemm_seconds(2048, n, 8192, Rates(), A100, CALIBRATION) / n for n in (8192, 512))
    assert 1.05 < narrow / wide < 1.6
    odd, even = (gemm_seconds(8192, n, 768, Rates(), A100, CALIBRATION) / n for n in (50257, 50304))
    assert odd / even == pytest.approx(1 / 0.45, rel=0.01)


def test_a_side_that_does_not_fit_the_tiles_costs() -> None:
    odd, even = (gemm_seconds(8192, n, 14336, Rates(), A100, CALIBRATION) / n for n in (1800, 1792))
    assert odd / even == pytest.approx(1 / CALIBRATION.misaligned, rel=0.05)


def test_low_power_for_the_peak_lowers_the_sustained_rate() -> None:
    assert power_share(A100, CALIBRATION) == 1
    assert power_share(H100, CALIBRATION) == pytest.approx(1)
    capped = dataclasses.replace(H100, power_cap=500 / 700)
    assert power_share(capped, CALIBRATION) == pytest.approx((500 / 700) ** 0.6)
    assert power_share(DEVICES["B200-SXM"], CALIBRATION) < 1


def test_model_flops_are_six_per_parameter_and_half_of_the_square() -> None:
    flops = model_flops(job(LLAMA_2_7B, global_batch=1, seq_len=4096))
    matmul_params = LLAMA_2_7B.params - 32000 * 4096
    assert flops == pytest.approx(4096 * (6 * matmul_params + 6 * 32 * 4096 * 4096))


def test_zero_3_is_slower_than_zero_1_across_nodes_and_about_equal_inside_one() -> None:
    def seconds(stage: int, nodes: int) -> float:
        dp = 8 * nodes
        plan = Plan(strategy="zero", dp=dp, zero_stage=stage, zero_group=dp, micro_batch=1, grad_accum=4)
        return step_time(plan, job(machines=cluster(nodes=nodes), global_batch=4 * dp)).total

    assert seconds(3, 1) < 1.35 * seconds(1, 1)
    assert seconds(3, 32) > 1.3 * seconds(1, 32)


def test_the_bubble_is_p_minus_1_of_m() -> None:
    plan = Plan(strategy="pipeline", dp=1, pp=8, micro_batch=1, grad_accum=64)
    small_head = decoder(vocab=256)
    time = step_time(plan, job(small_head))
    per_micro_batch = (time.compute + time.recompute) / 64
    assert time.pp_bubble == pytest.approx(7 * per_micro_batch, rel=0.01)


def test_the_output_head_slows_its_stage() -> None:
    plan = Plan(strategy="pipeline", dp=1, pp=8, micro_batch=1, grad_accum=64)
    light, heavy = step_time(plan, job(decoder(vocab=256))), step_time(plan, job(decoder(vocab=256000)))
    assert heavy.total > 1.5 * light.total


def test_tensor_parallel_across_nodes_collapses() -> None:
    inside = Plan(strategy="tensor_parallel", dp=4, tp=8, micro_batch=1, grad_accum=16)
    across = Plan(strategy="tensor_parallel", dp=1, tp=32, micro_batch=1, grad_accum=64)
    work = job(machines=cluster(nodes=4))
    assert step_time(across, work).total > 3 * step_time(inside, work).total


def test_recompute_costs_a_forward_pass() -> None:
    plan = Plan(strategy="data_parallel", dp=8, micro_batch=4, grad_accum=2)
    kept = step_time(plan, job())
    full = step_time(dataclasses.replace(plan, recompute="full"), job())
    assert full.recompute == pytest.approx(kept.compute / 3, rel=0.15)
    assert full.compute == kept.compute


def test_small_operators_are_bound_by_their_launch() -> None:
    tiny = decoder(layers=4, hidden=256, ffn=512, heads=4, kv_heads=4, vocab=512)
    one = Plan(strategy="data_parallel", dp=1, micro_batch=1, grad_accum=1)
    time = step_time(one, job(tiny, cluster(per_node=1), global_batch=1, seq_len=128))
    launches = 3 * 4 * 50 + 10  # forward, and twice as many backward, on 4 layers; loss
    assert time.compute == pytest.approx(launches * CALIBRATION.launch_seconds, rel=0.01)


def test_offload_pays_for_the_link_and_the_host() -> None:
    plan = Plan(strategy="zero", dp=8, zero_stage=2, zero_group=8, micro_batch=1, grad_accum=8)
    resident = step_time(plan, job())
    moved = step_time(dataclasses.replace(plan, offload="cpu"), job())
    shard = LLAMA_2_7B.params / 8
    assert moved.optimizer - resident.optimizer > 4 * shard / 25e9


def test_quantised_traffic_is_five_twelfths() -> None:
    """Two gathers of 1 and a reduction of 1 become one half, one half and one quarter; latency stays."""
    slow = dataclasses.replace(cluster(nodes=32), inter_bytes_per_second=1e9, inter_latency_seconds=1e-9)
    plan = Plan(strategy="zero", dp=256, zero_stage=3, zero_group=256, micro_batch=1, grad_accum=1)
    work = job(machines=slow, global_batch=256)
    plain = step_time(plan, work)
    quantised = step_time(dataclasses.replace(plan, zero_quantized="both"), work)
    hidden = 0.49 * plain.compute - plain.compute
    assert (quantised.dp_comm - hidden) / (plain.dp_comm - hidden) == pytest.approx(5 / 12, rel=0.05)


def test_published_runs_are_predicted_within_a_tenth() -> None:
    """GPT-3 175B, 384 A100, tp 8, pp 12: 153 TFLOP/s, 76.8 s (SC21, table 2): not among the rows that were fitted."""
    from toolkit.cost.execution import Execution
    from toolkit.cost.software import RECOMPUTE, software_of
    from toolkit.cost.timing import seconds

    run = Execution(
        model=GPT_3_175B, cluster=cluster(nodes=48), seq_len=2048, micro_batch=1, grad_accum=384, dp=4, tp=8, pp=12,
        recompute=RECOMPUTE["full"],
        software=software_of("Megatron-LM (2021)", device="A100", flash=False, precision="fp16", pipeline=True),
    )  # fmt: skip
    assert seconds(run).total == pytest.approx(76.8, rel=0.1)


def test_every_part_is_finite_and_not_negative() -> None:
    work = job(LLAMA_3_405B, cluster("H100-SXM5-80GB", nodes=2048), global_batch=2048, seq_len=8192)
    plan = Plan(strategy="hybrid", dp=128, tp=8, pp=16, zero_stage=1, zero_group=128, micro_batch=1, grad_accum=16)
    parts = dataclasses.asdict(step_time(plan, work))
    assert all(0 <= part < 1e4 for part in parts.values())


def test_islands_wait_for_what_does_not_hide_behind_their_steps() -> None:
    """At once, behind a few steps, behind a round; and a delay of a whole round is no other than none."""
    plan = Plan(strategy="local_sgd", islands=2, dp=8, zero_stage=2, zero_group=8, local_steps=50, grad_accum=4)
    apart = dataclasses.replace(cluster(nodes=2), sites=2, site_bytes_per_second=1e9)

    def exchange(**how: Any) -> float:
        return step_time(plan, job(LLAMA_2_7B, apart, exchange=Exchange(**how))).dp_comm

    at_once, few = exchange(), exchange(hidden=True, delay_steps=1)
    round_late = exchange(hidden=True)
    assert round_late < few < at_once
    assert exchange(hidden=True, delay_steps=50) == round_late
    assert exchange(bits=2, density=0.05) < exchange(bits=2) < exchange(bits=8) < at_once
    assert exchange(hidden=True, local_steps=None, bits=None, fragments=None) < at_once
