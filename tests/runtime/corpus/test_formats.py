"""Formats: what of a row counts, and what can't be read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from toolkit.errors import BadInput
from toolkit.recipe.file import make_recipe
from toolkit.recipe.sections import Data
from toolkit.runtime.corpus.grouped_formats import make_format
from toolkit.runtime.corpus.tokenizer import Bytes, HuggingFace, Tokenizer
from toolkit.runtime.data.dataset import Dataset
from toolkit.runtime.data.input_spec import InputSpec
from toolkit.runtime.data.load import load_data
from toolkit.runtime.models.micro_batch import IGNORE

TAKES = InputSpec(vocab=300, num_labels=3, start=256)
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETS = CHATML.replace("{{ m.content or '' }}", "{{ (m.content if loop.last else m.content.split('#')[-1]) or '' }}")
"""Like templates that leave out what the assistant thought in earlier turns."""


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    """A tokenizer of characters with a chat template."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|system|>"]
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    named = dict.fromkeys(("eos_token", "pad_token"), "<|end|>")
    tokenizer.add_special_tokens({**named, "additional_special_tokens": special[1:]})
    tokenizer.chat_template = CHATML
    return tokenizer


def counted_text(tokenizer: Tokenizer, section: Data, row: dict[str, Any]) -> list[str]:
    """What the loss counts of each document of a row."""
    found = make_format(section, tokenizer).encode({name: [value] for name, value in row.items()})
    assert not found.problems, found.problems
    return [
        tokenizer.decode(ids[flags.astype(bool)].tolist())
        for ids, flags in zip(found.documents, found.counted, strict=True)
    ]


TURNS = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 2, "b": 2}}]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "hm#It is 4."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "hm#Welcome"},
]


def test_only_the_assistants_turns_count(words: PreTrainedTokenizerFast) -> None:
    (counted,) = counted_text(HuggingFace(words), Data(format="chat"), {"messages": TURNS})
    call = '[{"name": "add", "arguments": {"a": 2, "b": 2}}]<|end|>'
    assert counted == f"{call}hm#It is 4.<|end|>hm#Welcome<|end|>"


def test_a_template_that_rewrites_earlier_turns_is_unrolled(words: PreTrainedTokenizerFast) -> None:
    words.chat_template = FORGETS
    try:
        tokenizer = HuggingFace(words)
        counted = counted_text(tokenizer, Data(format="chat"), {"messages": TURNS})
        found = make_format(Data(format="chat"), tokenizer).encode({"messages": [TURNS]})
    finally:
        words.chat_template = CHATML
    assert counted[1:] == ["hm#It is 4.<|end|>", "hm#Welcome<|end|>"]
    assert found.unrolled == 1
    assert "hm#It is 4." not in tokenizer.decode(found.documents[2].tolist()), "as it will be when the model is asked"


def test_bytes_have_a_template_of_their_own() -> None:
    (counted,) = counted_text(Bytes(), Data(format="chat"), {"messages": TURNS[3:]})
    assert counted == "hm#It is 4.\nhm#Welcome\n"


@pytest.mark.parametrize("template", [CHATML, None])
def test_only_the_response_counts(words: PreTrainedTokenizerFast, template: str | None) -> None:
    words.chat_template = template
    section = Data(format="instruction", prompt_column="instruction", context_column="input", response_column="output")
    row = {"instruction": "Add", "input": "1 1", "output": "2"}
    try:
        (counted,) = counted_text(HuggingFace(words), section, row)
    finally:
        words.chat_template = CHATML
    assert counted == "2<|end|>"


ASKED = [{"role": "user", "content": "2 + 2?"}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
        {"prompt": ASKED, "chosen": [{"role": "assistant", "content": "4"}],
         "rejected": [{"role": "assistant", "content": "5"}]},
        {"chosen": [*ASKED, {"role": "assistant", "content": "4"}],
         "rejected": [*ASKED, {"role": "assistant", "content": "5"}]},
    ],
)  # fmt: skip
def test_both_answers_count_however_a_pair_is_written(words: PreTrainedTokenizerFast, row: dict[str, Any]) -> None:
    assert counted_text(HuggingFace(words), Data(format="preference"), row) == ["4<|end|>", "5<|end|>"]
    whole = make_format(Data(format="preference"), HuggingFace(words)).encode({k: [v] for k, v in row.items()})
    texts = [HuggingFace(words).decode(ids.tolist()) for ids in whole.documents]
    assert texts[0].replace("4<|end|>", "") == texts[1].replace("5<|end|>", ""), "the prompt is the same"


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": None}, "rejected is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "both answers are the same"),
        ({"prompt": None, "chosen": "b", "rejected": "c"}, "no prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": ASKED}, "both must be of one kind"),
        ({"prompt": "a", "chosen": 4, "rejected": 5}, "a list of messages"),
    ],
)
def test_pairs_that_can_not_be_used_are_named_with_their_row(
    words: PreTrainedTokenizerFast, row: dict[str, Any], what: str
) -> None:
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    rows = {key: [good[key], row[key]] for key in good}
    ((number, problem),) = make_format(Data(format="preference"), HuggingFace(words)).encode(rows).problems
    assert number == 1
    assert what in problem


def test_a_prompt_without_room_for_the_answers_is_named_with_file_and_row(tmp_path: Path) -> None:
    rows = [{"prompt": "a" * length, "chosen": "yes", "rejected": "no"} for length in (3, 300)]
    with pytest.raises(BadInput, match=r"rows\.jsonl, row 2: the prompt leaves no room for both answers in 64 tokens"):
        load(tmp_path, rows, "data.format=preference", "train.objective=simpo", "data.seq_len=64")


