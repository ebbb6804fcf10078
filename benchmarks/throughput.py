"""Useful tokens per second of a whole run, against Trainer, TRL's SFTTrainer and plain DeepSpeed, in turns in one run.

    pip install 'zero-toolkit[bench]'
    python -m benchmarks.throughput [--rounds 12] [--seconds 8] [--seq-len 256] [--median 44] [--only toolkit,trl]

The same model, DeepSpeed config, documents and sequences per step in two processes each. Documents have log-normal
lengths, scaled to the demo's sequence length. A token is useful if the loss counts its prediction.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.harness import bare_peers
from benchmarks.harness.contest import Contestant, compete, note_step, noted_steps, own_steps, ratio_of
from toolkit.launching.environment import free_port
from toolkit.recipe.file import load_recipe
from toolkit.sessions.resolve import resolve

DOCUMENTS, SIGMA, PROCESSES, TOKENS_PER_STEP = 4000, 1.0, 2, 4096
ENDLESS = 1_000_000
"""Steps of a run that is ended by its contest."""
OWN = {"toolkit": (), "toolkit-stream": ("data.packing_method=stream",)}
"""Our runs: as by default, and with documents cut where a sequence is full, as TRL's `wrapped` does."""
PEERS = ("trainer", "trl", "trl-wrapped", "deepspeed", "bound")
"""`deepspeed`: a plain loop over one stream of text. `bound`: nothing but the products and attention of a step."""
MODEL = {
    "model_type": "llama", "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 264, "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip


def main() -> None:
    """Let all contestants train in turns, and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a turn (default: %(default)s)")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--median", type=int, default=44, help="tokens of the median document")
    parser.add_argument("--only", default=",".join((*OWN, *PEERS)), help="contestants (default: %(default)s)")
    parser.add_argument("--worker", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        peer(args.worker, args.work, args.seq_len)
        return
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        prepare(work, args.seq_len, args.median)
        starts = {
            name: partial(own, work, name, OWN[name]) if name in OWN else partial(start, name, work, args.seq_len)
            for name in args.only.split(",")
        }
        rates = compete(starts, args.rounds, args.seconds)
    for name, found in rates.items():
        print(f"{name}: {statistics.median(found):,.0f} useful tokens/s")
    for first, name in ((mine, peer) for mine in (*OWN, "bound") for peer in PEERS if peer != mine):
        if first in rates and name in rates:
            print(f"{first} / {name}: {ratio_of(rates, first, name)}")


def prepare(work: Path, seq_len: int, median: int, model: Mapping[str, Any] | None = None, zero_stage: int = 1) -> None:
    """Documents, a tokenizer of bytes, a recipe, and the model and DeepSpeed configs that all use."""
    from toolkit.runtime.corpus.tokenizer import train_tokenizer

    random = np.random.default_rng(0)
    lengths = np.maximum(2, random.lognormal(np.log(median), SIGMA, DOCUMENTS)).astype(int)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz "))
    texts = ["".join(random.choice(letters, length)) for length in lengths]
    (work / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_tokenizer(str(work / "data.jsonl"), "text", 261, work / "tokenizer")
    rows = sequences(seq_len) // PROCESSES
    recipe = {
        "name": "bench",
        "model": {"config": dict(model or MODEL), "precision": "fp32"},
        "data": {
            "path": str(work / "data.jsonl"), "tokenizer": str(work / "tokenizer"), "seq_len": seq_len,
            "cache": str(work / "cache"),
        },
        "train": {"global_batch": sequences(seq_len), "steps": ENDLESS, "schedule": "constant", "warmup": 0},
        "strategy": {"name": "zero", "zero_stage": zero_stage, "micro_batch": rows, "recompute": "none"},
        "checkpoint": {"every": 0},
        "metrics": {"wandb": {"mode": "disabled"}},
    }  # fmt: skip
    (work / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    config = resolve(load_recipe(work / "recipe.yaml"), PROCESSES).deepspeed
    (work / "deepspeed.json").write_text(json.dumps(config))
    (work / "model.json").write_text(json.dumps(dict(model or MODEL)))


def sequences(seq_len: int) -> int:
    """Sequences per step: as many tokens at every length."""
    return max(PROCESSES, TOKENS_PER_STEP // seq_len)


def own(work: Path, name: str, overrides: tuple[str, ...]) -> Contestant:
    """Start our own run."""
    run = work / f"run-{name.replace(' ', '-')}"
    command = [sys.executable, "-m", "toolkit", "train", str(work / "recipe.yaml"), "--nproc", str(PROCESSES)]
    with (work / f"{run.name}.log").open("w") as log:
        process = subprocess.Popen([*command, *overrides, "--run-dir", str(run)], stdout=log, stderr=log)
    return Contestant(name, [process], partial(own_steps, run / "metrics.jsonl"))


def start(name: str, work: Path, seq_len: int) -> Contestant:
    """Start a peer's run in as many processes."""
    common = {
        **os.environ, "WORLD_SIZE": str(PROCESSES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // PROCESSES)), "LOCAL_WORLD_SIZE": str(PROCESSES),
        "DS_ACCELERATOR": "cpu", "ACCELERATE_USE_DEEPSPEED": "true", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.throughput", "--worker", name, "--work", str(work)]
    command += ["--seq-len", str(seq_len)]
    processes = []
    for rank in range(PROCESSES):
        with (work / f"{name}-{rank}.log").open("w") as log:
            env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    files = [noted(work, name, rank) for rank in range(PROCESSES)]
    return Contestant(name, processes, lambda: noted_steps(files))


def noted(work: Path, name: str, rank: int) -> Path:
    """Where a rank of a peer notes its steps."""
    return work / f"{name}-{rank}.steps"


def peer(name: str, work: Path, seq_len: int) -> None:
    """One process of a peer."""
    import importlib

    import datasets
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # a minute of compiling for nothing
    # Without an accelerator accelerate (1.15) leaves DeepSpeed out, or takes every process for the only one.
    accelerate_state = importlib.import_module("accelerate.state")
    accelerate_state.PartialState._prepare_backend = lambda *_: ("gloo", accelerate_state.DistributedType.NO)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // PROCESSES))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(work / "tokenizer"))
    rows = datasets.load_dataset("json", data_files=str(work / "data.jsonl"), split="train", cache_dir=str(work))
    ids = [[*found, tokenizer.eos_token_id][: seq_len + 1] for found in tokenizer(list(rows["text"]))["input_ids"]]
    torch.manual_seed(0)
    values = json.loads((work / "model.json").read_text())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))

    file, rows_per_rank = noted(work, name, int(os.environ["RANK"])), sequences(seq_len) // PROCESSES
    if name == "deepspeed":
        config = json.loads((work / "deepspeed.json").read_text())
        bare_peers.plain_deepspeed(model, ids, config, (rows_per_rank, seq_len), partial(note_step, file))
    if name == "bound":
        bare_peers.bound(model, ids, rows_per_rank * seq_len, partial(note_step, file))

    class Notes(TrainerCallback):  # type: ignore[misc]
        """Notes every step, with what its loss has counted."""

        tokens = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            note_step(file, self.tokens)
            self.tokens = 0

    notes = Notes()
    trainer = make_peer(name, work, (model, tokenizer, ids), [notes], seq_len)
    loss = trainer.compute_loss

    def counting(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        notes.tokens += int((inputs["labels"][:, 1:] != -100).sum())
        return loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = counting
    trainer.train()


def make_peer(
    name: str, work: Path, parts: tuple[Any, Any, list[list[int]]], callbacks: list[Any], seq_len: int
) -> Any:
    """The peer's trainer, as its documentation sets it up. `parts`: model, tokenizer and documents."""
    model, tokenizer, ids = parts
    import datasets
    from transformers import Trainer, TrainingArguments

    config = json.loads((work / "deepspeed.json").read_text())
    common = {
        "output_dir": str(work / name), "max_steps": ENDLESS,
        "per_device_train_batch_size": sequences(seq_len) // PROCESSES,
        "learning_rate": 3e-4, "lr_scheduler_type": "constant", "deepspeed": config,
        "report_to": "none", "save_strategy": "no", "logging_steps": 10, "disable_tqdm": True,
    }  # fmt: skip
    if name.startswith("trl"):
        from trl import SFTConfig, SFTTrainer

        strategy = "wrapped" if name == "trl-wrapped" else "bfd"  # one stream of text, or TRL's default
        arguments = SFTConfig(
            **common,
            packing=True,
            packing_strategy=strategy,
            max_length=seq_len,
            bf16=False,
            gradient_checkpointing=False,
        )
        return SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=datasets.Dataset.from_dict({"input_ids": ids}),
            processing_class=tokenizer,
            callbacks=callbacks,
        )
    padded = [document[:seq_len] + [tokenizer.pad_token_id] * (seq_len - len(document)) for document in ids]
    masks = [[1] * min(len(d), seq_len) + [0] * (seq_len - len(d)) for d in ids]
    labels = [
        [t if m else -100 for t, m in zip(row, mask, strict=True)] for row, mask in zip(padded, masks, strict=True)
    ]
    rows = datasets.Dataset.from_dict({"input_ids": padded, "attention_mask": masks, "labels": labels})
    return Trainer(model=model, args=TrainingArguments(**common), train_dataset=rows, callbacks=callbacks)


if __name__ == "__main__":
    main()
