"""Whether packed documents see each other: tried on a small twin of the model, since it is the model's code to keep."""

from __future__ import annotations

from dataclasses import replace

import torch

from toolkit.errors import BadInput
from toolkit.recipe.sections import Model
from toolkit.runtime.models.build import build_model, load_config
from toolkit.runtime.models.tiny_config import VOCABULARY, tiny_config

TOLERANCE = 1e-4
"""Of logits around 1, in fp32: a document that is seen moves them by much more."""
LENGTHS = (5, 9, 4)


class TwinFailed(Exception):
    """The small twin does not run, on plain documents either: nothing is known of the model itself."""


def check_isolated(section: Model) -> None:
    """`BadInput` if the model's type mixes documents of one sequence."""
    if section.trust_remote_code:
        return  # code that is not transformers' own has no twin; what it does is its author's to say
    kind = load_config(section).model_type
    try:
        difference = largest_leak(section)
    except TwinFailed as error:
        raise _refusal(f"that can't be tried: a small twin of {kind} does not run ({error})") from None
    except Exception as error:  # a forward that takes no position ids raises what it likes
        raise _refusal(f"{kind} takes no packed documents ({_line(error)})") from None
    if difference > TOLERANCE:
        raise _refusal(f"{kind} mixes them (packed and alone, logits differ by {difference:.1e})")


def largest_leak(section: Model) -> float:
    """Largest difference of a document's logits, packed with others and alone."""
    # Flash attention has no CPU kernel; it is told of documents by the same code as sdpa.
    attention = "sdpa" if section.attention == "flash_attention_2" else section.attention
    config = tiny_config(load_config(section))
    if "kv_lora_rank" in config:  # latent attention has a key for every head
        config["num_key_value_heads"] = config["num_attention_heads"]
    twin = Model(config=config, init="scratch", precision="fp32", attention=attention)
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(3, VOCABULARY - 1, (1, length), generator=generator) for length in LENGTHS]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with torch.no_grad():
        try:
            model = build_model(replace(twin, task=section.task), seed=0).eval()
            alone = torch.cat([model(input_ids=ids, use_cache=False).logits for ids in documents], 1)
        except Exception as error:
            raise TwinFailed(_line(error)) from None
        packed = model(input_ids=torch.cat(documents, 1), position_ids=positions, use_cache=False).logits
    return float((packed - alone).abs().max())


def _refusal(why: str) -> BadInput:
    ways = "use packing: false, or, with data.format text, packing_method stream"
    return BadInput("data.packing_method", f"best_fit keeps documents apart, and {why}; {ways}")


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
