"""Mixtures of experts: balanced routers, the same result under every split, speed, and which types can be split.

python -m benchmarks.mixtures balance [--seeds 0,1,2]  # load of the busiest expert, with and without balancing
python -m benchmarks.mixtures layouts [--steps 20]     # router losses and biases under ten layouts
python -m benchmarks.mixtures speed [--rounds 3] [--experts small] [NAME ...]
    # ep 2 against ZeRO 3 and transformers' Trainer with ZeRO 3; NAME: only these
python -m benchmarks.mixtures turns [--pairs 12] [--experts mixtral] [--even]
    # a step of ep 2 and one of ZeRO 3 in turn in the same processes; --even: every expert gets as many visits
python -m benchmarks.mixtures types [FILE] [WORD ...]  # verdicts of every mixture type; those in FILE are not run again
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import throughput
from benchmarks.paired import ratio
from toolkit.launching import launchers
from toolkit.plans.deepspeed_config import deepspeed_config
from toolkit.plans.plan import Plan
from toolkit.recipe.file import make_recipe
from toolkit.recipe.model_section import Model
from toolkit.recipe.objective_sections import Router
from toolkit.recipe.schedules import make_schedule
from toolkit.recipe.sections import Train
from toolkit.run_dir.router_load import advice, max_over_mean
from toolkit.run_dir.trajectory import largest_difference
from toolkit.runtime.build_engine import EngineSpec, build_engine
from toolkit.runtime.distributed.process_group import current_world
from toolkit.runtime.mixtures.routers import find_routers
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.models.tiny_models import tiny_of_type
from toolkit.runtime.proofs.coverage import EXPERT_CASES, LARGEST, causal_types, share, tiny_model
from toolkit.runtime.supervision.warm_pool import call_on_ranks, first_failure, run_warm
from toolkit.sessions.parity import cover
from toolkit.sessions.resolve import resolve

ROOT = Path(__file__).resolve().parent.parent
LAST_STEPS, DETAIL_EVERY = 50, 5
"""Steps at the end of a run over whose tokens loads are summed, of which every fifth has them."""
EXPERTS, LAYERS = 8, 4
SMALL: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2, "num_hidden_layers": LAYERS, "n_group": 1, "topk_group": 1, "vocab_size": 264,
        "max_position_embeddings": 512, "first_k_dense_replace": 0,
    },
    "mixtral": {
        "hidden_size": 64, "intermediate_size": 64, "num_local_experts": EXPERTS, "num_experts_per_tok": 2,
        "num_hidden_layers": LAYERS, "vocab_size": 264, "max_position_embeddings": 512,
    },
}  # fmt: skip
BALANCES: dict[str, tuple[str, str]] = {
    "mixtral, sequence": ("mixtral", "{loss: sequence, weight: 0.02}"),
    "deepseek_v3, bias_update": ("deepseek_v3", "{loss: sequence, weight: 0.0001, bias_update: 0.01}"),
    "mixtral, none": ("mixtral", "{loss: none}"),
    "deepseek_v3, none": ("deepseek_v3", "{loss: none}"),
}
"""The weight is that of Mixtral's own config. The step of biases is in the proportion to the learning rate that
DeepSeek-V3 has (0.001 to 2.2e-4): a bias that moves more slowly than the router's logits never catches up."""


def balance(steps: int, words: list[str], seeds: list[int]) -> int:
    """Train small mixtures from scratch on this repository's prose; 1 if a balanced one is above 1.5."""
    missed = 0
    for seed, (name, (kind, router)) in itertools.product(seeds, BALANCES.items()):
        if not all(word in name for word in words):
            continue
        with tempfile.TemporaryDirectory(prefix="mixtures-") as folder:
            records, named = _trained_small(Path(folder), kind, router, steps, seed)
        loads = [record["router_load"] for record in records[-LAST_STEPS:] if record.get("router_load")]
        summed = [[sum(column) for column in zip(*layer, strict=True)] for layer in zip(*loads, strict=True)]
        worst = max(map(max_over_mean, summed))
        each = statistics.median(record["router"]["max_over_mean"] for record in records[-LAST_STEPS:])
        layers = statistics.mean(max_over_mean(layer) for load in loads for layer in load)
        dead = records[-1]["router"]["dead_experts"]
        print(
            f"seed {seed} {name:28} busiest over mean {worst:.2f} (last {LAST_STEPS} steps), {each:.2f} (median of "
            f"single steps; mean over layers {layers:.2f}), {dead:.0f} dead, loss {records[-1]['loss']:.3f}, "
            f"{'collapse named' if named else 'no collapse named'}",
            flush=True,
        )
        missed += worst > 1.5 and not name.endswith("none")
    return int(missed > 0)


