"""The list of decoder layers of any Hugging Face model, found without code per architecture."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from toolkit.errors import NoPlanFits

_LAYER_COUNTS = ("num_hidden_layers", "decoder_layers", "num_layers", "n_layer")


class SplitRefused(NoPlanFits):
    """The model can't be split in this way; the message gives the reason."""


def find_layers(model: PreTrainedModel) -> tuple[str, torch.nn.ModuleList]:
    """The list of decoder layers: the one as long as the config says, else the one with the most parameters."""
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m) >= 2]
    outer = [(n, m) for n, m in lists if not any(n.startswith(f"{other}.") for other, _ in lists)]
    if not outer:
        raise SplitRefused("no list of layers was found in the model")
    count = num_layers(model)
    return max(outer, key=lambda item: (len(item[1]) == count, sum(p.numel() for p in item[1].parameters())))


def num_layers(model: PreTrainedModel) -> int | None:
    """Number of layers by the config, whichever key it uses."""
    for config in (model.config, model.config.get_text_config(decoder=True)):
        for key in _LAYER_COUNTS:
            if isinstance(value := getattr(config, key, None), int):
                return value
    return None
