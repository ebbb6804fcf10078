"""Compiled decoder layers by model type: the losses of eager layers, and nothing compiled after the first step.

    python -m benchmarks.compiled [--types llama,qwen3,…] [--backend inductor]

Each tiny model trains on packed documents whose bounds differ in every step, with DeepSpeed's engine under ZeRO 2,
eager and compiled. One line of JSON per type; the exit code is 1 if a type differs, or is compiled again. Types whose
trial says no are refused before a run: they are listed with the reason.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from toolkit.plans.deepspeed_config import deepspeed_config
from toolkit.plans.plan import Plan
from toolkit.recipe.model_section import Model
from toolkit.recipe.schedules import make_schedule
from toolkit.recipe.sections import Train
from toolkit.run_dir.trajectory import Trajectory, largest_difference
from toolkit.runtime.build_engine import EngineSpec, build_engine
from toolkit.runtime.distributed.process_group import current_world
from toolkit.runtime.layers import compiled_layers
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.models.tiny_models import VOCABULARY
from toolkit.runtime.proofs.coverage import tiny_model
from toolkit.runtime.supervision.warm_pool import call_on_ranks, first_failure

TYPES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt2", "gpt_neox", "gptj",
    "gpt_neo", "codegen", "falcon", "bloom", "opt", "smollm3", "starcoder2", "olmo", "olmo2", "olmo3", "cohere",
    "cohere2", "granite", "glm", "glm4", "stablelm", "persimmon", "nemotron", "helium", "exaone4", "ernie4_5",
    "seed_oss", "arcee", "apertus", "hunyuan_v1_dense", "ministral", "diffllama", "xglm", "biogpt", "mixtral",
    "qwen3_moe", "gpt_oss",
)  # fmt: skip
STEPS, ROWS, TOKENS = 4, 4, 32
TRAIN = Train(global_batch=ROWS, steps=STEPS, lr=1e-3, schedule="constant", warmup=0.0)
PLAN = Plan(strategy="zero", zero_stage=2, micro_batch=ROWS, precision="fp32")
TOLERANCE = 1e-5
"""Largest relative difference of losses and gradient norms: compiled operators are fused, so they round differently."""
TYPE_SECONDS = 1200


def main() -> int:
    """Compare every type, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--backend", default=compiled_layers.BACKEND, help="of torch.compile (default: %(default)s)")
    args = parser.parse_args()
    exact = refused = wrong = 0
    for kind in args.types.split(","):
        row = {"type": kind, **compared(kind, args.backend)}
        print(json.dumps(row), flush=True)
        ok = "difference" in row and row["difference"] <= TOLERANCE and len(set(row["graphs"])) == 1
        exact, refused, wrong = exact + ok, refused + ("refused" in row), wrong + (not ok and "refused" not in row)
    print(f"{exact} types exact without a later compilation, {refused} refused, {wrong} wrong")
    return int(wrong > 0)


def compared(kind: str, backend: str) -> dict[str, Any]:
    """One type in processes of its own: what is compiled stays in a process."""
    began = time.monotonic()
    section = tiny_model(kind)
    found: list[Any] = call_on_ranks(refusal, section, backend, nproc=1, timeout_seconds=TYPE_SECONDS)
    if found[0]:
        return {"refused": str(found[0])}
    both = [
        call_on_ranks(trained, replace(section, compile=how), backend, nproc=1, timeout_seconds=TYPE_SECONDS)
        for how in ("none", "layers")
    ]
    if failure := first_failure([*both[0], *both[1]]):
        return {"failed": failure.reason}
    (eager, _), (ours, graphs) = both[0][0], both[1][0]
    return {
        "difference": max(
            largest_difference(eager.loss, ours.loss), largest_difference(eager.grad_norm, ours.grad_norm)
        ),
        "graphs": graphs,
        "seconds": round(time.monotonic() - began),
    }


def refusal(section: Model, backend: str) -> str:
    """Why a type is refused; empty if it is not."""
    return compiled_layers.why_not(section, backend)


def trained(section: Model, backend: str) -> tuple[Trajectory, list[int | None]]:
    """As one rank: losses and norms of a few steps, and the graphs compiled after each."""
    compiled_layers.BACKEND = backend
    config = deepspeed_config(PLAN, TRAIN, params=10**6, backend="cpu")
    spec = EngineSpec(model=section, train=TRAIN, plan=PLAN, deepspeed=config, schedule=make_schedule(TRAIN, STEPS))
    engine = build_engine(spec, current_world())
    losses, norms, graphs = [], [], []
    for micro in batches():
        result = engine.step([micro])
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
        graphs.append(compiled_layers.compiled_graphs())
    return Trajectory(tuple(losses), tuple(norms)), graphs


def batches() -> Iterator[MicroBatch]:
    """Rows of packed documents, whose number and lengths differ in every step."""
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        ids = torch.randint(3, VOCABULARY - 1, (ROWS, TOKENS + 1), generator=generator)
        places = [torch.cat([torch.arange(n) for n in documents(row + step)]) for row in range(ROWS)]
        yield MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), position_ids=torch.stack(places))


def documents(number: int) -> list[int]:
    """Lengths of a row's documents: two to five of them."""
    cuts = [0, *(TOKENS * (part + 1) // (2 + number % 4) - number % 3 for part in range(1 + number % 4)), TOKENS]
    return [end - begin for begin, end in itertools.pairwise(cuts)]


if __name__ == "__main__":
    sys.exit(main())
