"""Images with one class each: a directory per class, or a table with paths or bytes."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.errors import BadInput, Problem, first_line
from toolkit.recipe.data_files import data_files, image_folders
from toolkit.recipe.sections import Data
from toolkit.runtime.corpus import sources
from toolkit.runtime.corpus.formats import label_number
from toolkit.runtime.corpus.token_cache import class_names
from toolkit.runtime.data.input_spec import InputSpec
from toolkit.runtime.models.micro_batch import MicroBatch

Picture = str | bytes
"""A path, or the bytes of an image file."""
THREADS = 4


@dataclass(frozen=True)
class Images:
    """Images, decoded when a batch needs them. Decoding releases the GIL, so several threads decode at a time."""

    pictures: Sequence[Picture]
    labels: np.ndarray
    prepare: Callable[[list[Any]], torch.Tensor]
    """Converts decoded images to the model's input."""
    tokens: int
    """Number of patches of an image."""
    lengths: None = None
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(THREADS), repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def positions(self) -> int:
        """Token positions that an epoch computes; all of them are used."""
        return len(self) * self.tokens

    positions_used = positions

    def width(self, indices: np.ndarray) -> int:
        """Number of patches per image."""
        return self.tokens

    def batch(self, indices: np.ndarray, width: int | None = None) -> MicroBatch:
        decoded = list(self._pool.map(decode, [self.pictures[index] for index in indices]))
        labels = torch.from_numpy(self.labels[indices].astype(np.int64))
        return MicroBatch(None, labels, pixel_values=self.prepare(decoded))

    def take(self, numbers: np.ndarray) -> Images:
        """A subset of the images."""
        chosen = [self.pictures[number] for number in numbers]
        return Images(chosen, self.labels[numbers], self.prepare, self.tokens)


def read_images(section: Data, path: str, takes: InputSpec, model_path: str | None) -> Images:
    """All images of a source; `BadInput` names those that can't be decoded."""
    pictures, labels = _folders(path) if image_folders(path) else _table(section, path)
    broken = [(where, what) for where, what in zip(range(len(pictures)), _checked(pictures), strict=True) if what]
    if broken:
        named = [Problem(_name(pictures[where], where), what) for where, what in broken[:5]]
        raise BadInput(f"data.path: {path}: {len(broken)} of {len(pictures)} images can't be decoded", named)
    size = takes.image_size
    if size is None:
        raise BadInput("model", "has no image_size in its config, which data.format image-classification requires")
    return Images(pictures, np.asarray(labels), _processor(model_path, size), takes.patches or 1)


def decode(picture: Picture) -> Any:
    """Decode an image to RGB."""
    from PIL import Image

    with Image.open(io.BytesIO(picture) if isinstance(picture, bytes) else picture) as image:
        return image.convert("RGB")


def _folders(path: str) -> tuple[list[Picture], list[int]]:
    """Images of a directory per class; classes are numbered in the sorted order of the directories."""
    found = image_folders(path)
    return (
        [str(file) for files in found.values() for file in files],
        [number for number, files in enumerate(found.values()) for _ in files],
    )


def _table(section: Data, path: str) -> tuple[list[Picture], list[int]]:
    import tempfile

    import datasets

    with tempfile.TemporaryDirectory() as work:
        rows = sources.read_rows(section, path, Path(work))
        sources.need_columns(rows, (section.image_column, section.label_column), path)
        names = class_names(rows, section)
        if isinstance(rows.features[section.image_column], datasets.Image):
            rows = rows.cast_column(section.image_column, datasets.Image(decode=False))
        labels = [label_number(label, names) for label in rows[section.label_column]]
        pictures = [_picture(value, path) for value in rows[section.image_column]]
    bad = [number for number, label in enumerate(labels) if label is None]
    if bad:
        raise BadInput("data.label_column", f"{path}, row {bad[0] + 1}: an integer or a name is required")
    return pictures, [label for label in labels if label is not None]


def _picture(value: Any, source: str) -> Picture:
    """An image of a table; its path is relative to the table's directory."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    files = data_files(source)
    base = files[0].parent if files else Path()
    return str(base / str(value))


def _checked(pictures: Sequence[Picture]) -> Iterable[str]:
    """For each image the reason why it can't be decoded, or an empty string."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        yield from pool.map(_problem, pictures)


def _problem(picture: Picture) -> str:
    from PIL import UnidentifiedImageError

    try:
        decode(picture)
    except UnidentifiedImageError:
        return "is not an image of a known format"
    except (OSError, SyntaxError, ValueError) as error:
        return str(error)
    return ""


def _name(picture: Picture, row: int) -> str:
    return picture if isinstance(picture, str) else f"row {row + 1}"


def _processor(model_path: str | None, size: int) -> Callable[[list[Any]], torch.Tensor]:
    """The model's own image processor if it has one; otherwise resizing, with colours from −1 to 1."""
    from transformers import AutoImageProcessor
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    processor: Any = ViTImageProcessorPil(size={"height": size, "width": size})
    if model_path is not None:
        try:
            # transformers 5.22.2 prefers torchvision, which has no build for every torch version and then fails to
            # import. This can go when torchvision is a dependency.
            processor = AutoImageProcessor.from_pretrained(model_path, backend="pil")
        except (OSError, ValueError, KeyError) as error:
            raise BadInput("model.path", f"{model_path} has no image processor: {first_line(error)}") from None
    return lambda images: processor(images, return_tensors="pt")["pixel_values"]
