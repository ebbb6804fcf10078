"""Norms and rotary embeddings for hosts without a GPU, in plain torch: the same results in half the passes over memory.

transformers writes both as a chain of operators, each of which reads and writes a tensor as large as the hidden states,
forward and backward. On a CPU that takes a fifth of the time of a small model. Here the backward pass is written out.
Nothing is compiled. Only fp32 is changed: in narrower types transformers rounds between the operators.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

NAMES = ("rms_norm", "rope")
ROTARY = "apply_rotary_pos_emb"
"""Function in a modeling file of transformers that turns queries and keys."""
SHIFTS = (0.0, 1.0)
"""What is added to a norm's weight; Gemma stores weights around 0."""


class _Norm(torch.autograd.Function):
    """y = x / rms(x) · (weight + shift) along the last dimension."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, shift: float) -> torch.Tensor:
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        inverse = length.square_().div_(hidden.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(hidden, weight, inverse)
        ctx.shift = shift
        output: torch.Tensor = (hidden * inverse).mul_(weight + shift if shift else weight)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, inverse = ctx.saved_tensors
        width, scale = hidden.shape[-1], weight + ctx.shift if ctx.shift else weight
        product = gradient * hidden
        rows = product.reshape(-1, width)
        of_weight = (inverse.reshape(1, -1) @ rows).view(-1) if ctx.needs_input_grad[1] else None
        slope = (rows @ scale).view_as(inverse).mul_(inverse.pow(3).div_(-width))
        of_hidden = torch.mul(gradient, scale, out=product).mul_(inverse).addcmul_(hidden, slope)
        return of_hidden, of_weight, None, None


class _Rotary(torch.autograd.Function):
    """x · cos + (−second half of x, first half of x) · sin, for queries and keys."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cosine, sine)
        half = sine.shape[-1] // 2
        first, second = sine[..., :half], sine[..., half:]
        return _turned(query, cosine, first, second, -1), _turned(key, cosine, first, second, -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        half = sine.shape[-1] // 2
        first, second = sine[..., half:], sine[..., :half]
        return _turned(query, cosine, first, second, 1), _turned(key, cosine, first, second, 1), None, None


def _turned(
    tensor: torch.Tensor, cosine: torch.Tensor, first: torch.Tensor, second: torch.Tensor, sign: int
) -> torch.Tensor:
    """Tensor · cosine + sign · (second half · first, −first half · second)."""
    half = tensor.shape[-1] // 2
    found = tensor * cosine
    found[..., :half].addcmul_(tensor[..., half:], first, value=sign)
    found[..., half:].addcmul_(tensor[..., :half], second, value=-sign)
    return found


def offered(model: Any) -> tuple[str, ...]:
    """Kernels that a model has a place for; whether results stay the same is for a trial to say."""
    found = {"rms_norm": bool(_norms(model)), "rope": _rotary(model) is not None}
    return tuple(name for name in NAMES if found[name])


def apply(model: Any, names: tuple[str, ...]) -> None:
    """Let a model use these kernels, and no others of this module."""
    for norm, epsilon, shift in _norms(model) if "rms_norm" in names else ():
        norm.forward = functools.partial(_normed, type(norm).forward, norm, epsilon, shift)
    module, plain = sys.modules[type(model).__module__], _rotary(model)
    if plain is not None:  # layers look it up by name, so it is one for all models of this file
        setattr(
            module, ROTARY, functools.wraps(plain)(functools.partial(_rotated, plain)) if "rope" in names else plain
        )


def _normed(
    plain: Callable[..., torch.Tensor], norm: Any, epsilon: float, shift: float, hidden: torch.Tensor
) -> torch.Tensor:
    if hidden.dtype is not torch.float32 or norm.weight.dtype is not torch.float32:
        return plain(norm, hidden)
    return _Norm.apply(hidden, norm.weight, epsilon, shift)  # type: ignore[no-any-return, no-untyped-call]


def _rotated(
    plain: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int = 1,
) -> Any:
    """Names as in transformers, whose layers may pass them by keyword."""
    fits = {q.dtype, k.dtype, cos.dtype, sin.dtype} == {torch.float32} and q.shape[-1] == k.shape[-1] == cos.shape[-1]
    if not fits or cos.requires_grad:  # part of each head is turned, or another precision
        return plain(q, k, cos, sin, unsqueeze_dim)
    return _Rotary.apply(q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))  # type: ignore[no-untyped-call]


def _norms(model: Any) -> list[tuple[Any, float, float]]:
    """RMS norms of a model: module, epsilon, shift of the weight."""
    kinds = {type(module) for module in model.modules() if type(module).__name__.endswith("RMSNorm")}
    shifts = {kind: _shift(kind) for kind in kinds}  # type: ignore[arg-type]
    found = []
    for module in model.modules():
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        shift = shifts.get(type(module))
        if shift is not None and epsilon is not None:
            found.append((module, float(epsilon), shift))
    return found


@functools.cache
def _shift(kind: type[torch.nn.Module]) -> float | None:
    """What a class of norms adds to its weight, found by trying it; None if it is not an RMS norm with a weight."""
    if len(inspect.signature(kind.forward).parameters) != 2:
        return None
    try:
        norm = kind(8)  # transformers' norms take the width, and a default for epsilon
        epsilon = float(getattr(norm, "variance_epsilon", getattr(norm, "eps", None)))  # type: ignore[arg-type]
        weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 8))
        norm.weight = weight
        hidden = torch.linspace(-1, 2, 16).view(2, 8)
        with torch.no_grad():
            expected = norm(hidden)
            for shift in SHIFTS:
                if torch.allclose(_Norm.apply(hidden, weight, epsilon, shift), expected, rtol=1e-5):  # type: ignore[no-untyped-call]
                    return shift
    except Exception:  # a class of another kind: it keeps its own forward pass
        return None
    return None


def _rotary(model: Any) -> Callable[..., Any] | None:
    """The function that turns queries and keys, as transformers has it; None if it turns them in another way."""
    found = vars(sys.modules[type(model).__module__]).get(ROTARY)
    plain = inspect.unwrap(found) if callable(found) else None
    return plain if plain is not None and _turns_halves(plain) else None


@functools.cache
def _turns_halves(plain: Callable[..., Any]) -> bool:
    if list(inspect.signature(plain).parameters) != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
        return False
    query, key = torch.linspace(-1, 1, 48).view(1, 2, 3, 8), torch.linspace(1, 2, 24).view(1, 1, 3, 8)
    angles = torch.linspace(0, 3, 12).view(1, 3, 4).repeat(1, 1, 2)
    try:
        expected = plain(query, key, angles.cos(), angles.sin())
        return all(map(torch.allclose, expected, _rotated(plain, query, key, angles.cos(), angles.sin())))
    except Exception:  # it takes other arguments: it stays as it is
        return False
