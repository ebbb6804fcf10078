"""Live tensor bytes against sizes known by hand."""

from __future__ import annotations

import pytest
import torch

from toolkit.runtime.metrics.memory import SAMPLED_STEP, MemoryMeter, live_tensor_bytes

MIB = 2**20


def test_a_storage_counts_once() -> None:
    before = live_tensor_bytes()
    tensor = torch.zeros(MIB, dtype=torch.float32)
    view = tensor.view(1024, -1)[:10]
    assert live_tensor_bytes() - before == 4 * MIB
    del tensor
    assert live_tensor_bytes() - before == 4 * MIB, "the view keeps the storage"
    del view
    assert live_tensor_bytes() == before


def test_meta_tensors_have_no_bytes() -> None:
    """DeepSpeed's ZeRO 1 and 2 keep some, of the size of a table: measured peaks were that much too high."""
    before = live_tensor_bytes()
    empty = torch.empty(2**20, device="meta")
    assert empty.untyped_storage().nbytes() == 4 * MIB
    assert live_tensor_bytes() == before


def test_the_peak_inside_a_step_is_seen() -> None:
    meter = MemoryMeter()
    kept = torch.ones(MIB, dtype=torch.float32, requires_grad=True)
    before = live_tensor_bytes()
    with meter.step(SAMPLED_STEP):
        passing = kept * 2  # 4 MiB that are gone when the step ends
        (passing * passing).sum().backward()  # 4 MiB for the product, 4 for the gradient of `passing`
        del passing
    assert before + 8 * MIB <= meter.peak_bytes <= before + 20 * MIB
    assert kept.grad is not None


def test_what_is_freed_in_the_measured_step_leaves_room() -> None:
    """A tensor from before the step is freed before two of its size are made: the peak is one tensor higher."""
    meter, old = MemoryMeter(), [torch.ones(MIB)]
    before = live_tensor_bytes()
    with meter.step(SAMPLED_STEP):
        old.clear()
        new = torch.ones(MIB)
        assert (new + 1).sum() > 0
    assert meter.peak_bytes - before == pytest.approx(4 * MIB, rel=0.001)
