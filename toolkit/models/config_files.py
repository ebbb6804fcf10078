"""Where a model's `config.json` comes from: a directory, a file, a name in configs/models, or the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolkit.errors import BadInput

LARGEST_BYTES = 4_000_000
"""A config is a few kilobytes; anything near this is another kind of file."""
OFFLINE_WAYS = "a local directory, an inline `model.config`, or a name in configs/models works without a network"


def load_model_config(path: str, *, models_dir: Path) -> dict[str, Any]:
    """The config of a model given as directory, JSON file, name in `models_dir` or hub id; BadInput otherwise."""
    if not path.strip() or "\0" in path:
        raise BadInput("model.path", f"{path!r} is not a path; {OFFLINE_WAYS}")
    local = Path(path).expanduser()
    if _is_dir(local):
        return _read(local / "config.json")
    if local.suffix == ".json":
        return _read(local)
    bundled = _bundled(path, models_dir)
    return bundled if bundled is not None else _read(_from_hub(path, models_dir))


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # A name too long for the file system is not a directory either.
        return False


def _bundled(name: str, models_dir: Path) -> dict[str, Any] | None:
    """The config of that file name or hub id in `models_dir`, whatever the case."""
    wanted = name.casefold()
    files = sorted(models_dir.glob("*.json"))
    for file in files:
        if file.stem.casefold() == wanted:
            return _read(file)
    configs = (_read(file) for file in files if "/" in name)
    return next((config for config in configs if str(config.get("_hub_id", "")).casefold() == wanted), None)


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise BadInput(str(path), f"can't be read ({error.strerror or error}); {OFFLINE_WAYS}") from error
    if len(data) > LARGEST_BYTES:
        raise BadInput(str(path), f"is larger than {LARGEST_BYTES} bytes, so it is not a model config")
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadInput(str(path), f"is not JSON ({error}); give a Hugging Face config.json") from error
    if not isinstance(config, dict):
        raise BadInput(str(path), "does not hold a JSON object; give a Hugging Face config.json")
    return config


def _from_hub(name: str, models_dir: Path) -> Path:
    """The hub's `config.json`, from the cache or the network; huggingface_hub itself honours HF_HUB_OFFLINE."""
    try:
        # Imported here, because planning from local files must not wait for it.
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # Its errors share no base class: network, HTTP, validation, file system.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise BadInput(
            "model.path",
            f"{name} is no directory, no name in {models_dir}, and its config.json did not come from the "
            f"Hugging Face hub or its cache ({type(error).__name__}: {reason}); {OFFLINE_WAYS}",
        ) from error
