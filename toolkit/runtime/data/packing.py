"""Best-fit packing: several documents per sequence, with attention inside each document and hardly any padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from toolkit.errors import BadInput, first_line
from toolkit.recipe.model_section import Model
from toolkit.runtime.corpus.token_documents import Documents, spread
from toolkit.runtime.models.attention import forward, without_gpu
from toolkit.runtime.models.build import build_model, load_config, skeleton
from toolkit.runtime.models.documents import Documents as Spans
from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch
from toolkit.runtime.models.tiny_models import VOCABULARY, tiny_config
from toolkit.runtime.models.trials import tried

LongDocuments = Literal["split", "truncate"]


@dataclass(frozen=True)
class Pieces:
    """Parts of documents that fit a sequence: `length` inputs from `start`, each with the next token as label."""

    starts: np.ndarray
    lengths: np.ndarray
    long_documents: int = 0
    """Number of documents that were longer than a sequence."""
    lost_tokens: int = 0
    """Number of tokens that truncation removed."""
    positions: np.ndarray | None = None
    """Position of the first input of each piece; None: 0."""

    def __len__(self) -> int:
        return len(self.starts)


def cut(documents: Documents, numbers: np.ndarray, seq_len: int, long: LongDocuments) -> Pieces:
    """Documents as pieces. Long ones are split, so that every token is still predicted once, or truncated."""
    inputs = np.maximum(documents.lengths[numbers] - 1, 0)
    starts = documents.bounds[:-1][numbers]
    num_long = int((inputs > seq_len).sum())
    if long == "truncate":
        lengths = np.minimum(inputs, seq_len)
        return _useful(documents, starts, lengths, num_long, int((inputs - lengths).sum()))
    parts = -(-inputs // seq_len)
    offsets = spread(np.zeros(len(parts), np.int64), parts) * seq_len
    lengths = np.minimum(np.repeat(inputs, parts) - offsets, seq_len)
    return _useful(documents, np.repeat(starts, parts) + offsets, lengths, num_long, 0)


def _useful(documents: Documents, starts: np.ndarray, lengths: np.ndarray, long: int, lost: int) -> Pieces:
    """Leave out pieces in which no token is counted."""
    keep = lengths > 0
    if documents.counted is not None:
        before = np.concatenate([[0], np.cumsum(documents.counted, dtype=np.int64)])
        keep &= before[starts + lengths + 1] > before[starts + 1]
    return Pieces(starts[keep], lengths[keep], long, lost)


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """For each length the index of its sequence: longest first, each into the sequence with the tightest fit.

    Open sequences are kept in lists by their remaining room. The bits of `open_rooms` tell which lists are not empty,
    so the tightest fit is found in one operation, however many sequences are open.
    """
    rooms: list[list[int]] = [[] for _ in range(capacity + 1)]
    open_rooms, count = 0, 0
    places = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = open_rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            place = rooms[room].pop()
            if not rooms[room]:
                open_rooms ^= 1 << room
        else:
            room, place, count = capacity, count, count + 1
        places[index] = place
        left = room - length
        if left:
            rooms[left].append(place)
            open_rooms |= 1 << left
    return places


@dataclass(frozen=True)
class BestFit:
    """Sequences of complete pieces, as full as possible. Positions restart in each piece; attention stays inside it."""

    documents: Documents
    pieces: Pieces
    """Pieces, sorted by sequence."""
    firsts: np.ndarray
    """First piece of each sequence, then the number of pieces."""
    seq_len: int
    pad: int
    lengths: None = None

    @classmethod
    def pack(cls, documents: Documents, pieces: Pieces, seq_len: int, pad: int) -> BestFit:
        """Pack pieces into sequences."""
        places = best_fit(pieces.lengths, seq_len)
        order = np.argsort(places, kind="stable")
        sequences = np.arange(places.max() + 2 if len(places) else 1)
        firsts = np.searchsorted(places[order], sequences)
        packed = Pieces(pieces.starts[order], pieces.lengths[order], pieces.long_documents, pieces.lost_tokens)
        return cls(documents, packed, firsts, seq_len, pad)

    def __len__(self) -> int:
        return len(self.firsts) - 1

    @property
    def positions_used(self) -> int:
        """Input positions that hold a document's token."""
        return int(self.pieces.lengths.sum())

    @property
    def positions(self) -> int:
        """All input positions."""
        return len(self) * self.seq_len

    def width(self, indices: np.ndarray) -> int:
        """Tokens per row: always a full sequence."""
        return self.seq_len

    def batch(self, indices: np.ndarray, width: int | None = None) -> MicroBatch:
        counts = self.firsts[indices + 1] - self.firsts[indices]
        pieces = spread(self.firsts[indices], counts)
        starts, lengths = self.pieces.starts[pieces], self.pieces.lengths[pieces]
        rows = np.repeat(np.arange(len(indices)), counts)
        before = np.cumsum(lengths) - lengths
        first_of_row = np.cumsum(counts) - counts
        columns = before - before[first_of_row][rows]
        shape = (len(indices), self.seq_len)
        spots = spread(rows * self.seq_len + columns, lengths)
        source = spread(starts, lengths)
        ids = np.full(shape, self.pad, np.int64)
        ids.reshape(-1)[spots] = self.documents.tokens[source]
        labels = np.full(shape, IGNORE, np.int64)
        following = self.documents.tokens[source + 1].astype(np.int64)
        if self.documents.counted is not None:
            following = np.where(self.documents.counted[source + 1], following, IGNORE)
        labels.reshape(-1)[spots] = following
        # Padding continues the positions of the last piece: a sequence of one document is then plain causal attention.
        begins = np.zeros(len(lengths), np.int64) if self.pieces.positions is None else self.pieces.positions[pieces]
        last = np.cumsum(counts) - 1
        positions = np.arange(self.seq_len) + (begins - columns)[last][:, None]
        positions.reshape(-1)[spots] = spread(begins, lengths)
        return MicroBatch(torch.from_numpy(ids), torch.from_numpy(labels), position_ids=torch.from_numpy(positions))


