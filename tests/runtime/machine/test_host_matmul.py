"""fp32 products on the host: oneDNN's on the processors where MKL is slow, with float64's results, and MKL's again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.parallel import model
from toolkit.runtime.layers import fused_kernels
from toolkit.runtime.machine import host_matmul

ROWS, WIDE, NARROW = 160, 128, 96
"""A layer whose products are above `LEAST_PRODUCTS`."""


@pytest.fixture(autouse=True)
def plain_again() -> Iterator[None]:
    yield
    host_matmul.switch(on=False)
    host_matmul.why_not.cache_clear()


def results(dtype: torch.dtype, *, bias: bool) -> list[torch.Tensor]:
    """Output and gradients of a linear layer."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(WIDE, NARROW, bias=bias).to(dtype)
    given = torch.randn(2, ROWS // 2, WIDE).to(dtype).requires_grad_()
    output = layer(given)
    output.backward(torch.randn(output.shape).to(dtype))
    return [output.detach(), given.grad, *(one.grad for one in layer.parameters())]  # type: ignore[list-item]


def operators(*, bias: bool) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        results(torch.float32, bias=bias)
    return {event.key for event in seen.key_averages()}


@pytest.mark.parametrize("bias", [False, True])
def test_layers_and_gradients_are_computed_by_onednn_as_exactly_as_by_mkl(bias: bool) -> None:
    exact, plain = results(torch.float64, bias=bias), results(torch.float32, bias=bias)
    assert "mkldnn::_linear_pointwise" not in operators(bias=bias)
    host_matmul.switch(on=True)
    assert "mkldnn::_linear_pointwise" in operators(bias=bias)
    for expected, found in zip(exact, results(torch.float32, bias=bias), strict=True):
        assert (expected - found).abs().max() < 1e-6 * expected.abs().max()
    host_matmul.switch(on=False)
    assert all(map(torch.equal, results(torch.float32, bias=bias), plain))


def test_small_products_and_other_types_stay_as_they_are() -> None:
    torch.manual_seed(0)
    small = torch.randn(8, 8)
    wide = torch.randn(256, 256).double()
    before = small @ small, wide @ wide, torch.addmm(wide, wide, wide, beta=0.5, alpha=2)
    host_matmul.switch(on=True)
    after = small @ small, wide @ wide, torch.addmm(wide, wide, wide, beta=0.5, alpha=2)
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("shape", [(ROWS, WIDE), (1, WIDE), (WIDE,)])
def test_sums_with_scaled_products_are_computed_by_onednn_too(shape: tuple[int, ...]) -> None:
    """As in Muon's iterations."""
    torch.manual_seed(0)
    bias, left, right = torch.randn(shape), torch.randn(ROWS, NARROW), torch.randn(NARROW, WIDE)
    exact = 0.5 * bias.double() - 2 * (left.double() @ right.double())
    host_matmul.switch(on=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        found = torch.addmm(bias, left, right, beta=0.5, alpha=-2)
    assert "mkldnn::_linear_pointwise" in {event.key for event in seen.key_averages()}
    assert (found - exact).abs().max() < 1e-6 * exact.abs().max()


def test_slices_take_no_longer_than_complete_matrices() -> None:
    """oneDNN 3.12 alone takes a thousand times as long for them."""
    torch.manual_seed(0)
    left, wide = torch.randn(ROWS, WIDE), torch.randn(2 * WIDE, 2 * WIDE)
    sliced = [wide[:WIDE, :WIDE], wide[:WIDE, :WIDE].t(), wide[::2, ::2], wide[:1, :WIDE].expand(WIDE, WIDE)]
    expected = [left @ right for right in sliced]
    host_matmul.switch(on=True)
    for right, plain in zip(sliced, expected, strict=True):
        assert (left @ right - plain).abs().max() < 1e-5 * plain.abs().max()
        assert _seconds(left, right) < 30 * _seconds(left, right.contiguous())


def _seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    """Processor time of the fastest of three products."""
    found = []
    for _ in range(3):
        began = time.thread_time()
        _ = left @ right
        found.append(time.thread_time() - began)
    return min(found)


@pytest.mark.parametrize(
    ("processor", "reason"),
    [
        ({"cpu_name": "AMD EPYC", "avx512_f": True}, ""),
        ({"cpu_name": "AMD EPYC", "avx512_f": False}, "MKL is as fast"),
        ({"cpu_name": "Intel(R) Xeon(R)", "avx512_f": True}, "MKL is as fast"),
        ({"architecture": "aarch64"}, "MKL is as fast"),
    ],
)
def test_the_processor_decides(processor: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor)
    host_matmul.why_not.cache_clear()
    found = host_matmul.why_not()
    assert found.startswith(reason)
    assert bool(found) == bool(reason)
    names = fused_kernels.kernels_of(model("gpt2"))
    assert names == (() if reason else (host_matmul.NAME,))
    assert fused_kernels.kernels_of(replace(model("gpt2"), precision="bf16")) == ()
    assert fused_kernels.kernels_of(replace(model("gpt2"), kernels="none")) == ()


def test_products_that_differ_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = host_matmul._product
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": "AMD EPYC", "avx512_f": True})
    monkeypatch.setattr(host_matmul, "_product", lambda *given: right(*given) * (1 + 1e-5))
    host_matmul.why_not.cache_clear()
    assert "differ from float64" in host_matmul.why_not()
