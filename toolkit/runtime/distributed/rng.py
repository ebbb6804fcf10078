"""A process's random generators (torch, device, numpy, Python): seeded, captured as plain tensors, restored."""

from __future__ import annotations

import random

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

_PREFIX = "rng."


def seed(number: int) -> None:
    """Seed every generator, as `transformers.set_seed` does.

    That one (5.22.2) imports peft and with it bitsandbytes and torch's compiler: three seconds of CPU per worker.
    """
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)  # devices included


def capture() -> dict[str, torch.Tensor]:
    """The state of every generator."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    assert kind == "MT19937"
    version, numbers, next_gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy_rest": torch.tensor([float(position), float(has_gauss), gauss], dtype=torch.float64),
        "python": torch.tensor(numbers, dtype=torch.int64),
        "python_rest": torch.tensor(
            [float(version), float(next_gauss is not None), next_gauss or 0.0], dtype=torch.float64
        ),
    }
    if get_accelerator().device_name() != "cpu":
        states["device"] = get_accelerator().get_rng_state().cpu()
    return {_PREFIX + name: tensor for name, tensor in states.items()}


def restore(states: dict[str, torch.Tensor]) -> None:
    """Set every generator to a captured state."""
    states = {name.removeprefix(_PREFIX): tensor for name, tensor in states.items()}
    torch.set_rng_state(states["torch"])
    position, has_gauss, gauss = states["numpy_rest"].tolist()
    np.random.set_state(("MT19937", states["numpy"].numpy().astype(np.uint32), int(position), int(has_gauss), gauss))
    version, has_next, following = states["python_rest"].tolist()
    numbers = tuple(states["python"].tolist())
    random.setstate((int(version), numbers, following if has_next else None))
    if "device" in states and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(states["device"])


def is_rng(key: str) -> bool:
    """Whether a tensor of a checkpoint file belongs to a generator."""
    return key.startswith(_PREFIX)
