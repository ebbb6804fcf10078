"""Every way to name a model's config, and what a person reads when it fails."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.errors import BadInput
from toolkit.models import meta_spec
from toolkit.models.spec import LARGEST_BYTES, load_model_config, read_model_config
from toolkit.resources import user_cache

MODELS = Path(__file__).parents[2] / "configs" / "models"


def message(path: str) -> str:
    with pytest.raises(BadInput) as raised:
        load_model_config(path, models_dir=MODELS)
    return str(raised.value)


def test_directory_and_file(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model_config(str(tmp_path), models_dir=MODELS) == config
    assert load_model_config(str(tmp_path / "config.json"), models_dir=MODELS) == config


@pytest.mark.parametrize("name", ["qwen3-8b", "QWEN3-8B", "Qwen/Qwen3-8B", "qwen/qwen3-8b"])
def test_bundled_by_file_name_and_hub_id(name: str) -> None:
    assert load_model_config(name, models_dir=MODELS)["_hub_id"] == "Qwen/Qwen3-8B"


def test_hub_ids_are_unique() -> None:
    named = [json.loads(file.read_text()).get("_hub_id") for file in MODELS.glob("*.json")]
    given = [name for name in named if name]
    assert len(given) == len(set(given)) >= 30


def test_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, file: str(tmp_path / file))
    monkeypatch.setattr("toolkit.models.spec._reachable", lambda endpoint: True)
    assert load_model_config("someone/some-model", models_dir=MODELS) == {"model_type": "gpt2"}


def test_hub_failure_says_what_was_tried_and_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str, file: str) -> str:
        raise ConnectionError("no route to host\nsecond line")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    monkeypatch.setattr("toolkit.models.spec._reachable", lambda endpoint: True)
    text = message("someone/some-model")
    assert "\n" not in text
    for part in ("someone/some-model", "configs/models", "hub", "no route to host", "local directory", "model.config"):
        assert part in text


def test_name_that_can_not_be_a_hub_id() -> None:
    assert "not a name !!" in message("not a name !!")


@pytest.mark.parametrize("path", ["", "  ", "a\0b", "x" * 5000])
def test_path_that_is_none(path: str) -> None:
    assert "model.path" in message(path)


@pytest.mark.parametrize("text", ["{", "[1]", "3", "\xff\xfe", "[" * 100_000])
def test_broken_json(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("latin-1"))
    assert "config.json" in message(str(file))
    assert "config.json" in message(str(tmp_path))


def test_directory_without_config_and_missing_file(tmp_path: Path) -> None:
    assert "can't be read" in message(str(tmp_path))
    assert "can't be read" in message(str(tmp_path / "none.json"))


def test_file_that_is_too_large(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b" " * (LARGEST_BYTES + 1))
    assert "larger than" in message(str(tmp_path))


def test_a_hub_that_can_not_be_reached_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub retries for 25 seconds; nothing listens on this port."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    started = time.perf_counter()
    assert "can't be reached" in message("someone/some-model")
    assert time.perf_counter() - started < 2


@pytest.mark.slow
def test_types_outside_the_table_are_counted_on_the_meta_device_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = {
        "model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 128, "state_size": 8,
        "intermediate_size": 128,
    }  # fmt: skip
    spec = read_model_config(config)
    assert "counting the parameters of mamba" in capsys.readouterr().err
    built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert spec.params == sum(parameter.numel() for parameter in built.parameters())
    assert (spec.layers, spec.hidden, len(spec.layer_params)) == (3, 64, 3)
    monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: pytest.fail("it is cached"))
    assert read_model_config(config) == spec


def test_a_type_that_can_not_be_built_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("toolkit.models.meta_spec.COUNTER", "no.such.module")
    with pytest.raises(BadInput, match="could not build it from this config"):
        read_model_config({"model_type": "mamba"})


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"\xff", b"[" * 100_000, b"[]", b'{"layers": [1, 2]}',
        b'{"layers": ["a"], "experts": [0], "outside": 1, "head": 0, "tied": false, "text": {}}',
        b'{"layers": [1], "experts": [0], "outside": null, "head": 0, "tied": false, "text": {}}',
        b'{"layers": [1], "experts": [], "outside": 1, "head": 0, "tied": false, "text": {}}',
        b'{"layers": [1], "experts": [0], "outside": 1, "head": 0, "tied": false, "text": [1]}',
    ],
)  # fmt: skip
def test_a_damaged_count_in_the_cache_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    config = {"model_type": "mamba", "hidden_size": 64}
    count = {"layers": [5, 7], "experts": [0, 0], "outside": 9, "head": 4, "tied": False, "text": {"hidden_size": 64}}
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(meta_spec, "_run", lambda kind, given: count)
    right = read_model_config(config)
    (file,) = (user_cache() / "shapes").iterdir()
    file.write_bytes(damage)
    assert read_model_config(config) == right
    assert json.loads(file.read_bytes()) == count
