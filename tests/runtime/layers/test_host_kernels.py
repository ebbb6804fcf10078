"""Norms and rotary embeddings in plain torch: results and gradients of transformers' own, in float64 accuracy."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.helpers.parallel import model
from toolkit.recipe.model_section import Model
from toolkit.runtime.layers import fused_kernels, host_kernels
from toolkit.runtime.machine import host_matmul

MATMUL = () if host_matmul.why_not() else (host_matmul.NAME,)
"""What every fp32 model uses on this processor."""


def built(section: Model) -> Any:
    values = dict(section.config or {})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm])
def test_norm_has_the_gradients_of_float64(kind: Any) -> None:
    torch.manual_seed(0)
    exact, fused = kind(24).double(), kind(24)
    weight = torch.randn(24)
    for norm in (exact, fused):
        norm.weight.data.copy_(weight)
    holder = torch.nn.Sequential(fused)
    for norm, epsilon, shift in host_kernels._norms(holder):
        norm.forward = lambda x, n=norm, e=epsilon, s=shift: host_kernels._Norm.apply(x, n.weight, e, s)
    assert "forward" in vars(fused), "the norm was not recognised"
    hidden = torch.randn(3, 5, 2, 24).transpose(1, 2)  # not contiguous, like heads
    inputs = [hidden.double().requires_grad_(), hidden.clone().requires_grad_()]
    outputs = [norm(given) for norm, given in zip((exact, fused), inputs, strict=True)]
    slope = torch.randn(hidden.shape)
    for output in outputs:
        output.backward(slope.to(output.dtype))
    pairs = [outputs, [given.grad for given in inputs], [exact.weight.grad, fused.weight.grad]]
    for expected, found in pairs:
        assert (expected - found).abs().max() < 1e-6 * expected.abs().max()


def test_rotary_has_the_gradients_of_float64() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 7, 4, 8).transpose(1, 2), torch.randn(2, 7, 2, 8).transpose(1, 2)
    cosine, sine = torch.randn(2, 7, 8), torch.randn(2, 7, 8)  # halves that differ: nothing is assumed about angles
    results = []
    for dtype in (torch.float64, torch.float32):
        given = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (query, key)]
        plain = modeling_llama.apply_rotary_pos_emb
        outputs = host_kernels._rotated(plain, *given, cosine.to(dtype), sine.to(dtype))
        torch.manual_seed(1)
        torch.autograd.backward(outputs, [torch.randn(each.shape).to(dtype) for each in outputs])
        results.append([*outputs, *(each.grad for each in given)])
    for expected, found in zip(*results, strict=True):
        assert (expected - found).abs().max() < 1e-6 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("llama", ("rms_norm", "rope")),
        ("gemma2", ("rms_norm", "rope")),
        ("glm4", ("rms_norm",)),  # it turns neighbours instead of halves
        ("gpt2", ()),
    ],
)
def test_types_use_what_agrees_with_them(kind: str, names: tuple[str, ...]) -> None:
    assert fused_kernels.kernels_of(model(kind)) == (*MATMUL, *names)


def test_half_precision_and_none_stay_plain() -> None:
    assert fused_kernels.kernels_of(replace(model("llama"), precision="bf16")) == ()
    assert fused_kernels.kernels_of(replace(model("llama"), kernels="none")) == ()
    assert fused_kernels.kernels_of(replace(model("llama"), compile="layers")) == MATMUL


def test_a_norm_that_differs_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial compares complete models, so a kernel that is wrong only in its gradient is found."""
    right = host_kernels._Norm.backward
    monkeypatch.setattr(host_kernels._Norm, "backward", staticmethod(lambda ctx, g: right(ctx, 1.01 * g)))
    values = dict(model("llama").config or {})
    assert "differ by" in fused_kernels._trial(values, "rms_norm", fused_kernels.HOST)


def test_a_later_model_without_kernels_is_plain() -> None:
    section = model("llama")
    fused, plain = built(section), built(section)
    original = host_kernels._rotary(fused)
    fused_kernels.install(fused, section)
    assert modeling_llama.apply_rotary_pos_emb is not original
    assert "forward" in vars(fused.model.norm)
    fused_kernels.install(plain, replace(section, kernels="none"))
    assert importlib.import_module("transformers.models.llama.modeling_llama").apply_rotary_pos_emb is original
    assert "forward" not in vars(plain.model.norm)
