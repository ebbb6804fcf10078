"""Plan, launch, train and resume Hugging Face models on DeepSpeed under any parallel strategy.

In a notebook: `toolkit.plan(recipe)`, `toolkit.train(recipe, nproc=2)`, `toolkit.resume(run_dir)`,
`toolkit.parity(recipe)`, `toolkit.rehearse(recipe)`, `toolkit.training_arguments(plan, output_dir)`,
`toolkit.deepspeed_plugin(plan)`.
"""

import importlib
from typing import Any

_FUNCTIONS = ("plan", "train", "resume", "parity", "rehearse", "training_arguments", "deepspeed_plugin")


def __getattr__(name: str) -> Any:
    """Import the functions of `toolkit.api` on first use, so that the command line starts without them."""
    if name in _FUNCTIONS:
        return getattr(importlib.import_module("toolkit.api"), name)
    raise AttributeError(f"module 'toolkit' has no attribute {name!r}")