def _trained_small(folder: Path, kind: str, router: str, steps: int, seed: int) -> tuple[list[dict[str, Any]], bool]:
    """Records of a run in one process, and whether its page names a collapse at the end."""
    tiny = {key: value for key, value in tiny_of_type(kind).items() if key not in ("num_local_experts", "num_experts")}
    config = {**tiny, **SMALL[kind]}
    mapping: dict[str, Any] = {
        "name": "balance",
        "model": {"config": config, "precision": "fp32"},
        "data": {"path": str(ROOT / "docs" / "*.md"), "tokenizer": "bytes", "seq_len": 128, "cache": str(folder / "c")},
        "train": {"global_batch": 16, "steps": steps, "lr": 3e-3, "seed": seed},
        "strategy": {"name": "data_parallel"},
        "metrics": {"console": False, "every": 1, "detail_every": DETAIL_EVERY, "wandb": {"mode": "disabled"}},
    }
    run = resolve(make_recipe(mapping, [f"train.router={router}"]), 1).write(folder / "run")
    codes = run_warm(launchers.commands("local", run.path, 1, "cpu"))
    if any(codes):
        raise SystemExit(run.log(0).read_text()[-3000:])
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return records, bool(advice(records[-1]["router"]))


ONE = Plan(strategy="data_parallel", micro_batch=4, precision="fp32")
EP = Plan(strategy="expert_parallel", dp=2, ep=2, zero_stage=1, zero_group=2, micro_batch=2, precision="fp32")
LAYOUTS: dict[str, Plan] = {
    "dp 2": replace(ONE, dp=2, micro_batch=2),
    "ZeRO 3": replace(ONE, strategy="zero", dp=2, zero_stage=3, zero_group=2, micro_batch=2),
    "tp 2": replace(ONE, strategy="tensor_parallel", tp=2),
    "pp 2": replace(ONE, strategy="pipeline", pp=2, micro_batch=1, grad_accum=4),
    "pp 2 x tp 2": replace(ONE, strategy="hybrid", pp=2, tp=2, micro_batch=1, grad_accum=4),
    "sp 2": replace(ONE, strategy="sequence_parallel", sp=2),
    "ep 2": EP,
    "ep 2 x tp 2": replace(EP, tp=2),
    "ep 2 x pp 2": replace(EP, pp=2, micro_batch=1, grad_accum=2),
    "micro-batches of 1": replace(ONE, micro_batch=1, grad_accum=4),
}
ROUTER = Router(loss="sequence", weight=0.1, bias_update=0.001)
LOSS_BOUND = 2e-5


def layouts(steps: int, words: list[str]) -> int:
    """Losses and biases of a tiny DeepSeek-V3 under every layout against one process; 1 if one differs."""
    expected_losses, expected = _routed(ONE, steps)
    missed = 0
    for name, plan in LAYOUTS.items():
        if not all(word in name for word in words):
            continue
        losses, biases = _routed(plan, steps)
        off = largest_difference(expected_losses, losses)
        same = biases == expected
        missed += off > LOSS_BOUND or not same
        print(
            f"{name:20} losses within {off:.1e}, {len(biases)} biases {'equal' if same else 'differ'} "
            f"after {steps} steps",
            flush=True,
        )
    return int(missed > 0)


def _routed(plan: Plan, steps: int) -> tuple[list[float], dict[str, list[float]]]:
    found = call_on_ranks(_as_rank, plan, steps, nproc=plan.devices)
    if failure := first_failure(found):
        raise SystemExit(f"{plan.describe()}: {failure.reason}\n{failure.details}")
    return found[0][0], {name: values for _, held in found for name, values in held.items()}


def _as_rank(plan: Plan, steps: int) -> tuple[list[float], dict[str, list[float]]]:
    """Losses, and this rank's biases that have moved."""
    train = Train(
        global_batch=4, steps=steps, lr=0.1, optimizer="sgd", grad_clip=0.05, schedule="constant", warmup=0.0,
        router=ROUTER,
    )  # fmt: skip
    spec = EngineSpec(
        model=tiny_model("deepseek_v3"), train=train, plan=plan,
        deepspeed=deepspeed_config(plan, train, params=LARGEST, backend="cpu"), schedule=make_schedule(train, steps),
    )  # fmt: skip
    engine = build_engine(spec, current_world())
    losses = [float(engine.step(list(share(step, plan, engine.replica))).loss) for step in range(steps)]
    module: torch.nn.Module = engine.module  # type: ignore[attr-defined]
    held = {name: buffer for name, buffer in module.named_buffers() if name.endswith("e_score_correction_bias")}
    return losses, {name: buffer.tolist() for name, buffer in held.items() if bool(buffer.any())}


