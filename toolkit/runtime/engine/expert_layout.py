"""Where the experts of one rank are in the whole model, under Hugging Face's names.

AutoEP (DeepSpeed 0.19) replaces a mixture by its own module: `router.gate` for `gate`, and of the experts `w1` and
`w3`, the halves of `gate_up_proj`, and `w2`, which is `down_proj`; each rank holds its range of experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from toolkit.checkpoints import element_runs
from toolkit.errors import CheckpointFailed
from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.engine.training_state import Place, Placed

_EXPERT = re.compile(r"(.*\.experts)\.(w1|w2|w3)")
_WHOLE = {"w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}


def whole_name(name: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Hugging Face's name of what AutoEP calls otherwise; `CheckpointFailed` if there is none."""
    match = _EXPERT.fullmatch(name)
    found = f"{match[1]}.{_WHOLE[match[2]]}" if match else name.replace(".router.gate.", ".gate.")
    if found not in shapes:
        raise CheckpointFailed(f"AutoEP's {name} is nothing that the model has; its state can't be saved")
    return found


def expert_places(shapes: Mapping[str, tuple[int, ...]], mesh: Mesh) -> Place:
    """Places of this rank's elements, from the shapes of the whole model's parameters."""
    ranks = mesh.plan.ep
    index = mesh.data % ranks

    def place(name: str, low: int, high: int) -> Placed:
        whole = whole_name(name, shapes)
        shape = shapes[whole]
        match = _EXPERT.fullmatch(name)
        if match is None:
            return Placed(whole, shape, element_runs.flat(low, high))
        experts, rows, columns = shape
        own = experts // ranks
        halves = 1 if match[2] == "w2" else 2
        begin = rows // 2 if match[2] == "w3" else 0
        box = element_runs.box(shape, (index * own, begin, 0), (own, rows // halves, columns))
        return Placed(whole, shape, element_runs.take(box, low, high))

    return place


def expert_copies(name: str, mesh: Mesh) -> tuple[int, int]:
    """This rank's number among those that hold the same elements, and how many these are."""
    if _EXPERT.fullmatch(name):
        return mesh.data // mesh.plan.ep, mesh.plan.dp // mesh.plan.ep
    return mesh.data, mesh.plan.dp
