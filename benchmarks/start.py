"""Peak memory and time of a start, against `from_pretrained` + `deepspeed.initialize` in the same run.

python -m benchmarks.start [--size 1b|0.8b|0.3b|tiny] [--rows zero-1 zero-2 zero-3 tensor pipeline] [--no-step]
                           [--no-peer]

Four gloo ranks load a Llama in bf16 from safetensors. Memory is the peak of resident bytes above the empty worker, of
the fullest rank, until the engine exists and until the first step has been taken. Each row is judged against
`bound`: what the rank has to hold anyway. With `--no-step`, time ends with the first loss.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from toolkit.plans.deepspeed_config import bucket_elements, deepspeed_config
from toolkit.plans.plan import Plan
from toolkit.recipe.model_section import Model
from toolkit.recipe.schedules import make_schedule
from toolkit.recipe.sections import Train
from toolkit.runtime.build_engine import EngineSpec, build_engine
from toolkit.runtime.distributed.process_group import current_world
from toolkit.runtime.models.build import build_in_place, skeleton
from toolkit.runtime.models.head_loss import why_not
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.supervision.warm_pool import call_on_ranks, first_failure
from toolkit.units import GIB

RANKS, TOKENS = 4, 2
"""Few tokens: without bf16 instructions a processor takes minutes for the backward pass of more, on both sides."""
SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 32000},
    "0.3b": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "vocab_size": 32000},
    "0.8b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 11, "vocab_size": 32000},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 32000},
}
_ZERO = Plan(strategy="zero", dp=RANKS, zero_group=RANKS, micro_batch=1)
PLANS = {
    "zero-1": replace(_ZERO, zero_stage=1),
    "zero-2": replace(_ZERO, zero_stage=2),
    "zero-3": replace(_ZERO, zero_stage=3),
    "tensor": Plan(strategy="tensor_parallel", tp=RANKS, zero_stage=1, micro_batch=RANKS),
    "pipeline": Plan(strategy="pipeline", pp=RANKS, zero_stage=1, micro_batch=1, grad_accum=RANKS),
}


@dataclass(frozen=True)
class Start:
    """What one rank has measured."""

    start_bytes: int
    """Peak resident bytes above the empty worker until the engine exists."""
    step_bytes: int
    """Until the first step has been taken; 0 without a step."""
    seconds: float
    """From the start to the end of the first step; without a step, to the first loss."""
    loss: float


class Watch:
    """Peak of this process's resident bytes and seconds since it was made."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self._base, self._began = _status("VmRSS"), time.perf_counter()

    def peak_bytes(self) -> int:
        """Since the beginning, above what the process held then."""
        return _status("VmHWM") - self._base

    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self._began


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def own_start(path: str, plan: Plan, params: int, steps: bool) -> Start:
    """As one rank: the toolkit's start."""
    watch = Watch()
    train = Train(global_batch=plan.global_batch, steps=1, lr=1e-4)
    spec = EngineSpec(
        model=Model(path=path, init="pretrained", precision="bf16"),
        train=train,
        plan=plan,
        deepspeed=deepspeed_config(plan, train, params=params, backend="cpu"),
        schedule=make_schedule(train, 1),
    )
    engine = build_engine(spec, current_world())
    start, batch = watch.peak_bytes(), _batch(plan, engine.replica)
    if steps:
        loss = float(engine.step(batch).loss)
    else:
        sums = engine.evaluate(batch)
        loss = sums.loss / sums.counted
    return Start(start, watch.peak_bytes() if steps else 0, watch.seconds(), loss)


def peer_start(path: str, plan: Plan, params: int, steps: bool) -> Start:
    """As one rank: what a person writes with transformers and DeepSpeed. Tensor parallel is DeepSpeed's AutoTP.

    A pipeline has no such two lines: its peer is ZeRO 1 with the complete model on every rank.
    """
    import deepspeed
    from transformers import AutoModelForCausalLM

    watch = Watch()
    if plan.pp > 1:
        plan = PLANS["zero-1"]
    if plan.tp > 1:
        plan = replace(plan, tensor_by="autotp")
    train = Train(global_batch=plan.global_batch, steps=1, lr=1e-4)
    config = deepspeed_config(plan, train, params=params, backend="cpu")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    start = watch.peak_bytes()
    for micro in _batch(plan, torch.distributed.get_rank() if plan.dp > 1 else 0):
        with torch.set_grad_enabled(steps):
            logits = engine(input_ids=micro.input_ids, use_cache=False).logits.float()
            value = torch.nn.functional.cross_entropy(logits.flatten(0, 1), micro.labels.flatten())
        if steps:
            engine.backward(value)
            engine.step()
    total = value.detach()
    torch.distributed.all_reduce(total)
    return Start(start, watch.peak_bytes() if steps else 0, watch.seconds(), float(total) / RANKS)


