"""Small made-up tables of every format: something to learn without a file, for trials and tests."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

COUNT = 256
ANIMALS = ("cat", "dog", "owl", "fox")
SOUNDS = ("meow", "woof", "hoot", "yip")


def synthetic_rows(kind: str, count: int = COUNT) -> list[dict[str, Any]]:
    """Rows with the columns that recipes have by default."""
    return [_ROWS[kind](number) for number in range(count)]


def _text(number: int) -> dict[str, Any]:
    animal = number % len(ANIMALS)
    return {"text": f"The {ANIMALS[animal]} says {SOUNDS[animal]}. " * (1 + number % 5)}


def _pair(number: int) -> dict[str, Any]:
    animal = number % len(ANIMALS)
    answer = f"{SOUNDS[animal]} " * (1 + number % 3)
    return {"prompt": f"{number}: what does the {ANIMALS[animal]} say?", "response": answer}


def _chat(number: int) -> dict[str, Any]:
    messages = []
    for turn in range(1 + number % 3):
        row = _pair(number + turn)
        messages += [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
    return {"messages": messages}


def _class(number: int) -> dict[str, Any]:
    return {"text": _text(number)["text"], "label": number % len(ANIMALS)}


def _image(number: int) -> dict[str, Any]:
    """A square of one of a few colours, with noise."""
    from PIL import Image

    colours = np.random.default_rng(number).integers(0, 60, (16, 16, 3), dtype=np.uint8)
    kind = number % len(ANIMALS)
    colours[..., kind % 3] += np.uint8(60 if kind < 3 else 180)
    stream = io.BytesIO()
    Image.fromarray(colours).save(stream, "png")
    return {"image": {"bytes": stream.getvalue(), "path": None}, "label": number % len(ANIMALS)}


_ROWS = {
    "image-classification": _image,
    "text": _text,
    "instruction": _pair,
    "seq2seq": _pair,
    "chat": _chat,
    "classification": _class,
}
