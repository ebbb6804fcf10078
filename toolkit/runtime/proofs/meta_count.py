"""Counts the parameters of a model on the meta device: `python -m toolkit.runtime.proofs.meta_count < config.json`.

For types that the planner's table lacks (`toolkit/models/meta_spec.py` starts it in a process of its own, because the
planner must not import torch). It prints one line of JSON.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

LAYER = re.compile(r"(?:.*\.)?(?:layers|layer|h|blocks|block)\.(\d+)\.")
EXPERT = re.compile(r"\.experts?\b")
IGNORED = ("model_type", "auto_map", "attn_implementation", "experts_implementation")
"""Keys that are not sizes: a config of somebody else must not name code or kernels to load."""


def count(config: dict[str, Any]) -> dict[str, Any]:
    """Parameters of the model by part: before, in and after the layers, and those of experts in each layer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, logging

    logging.set_verbosity(logging.CRITICAL)
    given = {key: value for key, value in config.items() if key not in IGNORED and not key.startswith("_")}
    resolved = AutoConfig.for_model(str(config["model_type"]), **given)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(resolved)
    layers: dict[int, int] = {}
    experts: dict[int, int] = {}
    outside = 0
    for name, parameter in model.named_parameters():
        found = LAYER.match(name)
        if found is None:
            outside += parameter.numel()
            continue
        index = int(found[1])
        layers[index] = layers.get(index, 0) + parameter.numel()
        if EXPERT.search(name):
            experts[index] = experts.get(index, 0) + parameter.numel()
    head = model.get_output_embeddings()
    table = model.get_input_embeddings()
    tied = head is not None and table is not None and head.weight is table.weight
    text = resolved.get_text_config()
    return {
        "layers": [layers[index] for index in sorted(layers)],
        "experts": [experts.get(index, 0) for index in sorted(layers)],
        "outside": outside,
        "head": 0 if head is None or tied else sum(p.numel() for p in head.parameters()),
        "tied": tied,
        "text": {key: value for key, value in text.to_dict().items() if isinstance(value, int | str | bool)},
    }


def main() -> int:
    """Read a config from standard input and print the counts."""
    print(json.dumps(count(json.load(sys.stdin))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
