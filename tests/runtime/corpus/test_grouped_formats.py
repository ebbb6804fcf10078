"""Rows of several texts, and answers with a label: what is read, and what is refused with file and row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from toolkit.cli import main
from toolkit.errors import BadInput
from toolkit.recipe.file import make_recipe
from toolkit.runtime.data.groups import ABSENT, GroupRows
from toolkit.runtime.data.input_spec import input_spec_of
from toolkit.runtime.data.load import load_data
from toolkit.runtime.data.pairs import PairRows
from toolkit.runtime.models.micro_batch import MicroBatch

TINY = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 260,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 192}  # fmt: skip
GOOD: dict[str, dict[str, Any]] = {
    "reward": {"prompt": "why?", "chosen": "because", "rejected": "no", "margin": 0.5},
    "kto": {"prompt": "why?", "response": "because", "label": True},
    "contrastive": {"query": "why?", "positive": "because", "negatives": ["no", "yes"]},
    "rank": {"query": "why?", "candidates": ["because", "no"], "scores": [1, 0]},
    "items": {"query": [1, 2], "positive": 3},
}
FORMATS = {"reward": "preference", "kto": "preference", "contrastive": "pairs", "rank": "ranking", "items": "pairs"}


def recipe_of(kind: str, rows: list[dict[str, Any]], folder: Path, *overrides: str) -> Any:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(path), "format": FORMATS[kind], "tokenizer": "bytes", "seq_len": 64, "cache": str(folder / "c")}
    if kind == "items":
        data["tokenizer"] = "items:100"
    given = {
        "name": "rows",
        "model": {"config": TINY, "precision": "fp32"},
        "data": data,
        "train": {"steps": 2, "global_batch": 2, "objective": "contrastive" if kind == "items" else kind},
    }
    return make_recipe(given, overrides)


def samples(kind: str, rows: list[dict[str, Any]], folder: Path, *overrides: str) -> Any:
    recipe = recipe_of(kind, rows, folder, *overrides)
    return load_data(recipe, input_spec_of(recipe.model)).train


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("reward", {"rejected": ""}, "rejected is empty"),
        ("reward", {"rejected": "because"}, "both answers are the same"),
        ("reward", {"margin": "much"}, "margin"),
        ("kto", {"label": "maybe"}, "label is 'maybe'; true or false is required"),
        ("kto", {"response": ""}, "response is empty"),
        ("kto", {"prompt": ""}, "prompt is empty"),
        ("contrastive", {"positive": ""}, "positive is ''; a text is required"),
        ("contrastive", {"negatives": ["no"]}, "negatives: 1 given; a list of at least 2 is required"),
        ("contrastive", {"negatives": ["no", "because"]}, "negatives has the positive itself"),
        ("rank", {"scores": [1]}, "2 candidates and 1 scores"),
        ("rank", {"scores": [0, 0]}, "no relevant candidate"),
        ("rank", {"scores": [1, -1]}, "not a number of at least 0"),
        ("rank", {"candidates": ["a"] * 9, "scores": [1] * 9}, "9 candidates; 2 to 8 are required"),
        ("rank", {"candidates": ["a", ""]}, "an entry that is not a text"),
        ("items", {"query": [1, 100]}, "query has the item 100; ids from 0 to 99"),
        ("items", {"query": []}, "an item id or a list of them"),
    ],
)
def test_a_bad_row_is_named(kind: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    extra = ["data.negatives=2"] if kind == "contrastive" else []
    rows = [GOOD[kind], GOOD[kind], {**GOOD[kind], **changes}]
    with pytest.raises(BadInput, match=words) as caught:
        samples(kind, rows, tmp_path, *extra)
    assert "rows.jsonl" in str(caught.value)
    assert "row 3" in str(caught.value) or "margin" in changes, "a column of mixed types can't even be read"


def test_margins_and_padding_rows_reach_the_loss(tmp_path: Path) -> None:
    pair = samples("reward", [GOOD["reward"]], tmp_path).batch(np.array([0]))
    assert pair.scores.tolist() == [[0.5, 0.0]]
    assert pair.input_ids.shape[0] == 2
    ranked = samples("rank", [GOOD["rank"]], tmp_path, "data.candidates=3")
    assert isinstance(ranked, GroupRows)
    batch = ranked.batch(np.array([0]))
    assert batch.scores.tolist() == [[1.0, 0.0, ABSENT]]
    assert batch.attention_mask.sum(1).tolist()[2] == 1


def test_equal_texts_have_equal_keys(tmp_path: Path) -> None:
    rows = [GOOD["items"], {"query": [7], "positive": [3]}, {"query": [1, 2], "positive": 4}]
    keys = samples("items", rows, tmp_path).batch(np.arange(3)).keys
    assert keys[0, 1] == keys[1, 1] != keys[2, 1]
    assert keys[0, 0] == keys[2, 0]


def complete_texts(batch: MicroBatch) -> str:
    """The documents of a batch, each with its prompt."""
    assert batch.input_ids is not None
    assert batch.documents is not None
    assert batch.documents.branches is not None
    return bytes(i for i in batch.input_ids.flatten()[batch.documents.branches.source].tolist() if i < 256).decode()


def test_answers_without_pairs_get_the_answer_of_the_row_before(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "response": f"answer {n}", "label": n % 2 == 0} for n in range(3)]
    packed = samples("kto", rows, tmp_path, "data.seq_len=128")
    assert isinstance(packed, PairRows)
    batch = packed.batch(np.arange(len(packed))).located()
    texts = complete_texts(batch)
    found = {(n, other) for n in range(3) for other in range(3) if f"<user>p{n}\n<assistant>answer {other}" in texts}
    assert found == {(0, 0), (0, 2), (1, 1), (1, 0), (2, 2), (2, 1)}
    good = dict(zip([n for n in range(3) if f"answer {n}" in texts], [1.0, 0.0, 1.0], strict=True))
    assert sorted(batch.scores.tolist()) == sorted(good.values())


def test_pairs_are_two_answers_with_a_label_for_kto(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(3)]
    packed = samples("kto", rows, tmp_path, "data.seq_len=128")
    batch = packed.batch(np.arange(len(packed)))
    assert int(batch.pairs.sum()) == 6
    assert sorted(batch.scores.tolist()) == [0.0] * 3 + [1.0] * 3
    texts = complete_texts(batch)
    assert "<user>p1\n<assistant>good 0" in texts, "mismatched with the same kind of answer of another prompt"


def test_labels_where_pairs_are_needed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="has answers with a label; reward needs pairs"):
        samples("kto", [GOOD["kto"]], tmp_path, "train.objective=reward")


def test_labels_without_answers_miss_the_response(tmp_path: Path) -> None:
    """TRL's name of the column is `completion`; that it lacks `chosen` would not help."""
    row = {"prompt": "why?", "completion": "because", "label": True}
    with pytest.raises(BadInput, match="has no column 'response'; it has prompt, completion, label"):
        samples("kto", [row], tmp_path)


def test_the_data_command_shows_all_texts_of_a_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from toolkit.recipe.file import as_mapping

    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(as_mapping(recipe_of("rank", [GOOD["rank"]] * 2, tmp_path, "data.candidates=2"))))
    assert main(["data", str(file), "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    assert "2 texts" in shown
    assert "1 (1): why?because" in shown
