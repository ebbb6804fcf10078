"""Which tokens each rank of a ring holds, and which blocks of queries and keys it computes: plain arithmetic.

A sequence is cut into twice as many chunks as the ring has ranks; rank i holds chunks i and 2·cp − 1 − i (zig-zag), so
that causal work is even. What a rank computes with the keys of another one is a list of blocks for kernels that know
full rectangles and causal squares: inside a chunk each document is a causal square, and between two chunks a document
that reaches into both is a full rectangle. A window adds the squares on its far edge, which are causal from behind.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.runtime.models.documents import Documents


def zigzag(length: int, ranks: int, index: int) -> list[range]:
    """The two chunks of a sequence that a rank holds, in its order."""
    width = length // (2 * ranks)
    return [range(chunk * width, (chunk + 1) * width) for chunk in (index, 2 * ranks - 1 - index)]


class Sees(enum.Enum):
    """Which keys of a block its queries see."""

    ALL = enum.auto()
    EARLIER = enum.auto()
    """Query i sees keys 0 to i of a square."""
    LATER = enum.auto()
    """Query i sees keys i to the last of a square: the far edge of a window."""


@dataclass(frozen=True)
class Block:
    """Queries of this rank that see keys of another one, by their places there."""

    rows: slice
    queries: slice
    keys: slice
    sees: Sees


@dataclass(frozen=True)
class Reach:
    """Which keys of its document a query sees."""

    causal: bool = True
    """Whether it sees earlier keys and its own only."""
    window: int | None = None
    """Number of keys that it sees, its own included; None: all."""


def blocks(documents: Documents, ranks: int, own: int, other: int, reach: Reach) -> list[Block]:
    """What rank `own` computes with the keys of rank `other`."""
    rows = list(_spans(documents))
    alike = all(row == rows[0] for row in rows)
    found = []
    for number, spans in enumerate(rows[:1] if alike else rows):
        which = slice(0, len(rows)) if alike else slice(number, number + 1)
        chunks = (_placed(documents.row_length, ranks, index) for index in (own, other))
        for (q_at, q), (k_at, k) in itertools.product(*chunks):
            if reach.causal and k.start > q.start:
                continue  # keys of later tokens
            for span in spans:
                for asking, seen, sees in _pieces(_common(span.asking, q), _common(span.seen, k), span.gap, reach):
                    queries, keys = _moved(asking, q_at), _moved(seen, k_at)
                    found.append(Block(which, queries, keys, sees))
    return found


@dataclass(frozen=True)
class _Span:
    """Tokens of a text, and those before them in it, or they themselves, that they see."""

    asking: range
    seen: range
    gap: int = 0
    """Tokens of other texts that lie between the two in the row."""


def _spans(documents: Documents) -> Iterator[list[_Span]]:
    """Row by row: every document sees itself, and the beginning that it continues."""
    row: list[_Span] = []
    start, begin = 0, range(0)
    for number, length in enumerate(documents.lengths):
        own = range(start, start + length)
        row.append(_Span(own, own))
        if documents.branches is not None:
            if number % 3 == 0:
                begin = own
            else:
                row.append(_Span(own, begin, own.start - begin.stop))
        start = own.stop
        if start == documents.row_length:
            yield row
            row, start = [], 0


def _pieces(asking: range, seen: range, gap: int, reach: Reach) -> Iterator[tuple[range, range, Sees]]:
    """Queries and keys of a text that see each other, as squares and rectangles.

    Causal queries are cut into runs of at most a window, such that a border of the keys, or one that is a window away,
    is never inside a run. Then a run sees all of its own tokens or none (a causal square), all keys before it that no
    query's window has left behind, and, a window further back, all or none of the square that its queries leave
    behind one by one.
    """
    if not asking or not seen:
        return
    if not reach.causal:
        yield asking, seen, Sees.ALL
        return
    first, end = asking.start - gap, asking.stop - gap  # where the queries would be right behind what they continue
    wide = reach.window or end - min(first, seen.start)
    borders = {seen.start, seen.stop, seen.start + wide, seen.stop + wide}
    for start, stop in itertools.pairwise(sorted({first, end, *(at for at in borders if first < at < end)})):
        for a in range(start, stop, wide):
            b = min(a + wide, stop)
            edge = range(a - wide + 1, b - wide)
            for queries, keys, sees in (
                (range(a, b), range(a, b), Sees.EARLIER),
                (range(a, b), range(max(b - wide, seen.start), min(a, seen.stop)), Sees.ALL),
                (range(a, b - 1), edge, Sees.LATER),
            ):
                if keys and _common(keys, seen):
                    yield range(queries.start + gap, queries.stop + gap), keys, sees


def _placed(length: int, ranks: int, index: int) -> list[tuple[int, range]]:
    """Chunks of a rank, each with what leads from a token's place in the sequence to its place on the rank."""
    first, second = zigzag(length, ranks, index)
    return [(-first.start, first), (len(first) - second.start, second)]


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _moved(places: range, by: int) -> slice:
    return slice(places.start + by, places.stop + by)