def _batch(plan: Plan, replica: int) -> list[MicroBatch]:
    ids = torch.arange(RANKS * (TOKENS + 1)).view(RANKS, -1) * 7 % 31991
    rows = ids[replica * RANKS // plan.dp : (replica + 1) * RANKS // plan.dp]
    return [MicroBatch(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in rows.split(plan.micro_batch)]


def bound_bytes(name: str, model: torch.nn.Module) -> float:
    """What a rank may hold while it starts.

    ZeRO 1 and 2: one bf16 copy and its share of the states. Others: its share of weights, gradients and states in
    bf16 and fp32, DeepSpeed's buckets, and twice the largest tensor. Then 10%.
    """
    sizes = [parameter.numel() for parameter in model.parameters()]
    params, plan = sum(sizes), PLANS[name]
    if name in ("zero-1", "zero-2"):
        return 1.1 * (2 * params + 12 * params / RANKS)
    bucket = bucket_elements(params, plan.tp * plan.pp)
    return 1.1 * (16 * params / RANKS + 2 * bucket + 2 * 2 * max(sizes))


def measured(function: Callable[..., Start], path: str, plan: Plan, params: int, *, steps: bool) -> list[Start]:
    """One start on four ranks."""
    results: list[Any] = call_on_ranks(function, path, plan, params, steps, nproc=RANKS, timeout_seconds=900)
    failure = first_failure(results)
    if failure is not None:
        raise RuntimeError(f"{failure.reason}\n{failure.details}")
    return results


def main() -> None:
    """Print a row per strategy: bytes against the bound, and both against the peer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--rows", nargs="*", choices=PLANS, default=list(PLANS))
    parser.add_argument("--no-step", action="store_true", help="stop at the first loss: half the memory")
    parser.add_argument("--no-peer", action="store_true", help="the toolkit's start only")
    given = parser.parse_args()
    config = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, **SIZES[given.size]}
    section = Model(config={**config, "tie_word_embeddings": False}, init="scratch", precision="bf16")
    empty = skeleton(section)
    params = sum(parameter.numel() for parameter in empty.parameters())
    print(f"{params / 1e9:.2f} billion parameters, {RANKS} ranks; GiB above an empty worker, fullest rank")
    print(
        f"{'':10} {'bound':>6} {'start':>6} {'peer':>6} {'+step':>6} {'peer':>6} {'s':>6} {'peer':>6}  first loss, peer"
    )
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        build_in_place(section, 0, torch.bfloat16, "cpu").save_pretrained(folder)
        os.sync()  # otherwise the first rows wait for the disk
        began = time.perf_counter()
        why_not(Model(path=folder, init="pretrained", precision="bf16"))
        print(f"trials on tiny models, once per host and user: {time.perf_counter() - began:.1f} s, not counted below")
        for name in given.rows:
            both = [
                measured(function, folder, PLANS[name], params, steps=not given.no_step)
                for function in ((own_start,) if given.no_peer else (own_start, peer_start))
            ]
            print(_row(name, bound_bytes(name, empty), *both), flush=True)


def _row(name: str, bound: float, own: list[Start], peer: list[Start] | None = None) -> str:
    both = (own,) if peer is None else (own, peer)

    def sizes(key: str) -> str:
        return " ".join(f"{max(getattr(one, key) for one in ranks) / GIB:6.2f}" for ranks in both)

    seconds = " ".join(f"{max(one.seconds for one in ranks):6.1f}" for ranks in both)
    verdict = "within" if max(one.start_bytes for one in own) <= bound else "ABOVE"
    parts = [f"{name:10} {bound / GIB:6.2f}", sizes("start_bytes"), sizes("step_bytes"), seconds]
    return " ".join(parts) + "  " + " ".join(f"{ranks[0].loss:.6f}" for ranks in both) + f" {verdict}"


if __name__ == "__main__":
    main()
