"""Changes in few bits for slow links: blocks with their own scales, dense or sparse, with error feedback."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch.nn.functional import pad

BLOCK = 256
"""Elements that share their scales. An outlier affects its own block only, and a place in a block is one byte."""


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
        blocks = -(-values.numel() // BLOCK)
        numbers = torch.empty(blocks, self.kept * self.bits // 8, dtype=torch.uint8)
        scales = torch.empty(blocks, 4, dtype=torch.uint8)
        places = torch.empty(blocks, self.kept if self.kept < BLOCK else 0, dtype=torch.uint8)
        for part in _parts(blocks):
            own = values[part.start * BLOCK : part.stop * BLOCK]
            rows = pad(own, (0, len(numbers[part]) * BLOCK - own.numel())).view(-1, BLOCK)
            if self.kept < BLOCK:
                found = rows.abs().topk(self.kept, dim=1, sorted=False).indices.sort(dim=1).values
                rows, places[part] = rows.gather(1, found), found.to(torch.uint8)
            codes, sizes = _signs_and_sizes(rows) if self.bits == 2 else _multiples(rows, self.bits)
            scales[part] = sizes.view(torch.uint8).view(-1, 4)
            numbers[part] = self._joined(codes)
        return torch.cat([numbers.flatten(), scales.flatten(), places.flatten()])

    def _joined(self, codes: torch.Tensor) -> torch.Tensor:
        """Numbers of few bits in a byte each → as many in a byte as it can hold, the first in the lowest bits."""
        if self.bits == 8:
            return codes
        if self.bits == 4:
            pairs = codes.view(torch.int16)
            return (pairs | pairs >> 4).to(torch.uint8)
        fours = codes.view(torch.int32)
        return (fours | fours >> 6 | fours >> 12 | fours >> 18).to(torch.uint8)

    def _apart(self, numbers: torch.Tensor) -> torch.Tensor:
        """The inverse of `_joined`."""
        if self.bits == 8:
            return numbers
        if self.bits == 4:
            pairs = numbers.to(torch.int16)
            return ((pairs | pairs << 4) & 0x0F0F).view(torch.uint8)
        fours = numbers.to(torch.int32)
        return ((fours | fours << 6 | fours << 12 | fours << 18) & 0x03030303).view(torch.uint8)

    def unpack(self, packed: torch.Tensor, size: int, room: torch.Tensor | None = None) -> torch.Tensor:
        """Decode `size` numbers to fp32, in `room` if it is given: whole blocks of them."""
        if self.bits == 32:
            return packed.view(torch.float32)
        blocks = -(-size // BLOCK)
        numbers, scales, places = self._split(packed, blocks)
        found = torch.empty(blocks, BLOCK) if room is None else room.view(blocks, BLOCK)
        for part in _parts(blocks):
            rows = self._decoded(numbers[part], scales[part])
            if self.kept < BLOCK:
                found[part] = torch.zeros_like(found[part]).scatter_(1, places[part].long(), rows)
            else:
                found[part] = rows
        return found.view(-1)[:size]

    def is_finite(self, packed: torch.Tensor, size: int) -> bool:
        """Whether all numbers are finite when decoded: those of few bits are if their scales are far from overflow."""
        if self.bits == 32:
            return bool(torch.isfinite(packed.view(torch.float32)).all())
        scales = self._split(packed, -(-size // BLOCK))[1].clone()
        # Decoding multiplies a scale by at most 128, or subtracts one of the two sizes from the other.
        largest = scales.view(torch.bfloat16 if self.bits == 2 else torch.float32).float() * 128
        return bool(torch.isfinite(largest).all())

    def _split(self, packed: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(numbers, scales, places), one row per block."""
        widths = (self.kept * self.bits // 8, 4, self.kept if self.kept < BLOCK else 0)
        parts = packed.tensor_split([blocks * widths[0], blocks * (widths[0] + 4)])
        numbers, scales, places = (part.view(blocks, width) for part, width in zip(parts, widths, strict=True))
        return numbers, scales, places

    def _decoded(self, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The numbers of some blocks."""
        codes = self._apart(numbers)
        if self.bits > 2:
            return codes.float().sub_(2 ** (self.bits - 1) - 1).mul_(scales.clone().view(torch.float32))
        small, large = scales.clone().view(torch.bfloat16).float().tensor_split(2, dim=1)
        signs = (codes & 2).float().neg_().add_(1)
        return torch.addcmul(small, (codes & 1).float(), large - small).mul_(signs)


_BLOCKS_AT_A_TIME = 512
"""Blocks that are encoded together: what is in between stays in a core's cache."""


def _parts(blocks: int) -> Iterator[slice]:
    return (slice(at, min(at + _BLOCKS_AT_A_TIME, blocks)) for at in range(0, blocks, _BLOCKS_AT_A_TIME))


def _multiples(rows: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(whole numbers from 0 on, scales)."""
    limit = 2 ** (bits - 1) - 1
    scales = rows.abs().amax(dim=1, keepdim=True) / limit
    whole = (rows / scales.clamp(min=torch.finfo(torch.float32).tiny)).round_().clamp_(-limit, limit)
    return whole.add_(limit).to(torch.uint8), scales


def _signs_and_sizes(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(2 × is negative + is large, the two sizes)."""
    magnitude = rows.abs()
    total = magnitude.sum(dim=1, keepdim=True)
    large = magnitude > total / rows.shape[1]
    count = large.sum(dim=1, keepdim=True)
    upper = (magnitude * large).sum(dim=1, keepdim=True)
    lower = (total - upper).clamp(min=0)  # an outlier's rounding may exceed the sum of all others
    sizes = torch.cat([lower / (rows.shape[1] - count).clamp(min=1), upper / count.clamp(min=1)], dim=1)
    codes = (rows < 0).view(torch.uint8).mul(2).add_(large.view(torch.uint8))
    return codes, sizes.to(torch.bfloat16)


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
        # Kept, because the system takes as long to give new memory as decoding takes.
        self._room = torch.empty(-(-self.error.numel() // BLOCK) * BLOCK)

    def problem(self, content: torch.Tensor, size: int | None = None) -> str:
        """Why an encoded change of somebody else must not be applied; empty if it may. `size`: its numbers."""
        size = self._size if size is None else size
        required = self.encoding.num_bytes(size)
        if content.numel() != required:
            return f"it has {content.numel()} bytes; {required} are required"
        return "" if self.encoding.is_finite(content, size) else "it holds NaN or infinite numbers"

    def encoded(self, change: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(A change as bytes, the numbers that they stand for); what rounding loses is kept for the next call.

        The numbers are valid until the next call. The sender applies them too, so that all islands stay equal.
        """
        if self.encoding.bits == 32:
            return self.encoding.pack(change.clone()), change
        self.error.add_(change)
        packed = self.encoding.pack(self.error)
        decoded = self.decoded(packed)
        self.error.sub_(decoded)
        return packed, decoded

    def decoded(self, content: torch.Tensor) -> torch.Tensor:
        """The numbers that an encoded change of this part stands for: valid until the next call."""
        return self.encoding.unpack(content, self._size, self._room)
