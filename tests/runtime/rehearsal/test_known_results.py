"""Remembered results of operators are those that torch's fake tensors give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from toolkit.runtime.rehearsal.known_results import KnownResults
from toolkit.runtime.rehearsal.ledger import Ledger

CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "new": lambda x: x @ x.t(),
    "another type": lambda x: x.to(torch.bfloat16),
    "view": lambda x: x.view(2, 8, 4)[1],
    "view with an offset": lambda x: x[:, 1:3].narrow(0, 4, 8),
    "several": lambda x: x.split(4),
    "new and none": lambda x: torch.ops.aten.native_layer_norm(x, [4], None, None, 1e-5),
    "in place": lambda x: x.mul_(2),
    "broadcast": lambda x: x[:1].expand(16, 4) + x.new_zeros(1, 4),
    "transposed": lambda x: x.t().contiguous(),
}


def looks(out: Any, given: torch.Tensor) -> list[Any]:
    """What tells results apart: shape, stride, offset, type, device, and whether they are or share the argument."""
    found = []
    for one in out if isinstance(out, list | tuple) else [out]:
        assert isinstance(one, FakeTensor)
        shared = one.untyped_storage()._cdata == given.untyped_storage()._cdata
        found.append((one.shape, one.stride(), one.storage_offset(), one.dtype, one.fake_device, shared, one is given))
    return found


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_fake_tensors(name: str) -> None:
    with FakeTensorMode() as plain:
        given = torch.zeros(16, 4)
        expected = looks(CALLS[name](given), given)
        assert plain.cache_enabled
    mode = FakeTensorMode()
    results = KnownResults(mode)
    with mode, Ledger("cpu", results, [], []):
        for turn in range(3):  # the first is run, the others are remembered
            given = torch.zeros(16, 4)
            assert looks(CALLS[name](given), given) == expected, turn
    assert any(outcome is not None for outcome in results._outcomes.values())


def test_live_bytes_are_counted_for_remembered_results() -> None:
    mode = FakeTensorMode()
    ledger = Ledger("cpu", KnownResults(mode), [], [])
    with mode, ledger:
        given = torch.zeros(16, 4)
        first = given @ given.t()
        once = ledger.finish("one").device_peak_bytes
        second = given @ given.t()
        twice = ledger.finish("two")
        assert twice.device_peak_bytes - once == first.numel() * 4 == second.numel() * 4
        assert twice.flops == 2 * 16 * 4 * 16
        del first, second
        assert ledger.finish("three").device_peak_bytes == twice.device_peak_bytes
        assert ledger.finish("four").device_peak_bytes == given.numel() * 4


def test_numbers_of_other_types_are_other_calls() -> None:
    mode = FakeTensorMode()
    with mode, Ledger("cpu", KnownResults(mode), [], []):
        given = torch.zeros(4, dtype=torch.long)
        assert (given + 1).dtype == torch.long
        assert (given + 1.0).dtype == torch.float32
        assert (given + True).dtype == torch.long
