"""Remembered results of operators are those that torch's fake tensors give."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode

from toolkit.runtime.rehearsal import stand_ins
from toolkit.runtime.rehearsal.known_results import KnownResults
from toolkit.runtime.rehearsal.ledger import Ledger
from toolkit.runtime.rehearsal.report import Group

CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "new": lambda x: x @ x.t(),
    "another type": lambda x: x.to(torch.bfloat16),
    "view": lambda x: x.view(2, 8, 4)[1],
    "view with an offset": lambda x: x[:, 1:3].narrow(0, 4, 8),
    "slices": lambda x: [x[-3:], x[2:100:3], x[:, 1:-1], x[20:], x[5:2]],
    "rows by number": lambda x: x[torch.zeros(3, dtype=torch.long, device=x.device)],
    "several": lambda x: x.split(4),
    "new and none": lambda x: torch.ops.aten.native_layer_norm(x, [4], None, None, 1e-5),
    "in place": lambda x: x.mul_(2),
    "broadcast": lambda x: x[:1].expand(16, 4) + x.new_zeros(1, 4),
    "transposed": lambda x: x.t().contiguous(),
    "of nothing": lambda x: torch.ones(3, 2),
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


def test_rows_by_a_mask_are_not_remembered() -> None:
    """How many there are depends on its values."""
    mode = FakeTensorMode()
    results = KnownResults(mode)
    with mode, Ledger("cpu", results, [], []), pytest.raises(DynamicOutputShapeException):
        _ = torch.zeros(4)[torch.zeros(4, dtype=torch.bool)]


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


def test_tensors_of_nothing_have_the_default_type_of_the_moment() -> None:
    mode = FakeTensorMode()
    with mode, Ledger("cpu", KnownResults(mode), [], []):
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                assert torch.zeros(3).dtype == dtype
            finally:
                torch.set_default_dtype(before)


@pytest.mark.parametrize("is_weight_gradient", [False, True])
def test_grouped_products_in_fp32_have_the_shape_of_the_real_ones(is_weight_gradient: bool) -> None:
    def product() -> torch.Tensor:
        rows, offsets = torch.zeros(8, 16), torch.zeros(2, dtype=torch.int32)
        if is_weight_gradient:
            return torch.nn.functional.grouped_mm(rows.t(), torch.zeros(8, 32), offs=offsets)
        return torch.nn.functional.grouped_mm(rows, torch.zeros(2, 16, 32), offs=offsets)

    mode = FakeTensorMode()
    ledger = Ledger("cpu", KnownResults(mode), [], [])
    with mode, ledger:
        fake = product()
        assert ledger.finish("product").parts["temporary"] >= fake.numel() * 4
    real = product()
    assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


def test_a_group_is_the_tuple_of_its_ranks() -> None:
    group = Group(range(16384))
    assert hash(group) == hash(tuple(range(16384)))
    calls = [(group, 1), (group, 2)]
    assert len(pickle.dumps(calls)) < 1.01 * len(pickle.dumps(group)), "stored once"
    assert pickle.loads(pickle.dumps(calls)) == calls  # noqa: S301 - our own bytes


def test_neighbouring_stages_are_those_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

    topology = PipeModelDataParallelTopology(num_pp=4, num_mp=2, num_dp=3)
    grid = SimpleNamespace(_topo=topology, world_size=24, pipe_parallel_size=4)
    theirs = PipelineParallelGrid._build_p2p_groups
    monkeypatch.setattr(PipelineParallelGrid, "_build_p2p_groups", theirs)  # put back afterwards
    stand_ins._neighbours()
    assert PipelineParallelGrid._build_p2p_groups(grid) == theirs(grid)
