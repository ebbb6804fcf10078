"""Whether packed documents see each other: tried on a small twin of the model, since it is the model's code to keep."""

from __future__ import annotations

from dataclasses import replace

import torch

from toolkit.errors import BadInput
from toolkit.recipe import Model
from toolkit.runtime.model import build_model, load_config
from toolkit.runtime.tiny import VOCABULARY, tiny_config

TOLERANCE = 1e-4
"""Of logits around 1, in fp32: a document that is seen moves them by much more."""
LENGTHS = (5, 9, 4)


def check_isolated(section: Model) -> None:
    """`BadInput` if the model's type mixes documents of one sequence."""
    if section.trust_remote_code:
        return  # code that is not transformers' own has no twin; what it does is its author's to say
    config = load_config(section)
    try:
        difference = largest_leak(section)
    except Exception as error:  # a forward that takes no position ids raises what it likes
        raise _refusal(config.model_type, (str(error).strip().splitlines() or [type(error).__name__])[0]) from None
    if difference > TOLERANCE:
        raise _refusal(config.model_type, f"packed and alone, logits differ by {difference:.1e}")


def largest_leak(section: Model) -> float:
    """Largest difference of a document's logits, packed with others and alone."""
    # Flash attention has no CPU kernel; it is told of documents by the same code as sdpa.
    attention = "sdpa" if section.attention == "flash_attention_2" else section.attention
    config = tiny_config(load_config(section))
    if "kv_lora_rank" in config:  # latent attention has a key for every head
        config["num_key_value_heads"] = config["num_attention_heads"]
    twin = Model(config=config, init="scratch", precision="fp32", attention=attention)
    model = build_model(replace(twin, task=section.task), seed=0).eval()
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(3, VOCABULARY - 1, (1, length), generator=generator) for length in LENGTHS]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with torch.no_grad():
        packed = model(input_ids=torch.cat(documents, 1), position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(input_ids=ids, use_cache=False).logits for ids in documents], 1)
    return float((packed - alone).abs().max())


def _refusal(kind: str, why: str) -> BadInput:
    return BadInput(
        "data.packing_method",
        f"best_fit keeps documents apart, and {kind} mixes them ({why}); use packing_method stream, or packing: false",
    )
