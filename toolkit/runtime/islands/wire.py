"""Changes of weights as bytes: fp32 as it is, or blocks of few bits with error feedback."""

from __future__ import annotations

import torch

from toolkit.runtime.islands import quantize
from toolkit.runtime.islands.quantize import BLOCK


class Wire:
    """Of one rank's part of the weights."""

    def __init__(self, bits: int, like: torch.Tensor) -> None:
        self._bits, self._size = bits, like.numel()
        self._whole = -(-self._size // BLOCK) * BLOCK
        self.error = torch.zeros(self._size if bits < 32 else 0)
        """What rounding has taken and is to be sent yet."""

    def pack(self, change: torch.Tensor) -> torch.Tensor:
        """Bytes to send; what rounding takes is kept for the next time."""
        if self._bits == 32:
            return change.contiguous().view(torch.uint8)
        wanted = change + self.error
        packed = quantize.pack(torch.nn.functional.pad(wanted, (0, self._whole - self._size)), self._bits)
        self.error.copy_(wanted - self.unpack(packed))
        return packed

    def unpack(self, content: torch.Tensor) -> torch.Tensor:
        """What everybody takes them for, the sender too."""
        if self._bits == 32:
            return content.view(torch.float32)
        return quantize.unpack(content, self._whole, self._bits)[: self._size]
