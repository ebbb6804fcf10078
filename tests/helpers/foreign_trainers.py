"""Other people's trainers on a recipe's own batches, each in the place of our worker."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit import api
from toolkit.run_dir import layout
from toolkit.run_dir.layout import RunDir


class Batches:
    """The recipe's samples in the order in which our trainer takes them; labels are not shifted here."""

    def __init__(self, run: RunDir) -> None:
        from toolkit.runtime.data.input_spec import input_spec_of
        from toolkit.runtime.data.load import load_data

        order = layout.read(run)
        self.recipe, self.plan = order.recipe, order.plan
        loaded = load_data(self.recipe, input_spec_of(self.recipe.model))
        places = loaded.order(self.recipe, self.plan.global_batch)
        assert self.recipe.train.steps is not None
        self.tokens: list[list[int]] = []
        for step in range(self.recipe.train.steps):
            batch = loaded.train.batch(places.step(step))
            assert batch.input_ids is not None
            for ids, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
                self.tokens.append([*ids, labels[-1]])

    def dataset(self) -> Any:
        from datasets import Dataset

        return Dataset.from_dict({"input_ids": self.tokens, "labels": self.tokens})

    def model(self) -> Any:
        from toolkit.runtime.models.build import build_model

        return build_model(self.recipe.model, self.recipe.train.seed)


def entering(work: Callable[[RunDir, Any, Batches], list[float]], argv: tuple[str, ...], env: dict[str, str]) -> None:
    os.environ.update(env)
    run = RunDir(Path(argv[argv.index("--run-dir") + 1]))
    planned = api.plan(str(run.recipe), nproc=int(env["WORLD_SIZE"]))
    losses = work(run, planned, Batches(run))
    if env["RANK"] == "0":
        (run.path / "foreign.json").write_text(json.dumps(losses))


def transformers(argv: tuple[str, ...], env: dict[str, str]) -> None:
    entering(_transformers, argv, env)


def trl(argv: tuple[str, ...], env: dict[str, str]) -> None:
    entering(_trl, argv, env)


def accelerate(argv: tuple[str, ...], env: dict[str, str]) -> None:
    entering(_accelerate, argv, env)


EXACT = {"train_sampling_strategy": "sequential", "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}


def _logged(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _transformers(run: RunDir, planned: api.Planned, batches: Batches) -> list[float]:
    from transformers import Trainer, default_data_collator

    model = batches.model()  # before the arguments: under ZeRO 3 they make transformers load shards
    arguments = api.training_arguments(planned, str(run.path / "out"), **EXACT)
    return _logged(
        Trainer(model=model, args=arguments, train_dataset=batches.dataset(), data_collator=default_data_collator)
    )


def _trl(run: RunDir, planned: api.Planned, batches: Batches) -> list[float]:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {f"<{number}>": number for number in range(258)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words)), **{"eos_token": "<256>", "pad_token": "<257>"}
    )
    arguments = api.training_arguments(planned, str(run.path / "out"), kind=SFTConfig, **EXACT)
    dataset = batches.dataset().remove_columns("labels")
    trainer = SFTTrainer(model=batches.model(), args=arguments, train_dataset=dataset, processing_class=tokenizer)
    return _logged(trainer)


def _accelerate(run: RunDir, planned: api.Planned, batches: Batches) -> list[float]:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DummyOptim, InitProcessGroupKwargs
    from transformers import default_data_collator

    # On a CPU accelerate finds the other processes by the backend's name; cpu=True would leave DeepSpeed out.
    group = InitProcessGroupKwargs(backend="gloo")
    accelerator = Accelerator(deepspeed_plugin=api.deepspeed_plugin(planned), kwargs_handlers=[group])
    model = batches.model()
    loader = torch.utils.data.DataLoader(
        batches.dataset(), batch_size=batches.plan.micro_batch, collate_fn=default_data_collator
    )
    model, optimizer, loader = accelerator.prepare(model, DummyOptim(model.parameters()), loader)
    losses: list[float] = []
    parts: list[float] = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        parts.append(float(accelerator.gather(loss.detach().reshape(1)).mean()))
        if len(parts) == batches.plan.grad_accum:
            losses.append(sum(parts) / len(parts))
            parts.clear()
    return losses
