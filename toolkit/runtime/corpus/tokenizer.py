"""Tokenizers: UTF-8 bytes or any tokenizer of Hugging Face; training of a new one."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from toolkit.errors import BadInput, first_line
from toolkit.recipe.data_checks import ITEMS
from toolkit.recipe.sections import Data
from toolkit.runtime.corpus.sources import need_columns, read_rows
from toolkit.runtime.corpus.token_documents import TOKEN

Message = Mapping[str, Any]


class Tokenizer(Protocol):
    """Text to token ids."""

    @property
    def vocab(self) -> int:
        """Size of the vocabulary; ids are smaller."""

    @property
    def pad(self) -> int:
        """Padding id."""

    @property
    def end(self) -> int | None:
        """Id of the end of a document, if there is one."""

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""

    @property
    def template_ends(self) -> bool:
        """Whether the chat template marks the end of an answer itself."""

    @property
    def identity(self) -> str:
        """A string that is equal for tokenizers that give equal ids."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, without special tokens."""

    def encode_whole(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text with the special tokens that an encoder expects."""

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[np.ndarray]:
        """Ids of two texts each, with the special tokens that keep them apart."""

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompt: bool) -> str:
        """A conversation as text; `prompt` adds the start of the assistant's next turn."""

    def decode(self, ids: list[int]) -> str:
        """Ids back to text."""


@dataclass(frozen=True)
class Bytes:
    """UTF-8 bytes as ids; 256 ends a document and 257 is padding."""

    vocab: int = 258
    end: int = 256
    pad: int = 257
    has_template: bool = True
    template_ends: bool = False
    identity: str = "bytes"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(TOKEN) for text in texts]

    def encode_whole(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.concatenate([[self.end], ids, [self.end]]).astype(TOKEN) for ids in self.encode(texts)]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[np.ndarray]:
        first, second = (self.encode_whole([pair[place] for pair in pairs]) for place in (0, 1))
        return [np.concatenate([a, b[1:]]) for a, b in zip(first, second, strict=True)]

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompt: bool) -> str:
        """One line `<role>content` per message; tools and tool calls as JSON."""
        lines = [f"<tools>{json.dumps(tools, ensure_ascii=False)}\n"] if tools else []
        for message in messages:
            calls = message.get("tool_calls")
            shown = json.dumps(calls, ensure_ascii=False) if calls else ""
            lines.append(f"<{message['role']}>{message.get('content') or ''}{shown}\n")
        return "".join(lines) + ("<assistant>" if prompt else "")

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


@dataclass(frozen=True)
class ItemIds:
    """Item ids as they are, for sequences of items instead of texts; the id after the last item is padding."""

    items: int
    end: None = None
    has_template: bool = False
    template_ends: bool = False

    @property
    def vocab(self) -> int:
        return self.items + 1

    @property
    def pad(self) -> int:
        return self.items

    @property
    def identity(self) -> str:
        return f"{ITEMS}{self.items}"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        raise BadInput("data.tokenizer", f"{self.identity} takes lists of item ids; use another tokenizer for texts")

    encode_whole = encode

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[np.ndarray]:
        return self.encode([first for first, _ in pairs])

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompt: bool) -> str:
        raise BadInput("data.tokenizer", f"{self.identity} has no conversations; use another tokenizer")

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


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

    @property
    def end(self) -> int | None:
        end: int | None = self.tokenizer.eos_token_id
        return end

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @property
    def template_ends(self) -> bool:
        return self.has_template

    @property
    def identity(self) -> str:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        table = backend.to_str() if backend is not None else json.dumps(sorted(self.tokenizer.get_vocab().items()))
        special = json.dumps(self.tokenizer.special_tokens_map, default=str, sort_keys=True)
        text = "\0".join((type(self.tokenizer).__name__, table, special, str(self.tokenizer.chat_template)))
        return hashlib.sha256(text.encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return self._encode(texts, add_special_tokens=False)

    def encode_whole(self, texts: Sequence[str]) -> list[np.ndarray]:
        return self._encode(texts, add_special_tokens=True)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[np.ndarray]:
        return self._encode(pairs, add_special_tokens=True)

    def _encode(self, texts: Sequence[str | tuple[str, str]], *, add_special_tokens: bool) -> list[np.ndarray]:
        try:
            found = self.tokenizer(
                list(texts),
                add_special_tokens=add_special_tokens,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
        except Exception as error:  # a bare one in tokenizers (0.23.3): the unknown token may be missing
            what = f"{self.tokenizer.name_or_path} can't encode a text: {first_line(error)}"
            raise BadInput("data.tokenizer", f"{what}; give another tokenizer, or mend its tokenizer.json") from None
        return [np.asarray(ids, dtype=TOKEN) for ids in found["input_ids"]]

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompt: bool) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                list(messages), tools=tools or None, tokenize=False, add_generation_prompt=prompt
            )
        )

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))


def load_tokenizer(name: str | None, model_path: str | None, *, trust_remote_code: bool = False) -> Tokenizer:
    """The recipe's tokenizer: `bytes`, a hub id or directory, or the model's own."""
    if name == "bytes":
        return Bytes()
    if name is not None and name.startswith(ITEMS):
        return ItemIds(int(name.removeprefix(ITEMS)))
    source = name or model_path
    if source is None:
        raise BadInput("data.tokenizer", "required with an inline model config: a hub id, a directory, or bytes")
    from transformers import AutoTokenizer

    try:
        return HuggingFace(AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code))
    except Exception as error:  # a damaged tokenizer.json raises a bare Exception in tokenizers (0.23.3)
        raise BadInput(
            "data.tokenizer", f"{source} can't be loaded: {first_line(error)}; `bytes` needs no download"
        ) from None


SPECIAL = ("<|end|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHECKED_BYTES = 1_000_000
"""Length of the text on which compression is measured."""


@dataclass(frozen=True)
class Learned:
    """Result of training a tokenizer."""

    tokens: int
    bytes_per_token: float


def train_tokenizer(path: str, column: str, vocab: int, out: Path) -> Learned:
    """Train a byte-level BPE tokenizer on all documents and save it into `out`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with tempfile.TemporaryDirectory() as work:
        rows = read_rows(Data(path=path, text_column=column), path, Path(work))
        need_columns(rows, (column,), path)
        backend.train_from_iterator(_batches(rows, column), trainer, length=len(rows))
        sample = _sample(rows, column)
    end, pad, start, stop = SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=end, pad_token=pad, additional_special_tokens=[start, stop]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(str(out))
    used = len(backend.encode(sample).ids)
    return Learned(backend.get_vocab_size(), len(sample.encode()) / max(used, 1))


def _batches(rows: Any, column: str) -> Iterator[list[str]]:
    for batch in rows.iter(1000):
        yield [str(text) for text in batch[column] if text]


def _sample(rows: Any, column: str) -> str:
    parts, size = [], 0
    for text in rows[column]:
        parts.append(str(text or ""))
        size += len(parts[-1])
        if size > CHECKED_BYTES:
            break
    return "".join(parts)[:CHECKED_BYTES]
