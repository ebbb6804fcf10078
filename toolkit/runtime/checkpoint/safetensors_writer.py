"""Write safetensors files directly from the tensors' memory, hash them while writing, and sync them to the disk.

`safetensors.save_file` (0.5 and later) copies tensors first, and neither hashes nor syncs nor reports progress.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from toolkit.checkpoints.format import FileEntry

CHUNK_BYTES = 1 << 23
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The header of a safetensors file: length and JSON."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data must start at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def write(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    tick: Callable[[], object] = bool,
) -> FileEntry:
    """Write a file; another thread hashes each chunk while it is written. `tick` is called after each chunk."""
    digest, size = hashlib.sha256(), 0
    with ThreadPoolExecutor(1) as hasher, path.open("wb", buffering=0) as file:
        pending = None
        for chunk in _chunks(tensors, metadata):
            hashed = hasher.submit(digest.update, chunk)
            view = memoryview(chunk)
            while view:  # a raw write may write only a part
                view = view[file.write(view) or 0 :]
            size += len(chunk)
            if pending is not None:
                pending.result()
            pending = hashed
            tick()
        os.fsync(file.fileno())
    return FileEntry(size, digest.hexdigest())


def _chunks(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> Iterator[memoryview]:
    yield memoryview(header(tensors, metadata))
    for tensor in tensors.values():
        if tensor.numel():
            data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), CHUNK_BYTES):
                yield data[start : start + CHUNK_BYTES]
