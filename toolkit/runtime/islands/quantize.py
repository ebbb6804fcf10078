"""Changes in few bits for slow links: blocks with their own scales, dense or sparse, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch.nn.functional import pad

BLOCK = 256
"""Elements that share their scales. An outlier affects its own block only, and a place in a block is one byte."""
_SHIFTS = {8: (0,), 4: (0, 4), 2: (0, 2, 4, 6)}
"""Bits → places of numbers in a byte."""


@dataclass(frozen=True)
class Encoding:
    """How a change is written on the link.

    32 bits: as it is. 8 and 4 bits: whole multiples of one fp32 scale per block. 2 bits: a sign and one of two sizes
    per block, in bfloat16: the mean of what is above the mean, and the mean of the rest. With a density below 1 (in 2
    bits) only the largest of each block are sent, with their places.
    """

    bits: int = 32
    density: float = 1.0
    """Share of the numbers that are sent."""

    @property
    def kept(self) -> int:
        """Numbers of a block that are sent: a multiple of 4, so that they fill whole bytes."""
        return min(BLOCK, max(4, round(self.density * BLOCK / 4) * 4))

    def num_bytes(self, size: int) -> int:
        """Bytes of `size` encoded numbers."""
        if self.bits == 32:
            return 4 * size
        places = self.kept if self.kept < BLOCK else 0
        return -(-size // BLOCK) * (self.kept * self.bits // 8 + 4 + places)

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Encode fp32 numbers as bytes."""
        if self.bits == 32:
            return values.contiguous().view(torch.uint8)
        rows = pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
        places = torch.zeros(0, dtype=torch.uint8)
        if self.kept < BLOCK:
            found = rows.abs().topk(self.kept, dim=1, sorted=False).indices.sort(dim=1).values
            rows, places = rows.gather(1, found), found.to(torch.uint8)
        numbers, scales = _signs_and_sizes(rows) if self.bits == 2 else _multiples(rows, self.bits)
        packed = sum(
            (numbers[:, at :: 8 // self.bits] << shift for at, shift in enumerate(_SHIFTS[self.bits])),
            torch.zeros((), dtype=torch.uint8),
        )
        return torch.cat([packed.flatten(), scales.flatten().view(torch.uint8), places.flatten()])

    def unpack(self, packed: torch.Tensor, size: int) -> torch.Tensor:
        """Decode `size` numbers to fp32."""
        if self.bits == 32:
            return packed.view(torch.float32)
        blocks = -(-size // BLOCK)
        sizes = [blocks * self.kept * self.bits // 8, 4 * blocks]
        numbers, scales, places = packed.tensor_split([sizes[0], sum(sizes)])
        mask = 2**self.bits - 1
        shifted = [(numbers >> shift) & mask for shift in _SHIFTS[self.bits]]
        rows = torch.stack(shifted, dim=1).view(blocks, self.kept)
        if self.bits == 2:
            halves = scales.clone().view(torch.bfloat16).view(blocks, 2).float()
            sign = 1.0 - 2.0 * (rows >> 1)
            found = sign * torch.where((rows & 1).bool(), halves[:, 1:], halves[:, :1])
        else:
            found = (rows.float() - mask // 2) * scales.clone().view(torch.float32)[:, None]
        if self.kept < BLOCK:
            whole = torch.zeros(blocks, BLOCK)
            found = whole.scatter_(1, places.view(blocks, self.kept).long(), found)
        return found.flatten()[:size]


def _multiples(rows: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(whole numbers from 0 on, scales)."""
    limit = 2 ** (bits - 1) - 1
    scales = rows.abs().amax(dim=1, keepdim=True) / limit
    whole = (rows / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(-limit, limit)
    return (whole + limit).to(torch.uint8), scales


def _signs_and_sizes(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(2 × is negative + is large, the two sizes)."""
    magnitude = rows.abs()
    large = magnitude > magnitude.mean(dim=1, keepdim=True)
    means = [(magnitude * s).sum(dim=1) / s.sum(dim=1).clamp(min=1) for s in (~large, large)]
    return (2 * (rows < 0) + large).to(torch.uint8), torch.stack(means, dim=1).to(torch.bfloat16)


GATHERED_RANKS = 2
"""Up to so many ranks send whole changes to each other: as many bytes as a mean in two steps, and rounded once."""


class QuantizedMean:
    """The mean over the ranks of a group, in few bits, with error feedback.

    Two ranks send each other their changes. More ranks compute one part of the mean each: a rank receives that part
    from all ranks, encoded, and sends back the mean, encoded again. Each rank keeps what its own encoding has lost and
    adds it to its next message.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._ranks, self._rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)

    def mean(self, own: torch.Tensor, error: torch.Tensor, encoding: Encoding) -> torch.Tensor:
        """The mean, bit-identical on every rank. Sets `error` to what this call has rounded away. Collective."""
        if encoding.bits == 32:
            own = own + error if error.numel() else own.clone()
            error.zero_()
            torch.distributed.all_reduce(own, group=self._group)
            return own / self._ranks
        return (self._gathered if self._ranks <= GATHERED_RANKS else self._in_parts)(own, error, encoding)

    def sent_bytes(self, size: int, encoding: Encoding) -> int:
        """Bytes that this rank sends for a mean of `size` numbers."""
        if encoding.bits == 32 or self._ranks > GATHERED_RANKS:
            return 2 * (self._ranks - 1) * encoding.num_bytes(-(-size // self._ranks))
        return (self._ranks - 1) * encoding.num_bytes(size)

    def _gathered(self, own: torch.Tensor, error: torch.Tensor, encoding: Encoding) -> torch.Tensor:
        wanted = own + error
        packed = encoding.pack(wanted)
        gathered = torch.empty(self._ranks, packed.numel(), dtype=torch.uint8)
        torch.distributed.all_gather_into_tensor(gathered.view(-1), packed, group=self._group)
        error.copy_(wanted - encoding.unpack(packed, own.numel()))
        return torch.stack([encoding.unpack(row, own.numel()) for row in gathered]).mean(dim=0)

    def _in_parts(self, own: torch.Tensor, error: torch.Tensor, encoding: Encoding) -> torch.Tensor:
        width = -(-own.numel() // (self._ranks * BLOCK)) * BLOCK
        whole = pad(own + error, (0, width * self._ranks - own.numel())).view(self._ranks, width)
        mine = torch.stack([encoding.pack(part) for part in whole])
        theirs = torch.empty_like(mine)
        torch.distributed.all_to_all_single(theirs, mine, group=self._group)
        part = torch.stack([encoding.unpack(row, width) for row in theirs]).mean(dim=0)
        packed = encoding.pack(part)
        gathered = torch.empty_like(mine)
        torch.distributed.all_gather_into_tensor(gathered.view(-1), packed, group=self._group)
        sent = torch.stack([encoding.unpack(row, width) for row in mine])
        lost = whole - sent
        # This rank also makes up for the rounding of the mean: times `ranks`, because the next mean divides by it.
        lost[self._rank] += self._ranks * (part - encoding.unpack(packed, width))
        error.copy_(lost.flatten()[: own.numel()])
        return torch.cat([encoding.unpack(row, width) for row in gathered])[: own.numel()]


class ErrorFeedbackCodec:
    """Encodes changes of one rank's part of the weights; what rounding loses is added to the next change."""

    def __init__(self, encoding: Encoding, like: torch.Tensor) -> None:
        self.encoding, self._size = encoding, like.numel()
        self.error = torch.zeros(self._size if encoding.bits < 32 else 0)
        """What rounding has lost so far and is still to be sent."""

    def problem(self, content: torch.Tensor, size: int | None = None) -> str:
        """Why an encoded change of somebody else must not be applied; empty if it may. `size`: its numbers."""
        size = self._size if size is None else size
        required = self.encoding.num_bytes(size)
        if content.numel() != required:
            return f"it has {content.numel()} bytes; {required} are required"
        finite = bool(torch.isfinite(self.encoding.unpack(content, size)).all())
        return "" if finite else "it holds NaN or infinite numbers"

    def pack(self, change: torch.Tensor) -> torch.Tensor:
        """Encode a change as bytes; what rounding loses is kept for the next call."""
        if self.encoding.bits == 32:
            return self.encoding.pack(change)
        wanted = change + self.error
        packed = self.encoding.pack(wanted)
        self.error.copy_(wanted - self.unpack(packed))
        return packed

    def unpack(self, content: torch.Tensor) -> torch.Tensor:
        """Decode a change; the sender applies the decoded one too, so that all islands stay equal."""
        return self.encoding.unpack(content, self._size)
