"""Matrix products in fp32 on AMD processors with AVX-512: oneDNN's instead of MKL's, which there stop at AVX2.

torch 2.13 sends products of fp32 matrices to MKL on every x86 processor. MKL 2024.2 runs its AVX-512 kernels on Intel
processors only; on an AMD EPYC of 2024 they reach 116 billion operations per second and core, those of oneDNN, which
torch brings along and uses for 16 bits, 270 billion. No environment variable of MKL changes that
(MKL_ENABLE_INSTRUCTIONS, MKL_DEBUG_CPU_TYPE, MKL_CBWR). Results are rounded as well as MKL's, but not alike bit by bit,
so the choice depends on the processor alone, never on a measurement: all ranks of such hosts choose alike.

This can go when `torch.mm` of fp32 matrices is as fast as `torch.ops.mkldnn._linear_pointwise` there.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

NAME = "matmul"
LEAST_PRODUCTS = 2**20
"""Multiplications of the smallest product that oneDNN computes: below, a call from Python costs more than it saves."""
LEAST_SIDE = 8
"""Rows and columns of the narrowest one: MKL is faster at a matrix times a vector."""
TOLERANCE = 1e-6
"""Largest difference from float64, relative to the largest element, at which oneDNN is used."""
CHECKED = ((96, 160, 112), (128, 96, 264))
"""Rows, inner length and columns of the products that are compared with float64."""


@functools.cache
def why_not() -> str:
    """Why products stay MKL's on this machine; empty if oneDNN computes them."""
    known = torch.cpu.get_capabilities()
    if not ("AMD" in str(known.get("cpu_name", "")) and known.get("avx512_f")):
        return "MKL is as fast on this processor"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this torch has no oneDNN"
    worst = max(_difference(*sizes) for sizes in CHECKED)
    return "" if worst <= TOLERANCE else f"oneDNN's products differ from float64 by {worst:.1e}"


def switch(*, on: bool) -> None:
    """Let oneDNN compute this process's products, or MKL again."""
    if on:
        _replaced()
    elif _replaced.cache_info().currsize:
        _replaced()._destroy()  # type: ignore[no-untyped-call]
        _replaced.cache_clear()


@functools.cache
def _replaced() -> torch.library.Library:
    """The registration of our functions, which lasts as long as this object."""
    plain_mm, plain_addmm = (torch.library.get_kernel(f"aten::{name}", "CPU") for name in ("mm", "addmm"))

    def mm(keys: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if _is_large(left, right):
            return _product(left, right, None)
        found: torch.Tensor = plain_mm.call_boxed(keys, left, right)
        return found

    def addmm(
        keys: Any, bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
    ) -> torch.Tensor:
        if bias.dtype is torch.float32 and _is_large(left, right):
            if bias.dim() == 1 and beta == alpha == 1:
                return _product(left, right, bias.expand(right.shape[1]))
            return _product(left, right, None).mul_(alpha).add_(bias, alpha=beta)  # such as Muon's iterations
        found: torch.Tensor = plain_addmm.call_boxed(keys, bias, left, right, beta=beta, alpha=alpha)
        return found

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")  # which is the purpose
        for name, own in (("mm", mm), ("addmm", addmm)):
            library.impl(name, own, "CPU", with_keyset=True)  # type: ignore[no-untyped-call]
    return library


def _is_large(left: torch.Tensor, right: torch.Tensor) -> bool:
    (rows, inner), columns = left.shape, right.shape[1]
    fp32 = left.dtype is torch.float32 and right.dtype is torch.float32
    return fp32 and min(rows, columns) >= LEAST_SIDE and rows * inner * columns >= LEAST_PRODUCTS


def _product(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    weight = right.t()
    if not (weight.is_contiguous() or right.is_contiguous()):
        weight = weight.contiguous()  # oneDNN 3.12 computes with a slice a thousand times more slowly
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(left, weight, bias, "none", [], "")
    return found


def _difference(rows: int, inner: int, columns: int) -> float:
    """Of oneDNN's product from float64, relative to the largest element, for every layout that a layer uses."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator) for shape in ((rows, inner), (inner, columns)))
    exact = left.double() @ right.double()
    found = [
        _product(one, two, None)
        for one in (left, left.t().contiguous().t())
        for two in (right, right.t().contiguous().t())
    ]
    return max(float((each - exact).abs().max() / exact.abs().max()) for each in found)
