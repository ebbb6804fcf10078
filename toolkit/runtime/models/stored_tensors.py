"""Parameters in safetensors checkpoints, read by rows: only the rows asked for are ever in memory.

Files are read, not mapped: pages of a mapped file count as this process's memory until the file is closed.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from toolkit.errors import BadInput
from toolkit.runtime.models.parameter_shards import Layout

BLOCK_BYTES = 16 * 2**20
"""Bytes read at a time where a rank keeps a few columns of every row."""
PAGE_BYTES = 4096
"""Of the system's file cache: reads of less copy little less than complete rows do."""
MAX_HEADER_BYTES = 100_000_000
"""Largest header that the safetensors format allows."""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


class Stored(Protocol):
    """A parameter that can be read by rows."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full parameter."""

    @property
    def step_rows(self) -> int:
        """Rows to read at a time."""

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Rows `first` to `last - 1` along the first dimension, in the file's data type."""


class TensorFile:
    """One safetensors file."""

    def __init__(self, path: str, *, mapped: bool = False) -> None:
        """`mapped`: tensors are pages of the file, which become copies when they are written to."""
        self.path = path
        self._file = Path(path).open("rb", buffering=0)  # noqa: SIM115 - open as long as this object lives
        length = int.from_bytes(self._file.read(8), "little")
        size = Path(path).stat().st_size
        if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise _broken(path, f"its header claims {length} bytes")
        try:
            header = json.loads(self._file.read(length))
            self._entries = {key: value for key, value in header.items() if key != "__metadata__"}
        except (ValueError, AttributeError):
            raise _broken(path, "its header is not a JSON object") from None
        self._start, self._bytes = 8 + length, size - 8 - length
        self._pages = torch.from_file(path, shared=False, size=size, dtype=torch.uint8) if mapped else None

    def names(self) -> list[str]:
        """Names of its tensors."""
        return list(self._entries)

    def entry(self, key: str) -> tuple[torch.dtype, tuple[int, ...], int]:
        """(data type, shape, offset in the file) of a tensor."""
        try:
            values = self._entries[key]
            dtype, shape = DTYPES[values["dtype"]], tuple(values["shape"])
            begin, end = values["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise _broken(self.path, f"its entry of {key} can't be read") from None
        if not 0 <= begin <= end <= self._bytes or end - begin != math.prod(shape) * dtype.itemsize:
            raise _broken(self.path, f"{key} of shape {list(shape)} does not fit between its offsets")
        return dtype, shape, self._start + begin

    def read(self, dtype: torch.dtype, offset: int, elements: int) -> torch.Tensor:
        """Consecutive elements from an offset."""
        if self._pages is not None and offset % dtype.itemsize == 0:
            return self._pages[offset : offset + elements * dtype.itemsize].view(dtype)
        data = torch.empty(elements * dtype.itemsize, dtype=torch.uint8)
        self.read_into(memoryview(data.numpy()), offset)  # type: ignore[arg-type]
        return data.view(dtype)

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill a buffer from an offset."""
        while target:
            done = os.preadv(self._file.fileno(), [target], offset)
            if not done:
                raise _broken(self.path, "it ends before its last tensor")
            target, offset = target[done:], offset + done

    def expect(self, offset: int, size: int) -> None:
        """Tell the system that these bytes will be read: it fetches them in large requests, also for small reads."""
        if hasattr(os, "posix_fadvise"):  # macOS has none
            os.posix_fadvise(self._file.fileno(), offset, size, os.POSIX_FADV_WILLNEED)


def _broken(path: str, why: str) -> BadInput:
    return BadInput("model.path", f"{path} is not a complete safetensors file: {why}; copy or download it again")


class PlainTensor:
    """A tensor of a file."""

    def __init__(self, file: TensorFile, key: str) -> None:
        self._file = file
        self._dtype, self.shape, self._offset = file.entry(key)
        self._row_elements = math.prod(self.shape[1:])

    @property
    def step_rows(self) -> int:
        return max(1, BLOCK_BYTES // max(1, self._row_elements * self._dtype.itemsize))

    def rows(self, first: int, last: int) -> torch.Tensor:
        width = self._row_elements
        offset = self._offset + first * width * self._dtype.itemsize
        data = self._file.read(self._dtype, offset, (last - first) * width)
        return data.view(last - first, *self.shape[1:]) if self.shape else data

    def full(self) -> torch.Tensor:
        """The complete tensor."""
        return self.rows(0, self.shape[0] if self.shape else 1).view(self.shape)

    def slice_bytes(self, layout: Layout) -> int:
        """Bytes of a rank's slice that follow each other in the file."""
        first, last = layout.ranges()[0]
        return (last - first) * math.prod(self.shape[layout.dim + 1 :]) * self._dtype.itemsize

    def own_slice(self, layout: Layout) -> torch.Tensor:
        """A rank's slice, without the bytes of other ranks."""
        before, after = self.shape[: layout.dim], self.shape[layout.dim + 1 :]
        ranges, element_bytes = layout.ranges(), math.prod(after) * self._dtype.itemsize
        own, row_bytes = sum(last - first for first, last in ranges), self.shape[layout.dim] * element_bytes
        data = torch.empty(math.prod(before) * own * element_bytes, dtype=torch.uint8)
        target = memoryview(data.numpy())  # type: ignore[arg-type]
        self._file.expect(self._offset, math.prod(before) * row_bytes)
        for row in range(math.prod(before)):
            for first, last in ranges:
                size = (last - first) * element_bytes
                self._file.read_into(target[:size], self._offset + row * row_bytes + first * element_bytes)
                target = target[size:]
        return data.view(self._dtype).view(*before, own, *after)


class TensorInMemory:
    """A parameter that no file has, such as a new head."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.shape, self.step_rows = tuple(tensor.shape), max(1, len(tensor))

    def rows(self, first: int, last: int) -> torch.Tensor:
        return self._tensor[first:last]


class Conversion:
    """Tensors of a checkpoint that transformers merges or splits into parameters: experts, fused projections."""

    def __init__(self, name: str, converter: WeightConverter, model: PreTrainedModel) -> None:
        self._name, self._converter, self._model = name, converter, model
        self._sources: dict[str, list[tuple[str, PlainTensor]]] = {}

    def add(self, pattern: str, key: str, tensor: PlainTensor) -> None:
        """Add a tensor of the checkpoint; they come in transformers' order."""
        self._sources.setdefault(pattern, []).append((key, tensor))

    @property
    def names(self) -> list[str]:
        """Names of the parameters that come out."""
        targets = self._converter.target_patterns
        return [self._name.replace(targets[0], target) for target in targets]

    def by_row(self, rows: int) -> bool:
        """Whether each row comes from one tensor of each kind: experts that are only stacked, joined and turned."""
        first, *others = self._converter.operations
        stacks = isinstance(first, MergeModulelist) and first.dim == 0
        return stacks and all(map(_inside_rows, others)) and all(len(many) == rows for many in self._sources.values())

    def convert(self, first: int | None = None, last: int | None = None) -> dict[str, torch.Tensor]:
        """The parameters, or some of their rows."""
        run = copy.deepcopy(self._converter)
        for pattern, tensors in self._sources.items():
            for key, tensor in tensors[first:last]:
                run.add_tensor(self._name, key, pattern, tensor.full)
        made = run.convert(self._name, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _inside_rows(operation: Any) -> bool:
    if isinstance(operation, Transpose):
        return operation.dim0 > 0 and operation.dim1 > 0 and not operation.check_dims  # it compares full shapes
    return isinstance(operation, Concatenate | Interleave) and operation.dim > 0


class ConvertedTensor:
    """A parameter that a conversion makes; by rows where the conversion allows it."""

    def __init__(self, conversion: Conversion, name: str, shape: tuple[int, ...]) -> None:
        self._conversion, self._name, self.shape = conversion, name, shape
        self._by_row = conversion.by_row(shape[0]) if shape else False
        self.step_rows = 1 if self._by_row or not shape else shape[0]

    def rows(self, first: int, last: int) -> torch.Tensor:
        if self._by_row:
            return self._conversion.convert(first, last)[self._name]
        return self._conversion.convert()[self._name][first:last]


def stored_tensors(model: PreTrainedModel, files: Mapping[str, str], *, mapped: bool = False) -> dict[str, Stored]:
    """The parameters and buffers of a model that a checkpoint has, under the model's names and in its shapes.

    `files`: tensor name → file; `mapped`: as in `TensorFile`. Names follow transformers 5.22's own table of renamings
    and conversions.
    """
    opened = {path: TensorFile(path, mapped=mapped) for path in sorted(set(files.values()))}
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    wanted = model.state_dict()
    found: dict[str, Stored] = {}
    conversions: dict[str, Conversion] = {}
    for key in sorted(files, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = key, None
        tensor = PlainTensor(opened[files[key]], key)
        if pattern is None:
            found[name] = tensor
        else:
            conversion = conversions.setdefault(name, Conversion(name, by_pattern[pattern], model))
            conversion.add(pattern, key, tensor)
    for conversion in conversions.values():
        made = [name for name in conversion.names if name in wanted]
        found |= {name: ConvertedTensor(conversion, name, tuple(wanted[name].shape)) for name in made}
    return {name: one for name, one in found.items() if name in wanted and one.shape == tuple(wanted[name].shape)}


def full_tensor(stored: Stored) -> torch.Tensor:
    """The complete parameter."""
    return stored.rows(0, stored.shape[0] if stored.shape else 1).view(stored.shape)


def flat_range(stored: Stored, low: int, high: int) -> torch.Tensor:
    """Elements of the flattened parameter; only the rows around them are read."""
    width = max(1, math.prod(stored.shape[1:]))
    first, last = low // width, max(low // width, -(-high // width))
    return stored.rows(first, last).flatten()[low - first * width : max(low, high) - first * width]


def own_part(stored: Stored, layout: Layout) -> torch.Tensor:
    """A rank's slice. Where it has few columns of every row, some complete rows are read at a time."""
    if layout.dim == 0:
        parts = [stored.rows(low, high) for low, high in layout.ranges()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    if isinstance(stored, PlainTensor) and stored.slice_bytes(layout) >= PAGE_BYTES:
        return stored.own_slice(layout)
    kept: torch.Tensor | None = None
    for first in range(0, stored.shape[0], stored.step_rows):
        part = layout.slice_of(stored.rows(first, min(stored.shape[0], first + stored.step_rows)))
        if kept is None:
            kept = part.new_empty(stored.shape[0], *part.shape[1:])
        kept[first : first + len(part)] = part
    return kept if kept is not None else layout.slice_of(full_tensor(stored))