SMALL_EXPERTS = {
    "model_type": "mixtral", "hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 264, "max_position_embeddings": 4096,
    "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": True, "router_aux_loss_coef": 0.02,
    "output_router_logits": True,
}  # fmt: skip
"""Experts of a layer have 1.5 numbers for each one that a rank sends to experts: ZeRO 3 sends hardly more.
Of 8 experts the busiest also has most of the visits (3.6 times the mean) in so short a run."""
SPEED = {**SMALL_EXPERTS, "hidden_size": 256, "intermediate_size": 512, "num_local_experts": 32}
"""Twelve numbers in the experts of a layer for each one that a rank sends; Mixtral 8x7B has 42 with 4,096 tokens.
Routers are balanced with Mixtral's own weight by all contestants."""
MIXTRAL = {**SMALL_EXPERTS, "hidden_size": 256, "intermediate_size": 896}
"""Mixtral's own proportions: 8 experts, 3.5 times as wide inside. Five numbers in experts for each one sent."""
SIZES = {"large": SPEED, "mixtral": MIXTRAL, "small": SMALL_EXPERTS}
OURS = {
    "ep 2": ("strategy={name: expert_parallel, ep: 2, zero_stage: 1, pp: 1, recompute: none}",),
    "ZeRO 3": (),
}


TRAINER = "Trainer, ZeRO 3"


def speed(rounds: int, steps: int, names: list[str], model: Mapping[str, Any]) -> int:
    """Useful tokens per second in turn; 1 if a bar is missed."""
    chosen = [name for name in (*OURS, TRAINER) if name in (names or (*OURS, TRAINER))]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        throughput.prepare(work, steps, 256, 44, model=model, zero_stage=3)
        rates: dict[str, list[float]] = {name: [] for name in chosen}
        for number in range(rounds):
            for name in chosen:
                run = f"{name.replace(' ', '-')}-{number}"
                own = name in OURS
                rates[name].append(
                    throughput.own(work, run, OURS[name]) if own else throughput.start("trainer", work, steps, 256)
                )
            last = (work / f"run-ep-2-{number}" / "metrics.jsonl").read_text().splitlines()[-1]
            load = json.loads(last)["router"]["max_over_mean"]
            shown = {name: round(found[-1]) for name, found in rates.items()}
            print(json.dumps({**shown, "busiest expert over mean": load}), flush=True)
    missed = 0
    for other, bar in (("ZeRO 3", 1.0), (TRAINER, 1.5)):
        if other not in rates:
            continue
        ratios = [a / b for a, b in zip(rates["ep 2"], rates[other], strict=True)]
        middle = statistics.median(ratios)
        missed += middle < bar
        print(f"ep 2 / {other}: {middle:.2f} (bar {bar}; by round: {', '.join(f'{one:.2f}' for one in ratios)})")
    return int(missed > 0)


ROWS, TOKENS = 8, 256
"""Of a rank's micro-batch, as in `speed`."""
TURNS = {
    "ep 2": replace(EP, micro_batch=ROWS),
    "ZeRO 3": replace(EP, strategy="zero", ep=1, zero_stage=3, micro_batch=ROWS),
}
TURNS_SECONDS = 3600.0
Seconds = tuple[float, float]
"""Of a step: by the clock, and processor time of a rank."""


def turns(size: str, pairs: int, *, even: bool) -> int:
    """Ratios of the seconds of single steps, by the clock and by processor time of both ranks; 1 if the bar is missed.

    Turns make them steady on a busy machine. ZeRO 3 replaces torch's linear layers in the process, ep's too."""
    found = call_on_ranks(_turns_as_rank, SIZES[size], pairs, even, nproc=2, timeout_seconds=TURNS_SECONDS)
    if failure := first_failure(found):
        raise SystemExit(f"{failure.reason}\n{failure.details}")
    steps = list(zip(*found, strict=True))
    clock = ratio([(zero[0], ep[0]) for (ep, zero), _ in steps])
    work = ratio([(one[1][1] + two[1][1], one[0][1] + two[0][1]) for one, two in steps])
    loads = "even" if even else "as routed"
    print(f"{size} experts, loads {loads}: speed of ep 2 over ZeRO 3 by the clock {clock}; by processor time {work}")
    return int(clock.median < 1.0)


def _turns_as_rank(model: Mapping[str, Any], pairs: int, even: bool) -> list[tuple[Seconds, Seconds]]:
    """Seconds of steps of ep 2 and ZeRO 3, in pairs; who begins alternates."""
    engines = {name: _engine(model, plan, even) for name, plan in TURNS.items()}
    generator = torch.Generator().manual_seed(current_world().rank)

    def timed(name: str) -> Seconds:
        ids = torch.randint(3, model["vocab_size"] - 1, (ROWS, TOKENS + 1), generator=generator)
        batch = [MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())]
        torch.distributed.barrier()
        began, used = time.perf_counter(), time.process_time()
        float(engines[name].step(batch).loss)
        return time.perf_counter() - began, time.process_time() - used

    found = []
    for number in range(-throughput.WARM_UP, pairs):
        order = tuple(TURNS) if number % 2 else tuple(reversed(TURNS))
        both = {name: timed(name) for name in order}
        if number >= 0:
            found.append((both["ep 2"], both["ZeRO 3"]))
    return found


