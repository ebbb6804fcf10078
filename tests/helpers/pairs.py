"""Rows of pairs with made-up tokens."""

from __future__ import annotations

import numpy as np
import torch

from toolkit.runtime.corpus.token_documents import from_lists
from toolkit.runtime.data.pairs import PairRows
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


def pair_rows(lengths: list[tuple[int, int, int]], seq_len: int, *, share: bool, seed: int = 0) -> PairRows:
    """Rows of pairs, given as (tokens of the prompt, of the chosen answer, of the rejected one)."""
    generator = np.random.default_rng(seed)
    documents, counted = [], []
    for prompt, *answers in lengths:
        begin = generator.integers(3, 120, prompt)
        for answer in answers:
            documents.append(np.concatenate([begin, generator.integers(3, 120, answer)]))
            counted += [0] * prompt + [1] * answer
    made = from_lists(documents, counted=np.array(counted, np.uint8))
    return PairRows.pack(made, np.arange(len(lengths)), seq_len, 0, "made up", share=share)