TOLERANCE = 1e-4
"""For fp32 logits around 1: a document that is attended to changes them by much more."""
LENGTHS = (5, 9, 4)


class TinyModelFailed(Exception):
    """The tiny model does not even run on single documents, so nothing is known about the model itself."""


def check_isolated(section: Model) -> None:
    """`BadInput` if the model's type attends across documents of one sequence."""
    if section.trust_remote_code:
        return  # no tiny model can be built of remote code; its author is responsible
    config = load_config(section)
    how = [without_gpu(section.attention), section.task]
    if reason := tried("packing", tiny_config(config), how, lambda: _mixes(section, config.model_type)):
        raise _refusal(reason)


def why_not_shared(section: Model) -> str:
    """Why prompts of pairs are repeated for a model; empty if they are computed once for both answers."""
    if section.trust_remote_code:
        return "the model has code of its own"
    config = load_config(section)
    if any("experts" in name for name, _ in skeleton(section).named_parameters()):
        return "routers of experts are balanced over complete documents"
    how = [without_gpu(section.attention), section.task]
    return tried("shared prompts", tiny_config(config), how, lambda: _mixes(section, config.model_type, shared=True))


def _mixes(section: Model, kind: str, shared: bool = False) -> str:
    """How packed documents of a model's type differ from single ones; empty if they do not."""
    try:
        difference = largest_leak(section, shared)
    except TinyModelFailed as error:
        return f"that can't be tested: a tiny {kind} model does not run ({error})"
    except Exception as error:  # a forward pass without position ids may raise anything
        return f"{kind} does not accept packed documents ({first_line(error)})"
    if difference <= TOLERANCE:
        return ""
    return f"{kind} mixes them (logits of packed and single documents differ by {difference:.1e})"


def largest_leak(section: Model, shared: bool = False) -> float:
    """Largest difference between a document's logits when packed with others, in two rows, and when alone.

    `shared`: documents are pairs that share their beginning.
    """
    config = tiny_config(load_config(section))
    if "kv_lora_rank" in config:  # latent attention has one key per head
        config["num_key_value_heads"] = config["num_attention_heads"]
    tiny = Model(config=config, init="scratch", precision="fp32", attention=without_gpu(section.attention))
    packed, documents = _paired() if shared else _packed()
    with torch.no_grad():
        try:
            model = build_model(replace(tiny, task=section.task), seed=0).eval()
            alone = torch.cat([model(input_ids=own[None], use_cache=False).logits[0] for own in documents])
        except Exception as error:
            raise TinyModelFailed(first_line(error)) from None
        found = forward(model, packed).logits.flatten(0, 1)
    if packed.documents is not None and packed.documents.branches is not None:
        found = found[packed.documents.branches.source]
    return float((found - alone).abs().max())


def _made_up(lengths: Sequence[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY - 1, (length,), generator=generator) for length in lengths]


def _packed() -> tuple[MicroBatch, list[torch.Tensor]]:
    """Documents of different lengths, packed and alone.

    Two rows with different bounds: a kernel that takes the bounds of one row for all would show.
    """
    lengths = [*LENGTHS, *reversed(LENGTHS)]
    documents = _made_up(lengths)
    ids = torch.cat(documents).view(2, -1)
    positions = torch.cat([torch.arange(length) for length in lengths]).view(2, -1)
    return MicroBatch(ids, ids, position_ids=positions), documents


def _paired() -> tuple[MicroBatch, list[torch.Tensor]]:
    """Pairs of documents that share their beginning, packed and alone; each row has a pair."""
    lengths = [*LENGTHS, *reversed(LENGTHS)]
    parts = _made_up(lengths)
    ids = torch.cat(parts).view(2, -1)
    rows = [(parts[at], parts[at + 1], parts[at + 2]) for at in (0, 3)]
    positions = [torch.arange(len(begin), len(begin) + len(rest)) for begin, *rests in rows for rest in rests]
    places = torch.cat([torch.arange(len(rows[0][0])), *positions[:2], torch.arange(len(rows[1][0])), *positions[2:]])
    micro = MicroBatch(ids, ids, position_ids=places.view(2, -1), documents=Spans.of_pairs(lengths, 2))
    return micro, [torch.cat([begin, rest]) for begin, *rests in rows for rest in rests]


def _refusal(why: str) -> BadInput:
    ways = "use packing: false, or, with data.format text, packing_method stream"
    return BadInput("data.packing_method", f"best_fit keeps documents apart, and {why}; {ways}")
