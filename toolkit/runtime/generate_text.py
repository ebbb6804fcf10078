"""Generate text from a checkpoint."""

from __future__ import annotations

from dataclasses import replace
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
    ids = torch.from_numpy(_prompt_ids(recipe, tokenizer, prompt)).long()[None].to(model.device)
    limit = getattr(model.config, "max_position_embeddings", None)
    if recipe.model.task != "seq2seq" and limit and ids.shape[1] + tokens > limit:
        tokens = limit - ids.shape[1]
        if tokens < 1:
            raise BadInput("prompt", f"{ids.shape[1]} tokens given; the model takes at most {limit}")
    rng.seed(seed)
    found = _generate(model, ids, tokenizer, tokens, temperature)[0].tolist()
    return tokenizer.decode([i for i in found if i not in (tokenizer.end, tokenizer.pad)])


def _prompt_ids(recipe: Recipe, tokenizer: Tokenizer, prompt: str) -> Any:
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
