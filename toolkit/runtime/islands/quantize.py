"""Quantization to 8 or 4 bits for slow links: one scale per block, with error feedback."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

BLOCK = 256
"""Elements that share a scale. A scale costs 4 bytes per block, and an outlier affects its own block only."""


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Quantize complete blocks of fp32 to bytes: first the numbers, then the scales."""
    limit = 2 ** (bits - 1) - 1
    rows = values.view(-1, BLOCK)
    scales = rows.abs().amax(dim=1, keepdim=True) / limit
    whole = (rows / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(-limit, limit)
    numbers = (whole + limit).to(torch.uint8)
    if bits == 4:
        numbers = numbers[:, 0::2] | (numbers[:, 1::2] << 4)
    return torch.cat([numbers.flatten(), scales.flatten().view(torch.uint8)])


def unpack(packed: torch.Tensor, size: int, bits: int) -> torch.Tensor:
    """Dequantize the result of `pack` for `size` elements to fp32."""
    limit = 2 ** (bits - 1) - 1
    numbers, scales = packed[: size * bits // 8], packed[size * bits // 8 :].clone().view(torch.float32)
    if bits == 4:
        numbers = torch.stack([numbers & 15, numbers >> 4], dim=1).flatten()
    rows = numbers.view(-1, BLOCK).to(torch.float32) - limit
    found: torch.Tensor = (rows * scales[:, None]).flatten()
    return found


class QuantizedMean:
    """The mean over the ranks of a group, quantized in both directions, with error feedback.

    Every rank computes one part of the mean: it receives that part from all ranks, quantized, and sends back the mean,
    quantized again. Each rank keeps what its own rounding has lost and adds it to its next message.
    """

    def __init__(self, bits: int, group: Any, error: torch.Tensor) -> None:
        self._bits, self._group, self.error = bits, group, error
        self._ranks, self._rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)

    def mean(self, own: torch.Tensor) -> torch.Tensor:
        """The mean, bit-identical on every rank. Sets `error` to what this call has rounded away. Collective."""
        width = -(-own.numel() // (self._ranks * BLOCK)) * BLOCK
        wanted = own + self.error
        whole = torch.nn.functional.pad(wanted, (0, width * self._ranks - own.numel())).view(self._ranks, width)
        mine = torch.stack([pack(part, self._bits) for part in whole])
        theirs = torch.empty_like(mine)
        torch.distributed.all_to_all_single(theirs, mine, group=self._group)
        part = torch.stack([unpack(row, width, self._bits) for row in theirs]).mean(dim=0)
        packed = pack(part, self._bits)
        gathered = torch.empty_like(mine)
        torch.distributed.all_gather_into_tensor(gathered.view(-1), packed, group=self._group)
        sent = torch.stack([unpack(row, width, self._bits) for row in mine])
        lost = whole - sent
        # This rank also makes up for the rounding of the mean: times `ranks`, because the next mean divides by it.
        lost[self._rank] += self._ranks * (part - unpack(packed, width, self._bits))
        self.error.copy_(lost.flatten()[: own.numel()])
        return torch.cat([unpack(row, width, self._bits) for row in gathered])[: own.numel()]


class ErrorFeedbackCodec:
    """Encodes changes of one rank's part of the weights; what rounding loses is added to the next change."""

    def __init__(self, bits: int, like: torch.Tensor) -> None:
        self._bits, self._size = bits, like.numel()
        self._whole = -(-self._size // BLOCK) * BLOCK
        self.error = torch.zeros(self._size if bits < 32 else 0)
        """What rounding has lost so far and is still to be sent."""

    @property
    def num_bytes(self) -> int:
        """Size of an encoded change."""
        return 4 * self._size if self._bits == 32 else self._whole * self._bits // 8 + 4 * (self._whole // BLOCK)

    def problem(self, content: torch.Tensor) -> str:
        """Why an encoded change of somebody else must not be applied; empty if it may."""
        if content.numel() != self.num_bytes:
            return f"it has {content.numel()} bytes; {self.num_bytes} are required"
        return "" if bool(torch.isfinite(self.unpack(content)).all()) else "it holds NaN or infinite numbers"

    def pack(self, change: torch.Tensor) -> torch.Tensor:
        """Encode a change as bytes; what rounding loses is kept for the next call."""
        if self._bits == 32:
            return change.contiguous().view(torch.uint8)
        wanted = change + self.error
        packed = pack(torch.nn.functional.pad(wanted, (0, self._whole - self._size)), self._bits)
        self.error.copy_(wanted - self.unpack(packed))
        return packed

    def unpack(self, content: torch.Tensor) -> torch.Tensor:
        """Decode a change; the sender applies the decoded one too, so that all islands stay equal."""
        if self._bits == 32:
            return content.view(torch.float32)
        return unpack(content, self._whole, self._bits)[: self._size]