def load(tmp_path: Path, rows: list[dict[str, Any]], *overrides: str, takes: InputSpec = TAKES) -> Dataset:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(path), "tokenizer": "bytes", "seq_len": 64, "cache": str(tmp_path / "cache")}
    mapping = {"model": {"config": {"model_type": "llama"}}, "data": data, "train": {"steps": 1}}
    return load_data(make_recipe(mapping, overrides), takes)


def test_conversations_without_an_answer_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"messages": TURNS}, {"messages": TURNS[:2]}, {"messages": []}]
    loaded = load(tmp_path, rows, "data.format=chat", "data.seq_len=256")
    assert loaded.documents == 1
    assert loaded.notes[:2] == ("1 empty documents left out", "1 without an answer to learn from, left out")


def test_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    loaded = load(tmp_path, [{"text": "some text"}, {"text": ""}, {"text": None}])
    assert (loaded.documents, loaded.notes[0]) == (1, "2 empty documents left out")


def test_long_documents_are_counted(tmp_path: Path) -> None:
    rows = [{"text": "x" * 500}, {"text": "short"}]
    assert "1 documents longer than 64 tokens split" in load(tmp_path, rows).notes
    assert "1 documents longer than 64 tokens truncated" in load(tmp_path, rows, "data.long_documents=truncate").notes
    assert load(tmp_path, rows).train.positions_used == 500 + 5
    assert load(tmp_path, rows, "data.long_documents=truncate").train.positions_used == 64 + 5


def test_names_become_classes(tmp_path: Path) -> None:
    rows = [{"text": f"a {kind}", "label": kind} for kind in ("owl", "cat", "dog", "cat")]
    batch = load(tmp_path, rows, "data.format=classification").train.batch(np.arange(4))
    assert batch.labels.tolist() == [2, 0, 1, 0]


def test_pairs_are_loaded(tmp_path: Path) -> None:
    rows = [{"prompt": "one", "response": "eins"}, {"prompt": "two", "response": ""}]
    loaded = load(tmp_path, rows, "data.format=seq2seq")
    labels = loaded.train.batch(np.array([0])).labels[0]
    assert Bytes().decode(labels[labels != IGNORE].tolist()) == "eins"
    assert loaded.notes == ("1 without an answer to learn from, left out",)


@pytest.mark.parametrize(
    ("rows", "overrides", "words"),
    [
        ([{"body": "x"}], (), "no column 'text'; it has body"),
        ([{"messages": [{"content": "x"}]}], ("data.format=chat",), "row 1: message 1 has no role"),
        ([{"messages": "hello"}], ("data.format=chat",), "row 1: str found; a list of messages"),
        ([{"messages": TURNS[:2]}], ("data.format=chat",), "make no sample; 1 without an answer"),
        ([{"text": "x", "label": 3}], ("data.format=classification",), "label 3 found; the model has 3 classes"),
        ([{"text": "x", "label": -1}], ("data.format=classification",), "label -1 found"),
        ([{"text": "x", "label": 0.5}], ("data.format=classification",), "row 1: label 0.5 is not a class"),
        ([{"text": "short"}], ("data.packing_method=stream",), "6 tokens in 1 documents make no sample"),
    ],
)  # fmt: skip
def test_rows_that_can_not_be_used(
    tmp_path: Path, rows: list[dict[str, Any]], overrides: tuple[str, ...], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        load(tmp_path, rows, *overrides)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"text": "x"}\n{"text": broken}\n')
    with pytest.raises(BadInput, match=r"broken\.jsonl, line 2 can't be read as JSON: Expecting value at column 10"):
        load(tmp_path, [], f"data.path={path}")


def test_a_tokenizer_larger_than_the_model(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="258 tokens; the model's embedding has 100 rows"):
        load(tmp_path, [{"text": "x"}], takes=InputSpec(vocab=100))


def test_a_decoder_that_can_not_find_the_last_token(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="pad_token_id: None given; the tokenizer pads with 257"):
        load(tmp_path, [{"text": "x", "label": 0}], "data.format=classification", takes=replace(TAKES, reads_last=True))


def test_mixtures_have_a_weight_each(tmp_path: Path) -> None:
    for name, letter in (("a", "a"), ("b", "b")):
        (tmp_path / f"{name}.txt").write_text(letter * 2000)
    path = f"data.path={{{tmp_path}/a.txt: 3, {tmp_path}/b.txt: 1}}"
    loaded = load(tmp_path, [], path)
    recipe = make_recipe(
        {"model": {"config": {"model_type": "llama"}}, "data": {"tokenizer": "bytes"}, "train": {"steps": 1}}
    )
    ids = loaded.order(recipe, len(loaded.train)).step(0)
    first = (loaded.train.batch(ids).inputs()["input_ids"][:, 0] == ord("a")).float().mean()
    assert first == pytest.approx(0.75, abs=0.02)


def test_documents_are_held_out_whole(tmp_path: Path) -> None:
    rows = [{"text": chr(97 + n) * 30} for n in range(20)]
    loaded = load(tmp_path, rows, "data.eval_fraction=0.2", "train.eval_every=1")
    assert loaded.held_out is not None
    letters = [
        set(samples.batch(np.arange(len(samples))).inputs()["input_ids"].flatten().tolist()) - {257}
        for samples in (loaded.train, loaded.held_out)
    ]
    assert not letters[0] & letters[1]
    assert (len(letters[0]), len(letters[1])) == (16, 4)