def _engine(model: Mapping[str, Any], plan: Plan, even: bool) -> Any:
    """An engine for `turns`; `even`: visits go to all experts in turn, whatever routers choose."""
    train = Train(global_batch=2 * ROWS, steps=1000, lr=3e-4, schedule="constant", warmup=0.0)
    spec = EngineSpec(
        model=Model(config=dict(model), init="scratch", precision="fp32"), train=train, plan=plan,
        deepspeed=deepspeed_config(plan, train, params=LARGEST, backend="cpu"), schedule=make_schedule(train, 1000),
    )  # fmt: skip
    engine = build_engine(spec, current_world())
    module: torch.nn.Module = engine.module  # type: ignore[attr-defined]
    for router in find_routers(module) if even else ():
        router.module.register_forward_hook(_evenly)
    return engine


def _evenly(_module: Any, _arguments: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Mixtral's logits and weights, with other experts."""
    logits, weights, experts = output
    return logits, weights, (torch.arange(experts.numel()) % logits.shape[-1]).view_as(experts)


def types(file: Path, words: list[str], *, adapters: bool) -> int:
    """Verdicts of every mixture type under the expert cases, a JSON line each; 1 if there is a mismatch."""
    cases = {name: case for name, case in EXPERT_CASES.items() if adapters or not case.lora}
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {one["type"] for one in done}
    for kind in mixture_types():
        if kind in known or not all(word in kind for word in words):
            continue
        found = {case: asdict(result) for case, result in cover(kind, cases).results.items()}
        done.append({"type": kind, **found})
        with file.open("a") as out:
            out.write(json.dumps(done[-1]) + "\n")
        print(kind, {case: result["status"] for case, result in found.items()}, flush=True)
    return table(done)


def mixture_types() -> list[str]:
    """Causal-LM types of transformers whose config has experts."""
    found = []
    for kind in causal_types():
        try:
            config = tiny_of_type(kind)
        except Exception as error:  # any type whose config can't be made tiny
            print(f"{kind}: {error}", file=sys.stderr)
            continue
        if any("expert" in key and isinstance(value, int) and value > 1 for key, value in config.items()):
            found.append(kind)
    return found


def table(rows: list[Mapping[str, Any]]) -> int:
    """Print the verdicts as a Markdown table; 1 if there is a mismatch."""
    cases = [case for case in EXPERT_CASES if any(case in row for row in rows)]
    without = ("untrainable", "timeout")
    trained = [row for row in rows if any(row[case]["status"] not in without for case in cases if case in row)]
    print(f"{len(rows)} types, {len(trained)} train as tiny models")
    print("| | exact | refused | mismatch | no answer in time |\n|---|---|---|---|---|")
    missed = 0
    for case in cases:
        by = {
            status: [row["type"] for row in trained if case in row and row[case]["status"] == status]
            for status in ("ok", "refused", "mismatch", "timeout")
        }
        missed += len(by["mismatch"])
        others = " | ".join(", ".join(by[status]) for status in ("refused", "mismatch", "timeout"))
        print(f"| {case} | {len(by['ok'])} | {others} |")
    return int(missed > 0)


def main() -> int:
    """Run one of the five."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("balance", "layouts", "speed", "turns", "types"))
    parser.add_argument("words", nargs="*")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", default="0,1,2", help="balance: seeds of the weights and of the order of samples")
    parser.add_argument(
        "--experts", choices=SIZES, default="large", help="speed, turns: size of the experts of a layer"
    )
    parser.add_argument("--pairs", type=int, default=12, help="turns: steps of each that count")
    parser.add_argument("--even", action="store_true", help="turns: every expert gets as many visits")
    parser.add_argument("--adapters", action="store_true", help="types: with LoRA on experts, too")
    args = parser.parse_intermixed_args()
    if args.what == "balance":
        return balance(args.steps or 300, args.words, [int(seed) for seed in args.seeds.split(",")])
    if args.what == "layouts":
        return layouts(args.steps or 20, args.words)
    if args.what == "speed":
        return speed(args.rounds, args.steps or 20, args.words, SIZES[args.experts])
    if args.what == "turns":
        return turns(args.experts, args.pairs, even=args.even)
    file = Path(args.words[0] if args.words else "mixture_types.jsonl")
    return types(file, args.words[1:], adapters=args.adapters)


if __name__ == "__main__":
    raise SystemExit(main())
