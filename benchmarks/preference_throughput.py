"""DPO with a cached reference against TRL's DPOTrainer with a live one: same model, pairs and precision, one process.

python -m benchmarks.preference_throughput        # alternates both; prints answer tokens per second and their ratio

Both use as many threads as this process may use cores: `taskset -c 0` measures one thread each.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

MODEL = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 512,
         "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 2048}  # fmt: skip
PAIRS, WARM = 10, 2
"""Pairs per step of TRL, and steps that are not counted."""
SEQ_LEN = 1536
"""Tokens of the row that is a step of the toolkit; about `PAIRS` pairs fit into it."""
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "and", "runs", "away", "from", "here")


def write_rows(path: Path, count: int) -> None:
    """Pairs of random words: prompts of equal length, answers of different ones."""
    rng = random.Random(0)

    def text(words: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(words))

    rows = [{"prompt": text(48), "chosen": text(rng.randint(24, 72)), "rejected": text(rng.randint(24, 72))}
            for _ in range(count)]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def ours(folder: Path, steps: int, run: int) -> float:
    """Answer tokens per second of `toolkit train`; the reference pass is not part of a step."""
    recipe = {
        "name": "dpo", "model": {"config": MODEL, "precision": "fp32"},
        "data": {"path": str(folder / "rows.jsonl"), "format": "preference", "tokenizer": str(folder / "tokenizer"),
                 "seq_len": SEQ_LEN, "cache": str(folder / "cache")},
        "train": {"objective": "dpo", "global_batch": 1, "steps": steps, "lr": 1e-5},
        "strategy": {"name": "data_parallel"},
        "metrics": {"console": False, "detail_every": 0, "wandb": {"mode": "disabled"}},
    }  # fmt: skip
    file, out = folder / "recipe.yaml", folder / f"run-{run}"
    file.write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "toolkit", "train", str(file), "--nproc", "1", "--run-dir", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][WARM:]
    return statistics.median(record["tokens"] / record["step_seconds"] for record in records)


def theirs(folder: Path, steps: int) -> float:
    """Answer tokens per second of TRL's trainer, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.preference_throughput", "--trl", str(folder), "--steps", str(steps)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.strip().splitlines()[-1])


def train_with_trl(folder: Path, steps: int) -> float:
    """Run TRL's trainer as a user would, with a live reference and without a checkpoint."""
    import copy

    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    values = dict(MODEL)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *given: Any, **more: Any) -> None:
            ends.append(time.perf_counter())

    arguments = DPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=PAIRS, max_steps=steps, report_to="none",
        use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", logging_steps=steps,
    )  # fmt: skip
    trainer = DPOTrainer(
        model, copy.deepcopy(model), arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    answers = [row[name] for row in rows for name in ("chosen", "rejected")]
    each = statistics.mean(len(ids) + 1 for ids in tokenizer(answers, add_special_tokens=False).input_ids)
    seconds = statistics.median(after - before for before, after in zip(ends[WARM - 1 :], ends[WARM:], strict=False))
    return 2 * PAIRS * each / seconds


def main() -> None:
    """Measure both in turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.trl:
        print(train_with_trl(args.trl, args.steps))
        return
    from toolkit.runtime.corpus.tokenizer import train_tokenizer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", 2 * PAIRS * args.steps)
        train_tokenizer(str(folder / "rows.jsonl"), "prompt", 500, folder / "tokenizer")
        found = [(ours(folder, args.steps, run), theirs(folder, args.steps)) for run in range(args.rounds)]
    for own, other in found:
        print(f"toolkit {own:,.0f} answer tokens/s · TRL {other:,.0f} · ratio {own / other:.2f}")
    print(f"median ratio {statistics.median(own / other for own, other in found):.2f}")


if __name__ == "__main__":
    main()
