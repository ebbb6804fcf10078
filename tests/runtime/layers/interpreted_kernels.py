"""Run as a script in a process of its own: Liger's kernels in Triton's interpreter, on CPU tensors.

TRITON_INTERPRET=1 is set by the caller, because it must be there before the first import of Triton. Arguments: model
types. Prints a JSON object per type: kernels in effect, and the largest relative difference of loss and gradients.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from toolkit.recipe.model_section import Model
from toolkit.runtime.layers import fused_kernels
from toolkit.runtime.models.attention import largest_difference, outcome, trial_batches
from toolkit.runtime.models.build import build_model
from toolkit.runtime.proofs.coverage import tiny_model


def stand_in() -> None:
    """What Triton 3.9's interpreter lacks: floats as tensors, and `rsqrt` and `tanh` of libdevice.

    It makes tensors of integer arguments but leaves Python floats as they are, which Liger 0.8.5 calls `.to` of.
    """
    convert = interpreter._implicit_cvt

    def implicit(argument: Any) -> Any:
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = implicit
    from liger_kernel.ops import geglu, rms_norm

    rms_norm.rsqrt, geglu.tanh = reciprocal_root, hyperbolic_tangent


@triton.jit
def reciprocal_root(x):  # type: ignore[no-untyped-def]
    return 1 / tl.sqrt(x)


@triton.jit
def hyperbolic_tangent(x):  # type: ignore[no-untyped-def]
    return 1 - 2 / (tl.exp(2 * x) + 1)


def tried(kind: str) -> dict[str, Any]:
    """One type with all its kernels against the plain model."""
    section = tiny_model(kind)
    names = fused_kernels.kernels_of(Model(config=section.config, init="scratch", precision="fp32", kernels="liger"))
    micro = trial_batches()[2]
    outcomes = []
    for kernels in ("none", "liger"):
        chosen = Model(config=section.config, init="scratch", precision="fp32", kernels=kernels)
        model = build_model(chosen, 0).eval()
        fused_kernels.install(model, chosen)
        outcomes.append(outcome(model, lambda: model(**micro.inputs()).logits, micro))  # noqa: B023
    return {"type": kind, "kernels": names, "difference": largest_difference(*outcomes)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    stand_in()
    for kind in sys.argv[1:]:
        print(json.dumps(tried(kind)), flush=True)
