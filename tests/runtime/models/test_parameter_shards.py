"""Slices of parameters: every element on one rank, in the order that checkpoints expect."""

from __future__ import annotations

import pytest
import torch

from toolkit.checkpoints import element_runs
from toolkit.runtime.models.parameter_shards import Layout, shares


@pytest.mark.parametrize(
    ("shape", "dim", "packs"),
    [
        ((6, 4), 0, 1),
        ((6, 4), 1, 1),
        ((7, 3), 0, 1),
        ((2, 3, 4), 2, 1),
        ((12, 4), 0, 2),
        ((3, 8, 5), 1, 2),
        ((4, 12), 1, 3),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_slices_are_the_elements_that_their_regions_name(
    shape: tuple[int, ...], dim: int, packs: int, ranks: int
) -> None:
    whole = torch.arange(int(torch.tensor(shape).prod())).view(shape)
    layouts = [Layout(dim=dim, index=i, ranks=ranks, shape=shape, packs=packs) for i in range(ranks)]
    for layout in layouts:
        named = [
            run.start + piece * run.stride + place
            for run in layout.region()
            for piece in range(run.count)
            for place in range(run.length)
        ]
        assert layout.slice_of(whole).flatten().tolist() == named
    assert element_runs.cover([layout.region() for layout in layouts], whole.numel()) is None


def test_shares_add_up_and_the_first_ranks_are_full() -> None:
    assert shares(10, 4) == [3, 3, 3, 1]
    assert shares(2, 4) == [1, 1, 0, 0]
