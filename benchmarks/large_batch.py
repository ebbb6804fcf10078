"""Large batches on the demo: the same tokens with 4 times the batch, by linear scaling and warm-up.

    python benchmarks/large_batch.py [--tokens 524288] [--only linear,grown] [--hidden 64] [--layers 2] [--out FILE]

Trains the demo, narrow enough for two thousand steps in minutes, with a small batch, then with 4 times the batch:
learning rate scaled linearly, by the square root, left alone, and with a batch that grows. Every run sees the same
number of tokens and warms up over the same share of them. Prints the loss on held-out text and its distance from the
small batch's; the bar is 3% for `linear`. With few tokens it is missed: early on the number of steps counts for more
than their size.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from toolkit.launching import launchers  # noqa: E402
from toolkit.recipe.file import load_recipe  # noqa: E402
from toolkit.sessions.parity import runner  # noqa: E402
from toolkit.sessions.resolve import resolve  # noqa: E402

SMALL, TIMES, SEQ_LEN = 4, 4, 64
LR = 1e-3
"""For the small batch."""
BAR = 0.03


def runs(tokens: int) -> dict[str, tuple[str, ...]]:
    """Name → overrides; all use the same tokens."""
    steps = tokens // (SMALL * SEQ_LEN) // TIMES * TIMES
    large = (f"train.global_batch={SMALL * TIMES}", f"train.steps={steps // TIMES}")
    scaled = {
        way: (*large, f"train.lr_scaling={way}", f"train.base_batch={SMALL}", "train.warmup=0.1")
        for way in ("linear", "sqrt")
    }
    # Stages of a batch that grows: s steps at 4, 8 and 16 sequences; three in twelve of the tokens before it is full.
    stage = steps // 12
    rest = round((steps - stage - 2 * stage) / TIMES)
    grown = (
        f"train.global_batch={SMALL * TIMES}",
        f"train.steps={2 * stage + rest}",
        f"train.batch_ramp={{start: {SMALL}, stage_steps: {stage}}}",
    )
    return {
        "small": (f"train.global_batch={SMALL}", f"train.steps={steps}", "train.warmup=0.1"),
        **scaled,
        "unscaled": (*large, "train.warmup=0.1"),
        "grown": (*grown, "train.lr_scaling=linear", f"train.base_batch={SMALL}", "train.warmup=0.1"),
    }


def size(hidden: int, layers: int) -> tuple[str, ...]:
    """The demo's model, narrower."""
    heads = max(2, hidden // 16)
    config = {"hidden_size": hidden, "intermediate_size": 11 * hidden // 4, "num_hidden_layers": layers}
    config |= {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
    return tuple(f"model.config.{key}={value}" for key, value in config.items())


def held_out_loss(overrides: tuple[str, ...], lr: float, nproc: int, seed: int) -> tuple[float, int]:
    """Loss on held-out text after a real run, and the tokens that it trained on."""
    settings = {
        "train.lr": lr,
        "train.seed": seed,
        "train.eval_every": 100_000,
        "train.eval_samples": 64,
        "data.eval_fraction": 0.05,
        "data.seq_len": SEQ_LEN,
        "metrics": "{console: false, detail_every: 0, wandb: {mode: disabled}}",
        "strategy": "{name: data_parallel, micro_batch: 4}",
    }
    given = [f"{key}={value}" for key, value in settings.items()]
    recipe = load_recipe(ROOT / "recipes" / "demo.yaml", [*given, *overrides])
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        run = resolve(recipe, nproc).write(Path(folder) / "run")
        codes = runner("cpu")(launchers.commands("local", run.path, nproc, "cpu"))
        if any(codes):
            raise RuntimeError(f"{overrides} failed: {run.log(0).read_text()[-1500:]}")
        summary = json.loads(run.summary.read_text())
    return float(summary["eval"]["last"]["loss"]), int(summary["tokens"])


def main() -> int:
    """Print the table; exit 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=524_288, help="tokens of each run (default 524288)")
    parser.add_argument("--only", default="linear,sqrt,unscaled,grown", help="ways to enlarge the batch (default: all)")
    parser.add_argument("--hidden", type=int, default=64, help="width of the model (default 64; the demo's is 192)")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model (default 2; the demo's are 6)")
    parser.add_argument("--lr", type=float, default=LR, help="for the small batch (default %(default)s)")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args()
    found: dict[str, float] = {}
    known = runs(args.tokens)
    for name in ["small", *(name for name in known if name in args.only.split(","))]:
        overrides = (*size(args.hidden, args.layers), *known[name])
        found[name], tokens = held_out_loss(overrides, args.lr, args.nproc, args.seed)
        apart = found[name] / found["small"] - 1
        print(f"{name:10s} {tokens:9,d} tokens   held-out loss {found[name]:.4f}   {apart:+.2%}", flush=True)
    apart = found.get("linear", float("inf")) / found["small"] - 1
    print(f"4 times the batch, linear scaling and warm-up: {apart:+.2%} (bar: within {BAR:.0%})")
    if args.out:
        args.out.write_text(json.dumps({"tokens": args.tokens, "loss": found, "apart": apart}, indent=1) + "\n")
    return 0 if apart <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
