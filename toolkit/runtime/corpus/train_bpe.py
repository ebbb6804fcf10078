"""Learning a byte-level BPE vocabulary from text, with a chat template, as a Hugging Face tokenizer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.recipe.sections import Data
from toolkit.runtime.corpus.sources import need_columns, read_rows

SPECIAL = ("<|end|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHECKED_BYTES = 1_000_000
"""Text that the reported compression is measured on."""


@dataclass(frozen=True)
class Learned:
    """How it went."""

    tokens: int
    bytes_per_token: float


def train_tokenizer(path: str, column: str, vocab: int, out: Path) -> Learned:
    """Learn from every document, save into `out`."""
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
