"""Packing: several documents in one sequence, none of which sees another, and hardly any padding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from toolkit.errors import BadInput, first_line
from toolkit.recipe.sections import Model
from toolkit.runtime.corpus.token_documents import Documents, spread
from toolkit.runtime.models.build import build_model, load_config
from toolkit.runtime.models.micro_batch import IGNORE, MicroBatch
from toolkit.runtime.models.tiny_models import VOCABULARY, tiny_config

LongDocuments = Literal["split", "truncate"]


@dataclass(frozen=True)
class Pieces:
    """Parts of documents that fit a sequence: `length` inputs from `start` on, each with the next token as label."""

    starts: np.ndarray
    lengths: np.ndarray
    long_documents: int = 0
    """Documents that were longer than a sequence."""
    lost_tokens: int = 0
    """Tokens that truncation left out."""

    def __len__(self) -> int:
        return len(self.starts)


def cut(documents: Documents, numbers: np.ndarray, seq_len: int, long: LongDocuments) -> Pieces:
    """Documents as pieces: long ones split, so that every token is still predicted once, or truncated."""
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
    """Without pieces in which no token counts: nothing is learned from them."""
    keep = lengths > 0
    if documents.counted is not None:
        before = np.concatenate([[0], np.cumsum(documents.counted, dtype=np.int64)])
        keep &= before[starts + lengths + 1] > before[starts + 1]
    return Pieces(starts[keep], lengths[keep], long, lost)


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """For each length the number of its sequence: longest first, each where the least room is left over.

    The open sequences stand in lists by the room that they have; a number whose bits say which lists are not empty
    finds the tightest fit in one operation, however many sequences are open.
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
    """Sequences of whole pieces, as full as can be. Positions start anew in each piece, and attention stays in it."""

    documents: Documents
    pieces: Pieces
    """Sorted by sequence."""
    firsts: np.ndarray
    """First piece of each sequence, and the end."""
    seq_len: int
    pad: int
    lengths: None = None

    @classmethod
    def pack(cls, documents: Documents, pieces: Pieces, seq_len: int, pad: int) -> BestFit:
        """Pack pieces."""
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
        """All of them."""
        return len(self) * self.seq_len

    def width(self, indices: np.ndarray) -> int:
        """Tokens of a row: always a full sequence."""
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
        # Padding goes on behind the last piece: a sequence of one document is then plain causal attention.
        last = columns[np.cumsum(counts) - 1]
        positions = np.arange(self.seq_len) - last[:, None]
        positions.reshape(-1)[spots] = spread(np.zeros(len(lengths), np.int64), lengths)
        given = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return MicroBatch(**{name: torch.from_numpy(array) for name, array in given.items()})


TOLERANCE = 1e-4
"""Of logits around 1, in fp32: a document that is seen moves them by much more."""
LENGTHS = (5, 9, 4)


class TwinFailed(Exception):
    """The small twin does not run, on plain documents either: nothing is known of the model itself."""


def check_isolated(section: Model) -> None:
    """`BadInput` if the model's type mixes documents of one sequence."""
    if section.trust_remote_code:
        return  # code that is not transformers' own has no twin; what it does is its author's to say
    kind = load_config(section).model_type
    try:
        difference = largest_leak(section)
    except TwinFailed as error:
        raise _refusal(f"that can't be tried: a small twin of {kind} does not run ({error})") from None
    except Exception as error:  # a forward that takes no position ids raises what it likes
        raise _refusal(f"{kind} takes no packed documents ({first_line(error)})") from None
    if difference > TOLERANCE:
        raise _refusal(f"{kind} mixes them (packed and alone, logits differ by {difference:.1e})")


def largest_leak(section: Model) -> float:
    """Largest difference of a document's logits, packed with others and alone."""
    # Flash attention has no CPU kernel; it is told of documents by the same code as sdpa.
    attention = "sdpa" if section.attention == "flash_attention_2" else section.attention
    config = tiny_config(load_config(section))
    if "kv_lora_rank" in config:  # latent attention has a key for every head
        config["num_key_value_heads"] = config["num_attention_heads"]
    twin = Model(config=config, init="scratch", precision="fp32", attention=attention)
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(3, VOCABULARY - 1, (1, length), generator=generator) for length in LENGTHS]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with torch.no_grad():
        try:
            model = build_model(replace(twin, task=section.task), seed=0).eval()
            alone = torch.cat([model(input_ids=ids, use_cache=False).logits for ids in documents], 1)
        except Exception as error:
            raise TwinFailed(first_line(error)) from None
        packed = model(input_ids=torch.cat(documents, 1), position_ids=positions, use_cache=False).logits
    return float((packed - alone).abs().max())


def _refusal(why: str) -> BadInput:
    ways = "use packing: false, or, with data.format text, packing_method stream"
    return BadInput("data.packing_method", f"best_fit keeps documents apart, and {why}; {ways}")
