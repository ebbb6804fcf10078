"""Rows of pairs with made-up tokens."""

from __future__ import annotations

import torch

from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch


def pairs(lengths: list[tuple[int, int, int]], seed: int = 0) -> MicroBatch:
    """A pair per row, given as (tokens of the prompt, of the chosen answer, of the rejected one)."""
    generator = torch.Generator().manual_seed(seed)
    width = max(2 * prompt + chosen + rejected for prompt, chosen, rejected in lengths)
    ids = torch.randint(3, 120, (len(lengths), width), generator=generator)
    labels, positions = torch.full_like(ids, IGNORE), torch.zeros_like(ids)
    for row, (prompt, *answers) in enumerate(lengths):
        start = 0
        for answer in answers:
            end = start + prompt + answer
            positions[row, start:] = torch.arange(width - start)
            labels[row, start + prompt - 1 : end - 1] = ids[row, start + prompt : end]
            start = end
    return MicroBatch(ids, labels, position_ids=positions, pairs=torch.ones(len(lengths), dtype=torch.long)).located()
