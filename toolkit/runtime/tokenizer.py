"""Tokenizers: bytes, built in, or any of Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from toolkit.errors import BadInput


class Tokenizer(Protocol):
    """Text to token ids."""

    @property
    def vocab(self) -> int:
        """Ids are below this number."""

    @property
    def pad(self) -> int:
        """Id that fills up a short sequence."""

    def encode(self, text: str) -> np.ndarray:
        """A document's ids, with its end marked."""

    def decode(self, ids: list[int]) -> str:
        """Ids back to text."""


@dataclass(frozen=True)
class Bytes:
    """UTF-8 bytes as they are; 256 ends a document and 257 pads."""

    vocab: int = 258
    end: int = 256
    pad: int = 257

    def encode(self, text: str) -> np.ndarray:
        raw = np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8)
        return np.append(raw.astype(np.int32), np.int32(self.end))

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


@dataclass(frozen=True)
class HuggingFace:
    """A tokenizer of transformers."""

    tokenizer: Any

    @property
    def vocab(self) -> int:
        return len(self.tokenizer)

    @property
    def pad(self) -> int:
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else self.tokenizer.eos_token_id or 0)

    def encode(self, text: str) -> np.ndarray:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        return np.asarray([*ids, end] if end is not None else ids, dtype=np.int32)

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))


def load_tokenizer(name: str | None, model_path: str | None, *, trust_remote_code: bool = False) -> Tokenizer:
    """The recipe's tokenizer: `bytes`, a hub id or directory, or the model's own."""
    if name == "bytes":
        return Bytes()
    source = name or model_path
    if source is None:
        raise BadInput("data.tokenizer", "required with an inline model config: a hub id, a directory, or bytes")
    from transformers import AutoTokenizer

    try:
        return HuggingFace(AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code))
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput("data.tokenizer", f"{source} can't be loaded: {first}; `bytes` needs no download") from None
