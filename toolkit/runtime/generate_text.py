"""Generate text: from a checkpoint, and during evaluations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from toolkit.checkpoints.format import file_problems
from toolkit.errors import BadInput
from toolkit.recipe.file import load_recipe
from toolkit.recipe.sections import Recipe
from toolkit.runtime.checkpoint.export import trained_model
from toolkit.runtime.corpus.tokenizer import Tokenizer
from toolkit.runtime.data.load import load_recipe_tokenizer
from toolkit.runtime.distributed import rng
from toolkit.runtime.engine.protocol import Engine, Predicts
from toolkit.runtime.models.build import load_config
from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch


def sample(
    checkpoint: Path, prompt: str, *, tokens: int, temperature: float, seed: int, trust_remote_code: bool = False
) -> str:
    """The prompt, continued by the model; the checkpoint is verified first."""
    damaged = file_problems(checkpoint)
    if damaged:
        raise BadInput(f"{checkpoint} is damaged", damaged)
    recipe = load_recipe(checkpoint / "recipe.yaml")
    recipe = replace(recipe, model=replace(recipe.model, trust_remote_code=trust_remote_code))
    if recipe.model.task not in (None, "causal-lm", "seq2seq"):
        raise BadInput("toolkit sample", f"the run trained {recipe.model.task}, which gives classes and not text")
    tokenizer = load_recipe_tokenizer(recipe)
    model = trained_model(checkpoint, recipe).eval().to(get_accelerator().current_device_name())
    ids = torch.from_numpy(prompt_ids(recipe, tokenizer, prompt)).long()[None].to(model.device)
    limit = getattr(model.config, "max_position_embeddings", None)
    if recipe.model.task != "seq2seq" and limit and ids.shape[1] + tokens > limit:
        tokens = limit - ids.shape[1]
        if tokens < 1:
            raise BadInput("prompt", f"{ids.shape[1]} tokens given; the model takes at most {limit}")
    rng.seed(seed)
    found = _generate(model, ids, tokenizer, tokens, temperature)[0].tolist()
    return tokenizer.decode([i for i in found if i not in (tokenizer.end, tokenizer.pad)])


def prompt_ids(recipe: Recipe, tokenizer: Tokenizer, prompt: str) -> Any:
    """Token ids of a prompt, as the recipe's data would have it."""
    if recipe.model.task == "seq2seq":
        return tokenizer.encode_whole([prompt])[0]
    if recipe.data.format in ("chat", "instruction") and tokenizer.has_template:
        prompt = tokenizer.render([{"role": "user", "content": prompt}], None, prompt=True)
    elif recipe.data.format == "instruction":
        prompt = f"{prompt}\n"
    ids = tokenizer.encode([prompt])[0]
    if not len(ids):
        raise BadInput("prompt", "empty; at least one token is required")
    return ids


def _generate(model: Any, ids: torch.Tensor, tokenizer: Tokenizer, tokens: int, temperature: float) -> torch.Tensor:
    drawn = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    stops = [i for i in {tokenizer.end, model.generation_config.eos_token_id} if isinstance(i, int)]
    with torch.no_grad():
        found: torch.Tensor = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            pad_token_id=tokenizer.pad,
            eos_token_id=stops or None,
            use_cache=True,
            **drawn,
        )
    return found


@dataclass(frozen=True, kw_only=True)
class PromptSampler:
    """Continues prompts with the likeliest tokens, under the run's own strategy."""

    engine: Predicts
    tokenizer: Tokenizer
    prompts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    """Token ids of the prompts."""
    tokens: int
    """Tokens to generate; the same number on every rank, which run their passes together."""

    def texts(self) -> list[dict[str, str]]:
        """Each prompt with its text. Every pass computes the complete sequences: a cache of keys would need a second
        path through sharded attention. Collective."""
        rows = [list(own) for own in self.ids]
        for _ in range(self.tokens):
            found = self.engine.predict(_padded(rows, self.tokenizer.pad)).cpu()
            for row, own in zip(found, rows, strict=True):
                own.append(int(row[len(own) - 1]))
        given = zip(self.prompts, self.ids, rows, strict=True)
        return [{"prompt": prompt, "text": self._text(row[len(ids) :])} for prompt, ids, row in given]

    def _text(self, ids: list[int]) -> str:
        end = ids.index(self.tokenizer.end) if self.tokenizer.end in ids else len(ids)
        return self.tokenizer.decode(ids[:end])


def make_sampler(
    recipe: Recipe, engine: Engine, tokenizer: Tokenizer | None
) -> Callable[[], list[dict[str, str]]] | None:
    """Generates texts for the recipe's prompts, if it has any."""
    prompts, wanted = recipe.train.sample_prompts, recipe.train.sample_tokens
    if not prompts:
        return None
    assert tokenizer is not None
    assert isinstance(engine, Predicts), "the planner refuses engines that can't predict"
    ids = tuple(tuple(prompt_ids(recipe, tokenizer, prompt).tolist()) for prompt in prompts)
    limit = getattr(load_config(recipe.model).get_text_config(), "max_position_embeddings", None)
    if limit and max(map(len, ids)) + wanted > limit:
        what = f"a prompt of {max(map(len, ids))} tokens and {wanted} new ones (train.sample_tokens) given"
        raise BadInput("train.sample_prompts", f"{what}; the model takes at most {limit} tokens")
    return PromptSampler(engine=engine, tokenizer=tokenizer, prompts=prompts, ids=ids, tokens=wanted).texts


def _padded(rows: Sequence[Sequence[int]], pad: int | None) -> MicroBatch:
    """Rows of different length as a micro-batch without labels."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad or 0] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return MicroBatch(ids, torch.full_like(ids, IGNORE), mask)
