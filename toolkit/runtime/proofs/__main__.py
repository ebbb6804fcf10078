"""Run a split proof in a process of its own: `python -m toolkit.runtime.proofs`."""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import asdict


def main() -> int:
    """Read the question from standard input; print the verdict as the last line of standard output."""
    text = sys.stdin.read()  # before the imports, which take seconds: whoever asked may have been stopped meanwhile
    if not text:
        return 1
    gc.disable()  # imports make next to no garbage, and looking for it takes an eighth of their time
    import torch

    from toolkit.plans.split_verdicts import Axes
    from toolkit.recipe.model_section import Lora, Model
    from toolkit.runtime.proofs.split_proof import prove
    from toolkit.runtime.proofs.unsplit import tiny_model_section

    gc.enable()
    torch.set_num_threads(1)  # models are tiny and ranks are threads: more would only wait for each other
    question = json.loads(text)
    given, axes = question["model"], Axes(**question["axes"])
    section = Model(**{**given, "lora": Lora(**given["lora"]) if given["lora"] else None})
    if axes.tensor_by == "autotp":
        from toolkit.runtime.proofs.coverage import try_autotp

        verdict = try_autotp(tiny_model_section(section, axes), axes.tp)
    else:
        verdict = prove(section, axes)
    print(json.dumps(asdict(verdict)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
