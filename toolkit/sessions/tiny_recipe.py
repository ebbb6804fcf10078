"""`--tiny`: the same task and strategy with a tiny model, a few steps and CPU processes of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.models.tiny_sizes import IMAGES, Sizes, tiny_sizes
from toolkit.plans.job import raw_config
from toolkit.recipe.batch_sections import Reduce
from toolkit.recipe.data_checks import ITEMS
from toolkit.recipe.metrics_sections import Metrics, Wandb
from toolkit.recipe.objective_sections import SCORED
from toolkit.recipe.sections import ClusterSection, Data, Recipe, StrategySection, Train

STEPS, SEQ_LEN, GLOBAL_BATCH = 4, 64, 8
VOCABULARY = 264
"""Rows of the embedding: 256 bytes, their special tokens, and a few spare ones."""
KEPT_AXES = ("name", "zero_stage", "offload", "recompute")
SPLIT_AXES = ("tp", "pp", "sp", "cp", "ep")
LARGEST_RANK = 4


def tiny_recipe(recipe: Recipe) -> Recipe:
    """Return the tiny version of a recipe; it needs no download and no accelerator."""
    strategy = _strategy(recipe.strategy)
    lora = recipe.model.lora
    model = replace(
        recipe.model,
        path=None,
        config=tiny_values(raw_config(recipe.model)),
        init="scratch",
        precision="fp32",
        attention="eager" if recipe.model.attention == "eager" else "auto",
        kernels="none" if recipe.model.kernels == "none" else "auto",
        lora=lora and replace(lora, rank=min(lora.rank, LARGEST_RANK)),
        num_labels=1
        if recipe.train.objective in SCORED
        else recipe.model.num_labels and max(recipe.model.num_labels, 4),
        trust_remote_code=False,
    )
    return replace(
        recipe,
        name=f"{recipe.name[:95]}-tiny",
        model=model,
        data=_data(recipe.data),
        train=_train(recipe.train, tiny_values(raw_config(recipe.model))),
        strategy=strategy,
        cluster=ClusterSection(device="cpu", devices_per_node=processes(strategy)),
        checkpoint=replace(recipe.checkpoint, every=min(recipe.checkpoint.every, 2), resume="auto"),
        metrics=Metrics(every=1, wandb=Wandb(mode="disabled")),
    )


def processes(strategy: StrategySection) -> int:
    """Return the number of workers: the product of the axes, at least two."""
    split = 1
    for axis in ("tp", "pp", "sp", "cp", "islands"):
        split *= getattr(strategy, axis) or 1
    return max(2, split * (strategy.dp or 1))


def tiny_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model config with the same type and switches but small sizes."""
    sizes = {**tiny_sizes(Sizes()), "vocab_size": VOCABULARY, **IMAGES}
    small = {key: size for key, size in sizes.items() if isinstance(config.get(key), int)}
    if "n_routed_experts" in small:  # DeepSeek's types have 8 groups of experts by default, more than tiny experts
        small |= {key: sizes[key] for key in ("n_group", "topk_group")}
    switches = {key: value for key, value in config.items() if isinstance(value, bool | str) and key[0] != "_"}
    return {**switches, **small, "model_type": config["model_type"]}


def _strategy(given: StrategySection) -> StrategySection:
    axes: dict[str, Any] = {axis: 2 for axis in SPLIT_AXES if (getattr(given, axis) or 1) > 1}
    kept = {key: getattr(given, key) for key in KEPT_AXES if getattr(given, key) is not None}
    if given.name == "local_sgd":
        kept |= {"islands": 2, "local_steps": 2}
    if (given.offload or "").startswith("nvme"):
        kept["offload"] = given.offload.replace("nvme", "cpu") if given.offload else None
    return StrategySection(**kept, **axes)


def _data(given: Data) -> Data:
    """Return synthetic data of the same format; plain text comes from the Python standard library."""
    plain = given.path == "python-stdlib"
    return Data(
        path="python-stdlib" if plain or given.format == "text" else "synthetic",
        format=given.format,
        tokenizer=_tokenizer(given),
        seq_len=2 * SEQ_LEN if given.format == "preference" else SEQ_LEN,  # a row may hold two answers
        negatives=min(given.negatives, 3),
        candidates=given.candidates,
        packing=given.packing,
        packing_method=given.packing_method,
        long_documents=given.long_documents,
        eval_fraction=0.1 if given.eval_path or given.eval_fraction else 0.0,
        cache=given.cache,
    )


def _tokenizer(given: Data) -> str | None:
    if (given.tokenizer or "").startswith(ITEMS):
        return f"{ITEMS}{VOCABULARY - 1}"
    return None if given.format == "image-classification" else "bytes"


def _train(given: Train, config: dict[str, Any]) -> Train:
    every = 2 if given.eval_every else 0
    distill = given.distill and replace(given.distill, teacher=None, teacher_config=config, top_k=4)
    return replace(
        given, distill=distill, steps=STEPS, epochs=None, global_batch=GLOBAL_BATCH, warmup=0.0, eval_every=every,
        eval_samples=16 if every else None, lr_scaling="none", base_batch=None, critical_batch=None,
        batch_ramp=None, reduce=Reduce(), freeze_steps=given.freeze_steps and 2,
    )  # fmt: skip
