"""Packing: full sequences, every token predicted once, and documents that do not see each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import BadInput
from toolkit.models import tiny_sizes
from toolkit.recipe.model_section import Model
from toolkit.recipe.sections import Data
from toolkit.runtime.corpus.token_documents import Documents, from_lists
from toolkit.runtime.data.load import packing_of
from toolkit.runtime.data.packing import BestFit, best_fit, check_isolated, cut
from toolkit.runtime.models.build import build_model
from toolkit.runtime.models.micro_batch import IGNORE
from toolkit.runtime.models.tiny_models import tiny_of_type


def lognormal_lengths() -> np.ndarray:
    """10,000 documents with a median of 350 tokens and sigma 1."""
    return np.maximum(2, np.random.default_rng(0).lognormal(np.log(350), 1.0, 10_000)).astype(np.int64)


def pack(documents: Documents, seq_len: int, long: str = "split") -> BestFit:
    pieces = cut(documents, np.arange(len(documents)), seq_len, long)  # type: ignore[arg-type]
    return BestFit.pack(documents, pieces, seq_len, pad=0)


def test_nearly_every_position_is_useful() -> None:
    lengths = lognormal_lengths()
    documents = Documents(np.zeros(lengths.sum(), np.int32), np.concatenate([[0], np.cumsum(lengths)]))
    packed = pack(documents, 2048)
    assert packed.positions_used == (lengths - 1).sum(), "every token but a document's first is predicted"
    assert packed.positions_used / packed.positions >= 0.99


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 16), min_size=1, max_size=60))
def test_no_sequence_overflows_and_no_better_place_was_left(lengths: list[int]) -> None:
    places = best_fit(np.array(lengths), 16)
    used = np.bincount(places, weights=np.array(lengths))
    assert used.max() <= 16
    assert len(used) <= np.ceil(11 / 9 * np.ceil(sum(lengths) / 16) + 6 / 9), "the bound of best fit, longest first"
    assert sum(1 for room in used if room <= 8) <= 1, "two halves would have shared a sequence"


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), seed=st.integers(0, 99))
def test_every_token_is_predicted_once_from_its_own_document(lengths: list[int], seed: int) -> None:
    """Tokens are numbered through, so that a label tells which token it is."""
    lengths = [*lengths, 2]  # a document of one token alone makes no sequence
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    documents = Documents(np.arange(1, bounds[-1] + 1, dtype=np.int32), bounds)
    packed = pack(documents, 8)
    batch = packed.batch(np.random.default_rng(seed).permutation(len(packed)))
    inputs = batch.inputs()
    counts = batch.labels != IGNORE
    assert torch.equal(batch.labels[counts], inputs["input_ids"][counts] + 1)
    firsts = set((bounds[:-1] + 1).tolist())
    assert sorted(batch.labels[counts].tolist()) == sorted(set(range(1, int(bounds[-1]) + 1)) - firsts)
    positions = inputs["position_ids"]
    assert positions.min() == 0
    steps = positions[:, 1:] - positions[:, :-1]
    assert ((steps == 1) | (positions[:, 1:] == 0)).all()


def test_long_documents_are_split_or_truncated() -> None:
    documents = from_lists([np.arange(1, 22), np.arange(30, 33)])
    split, truncated = pack(documents, 8), pack(documents, 8, "truncate")
    assert (split.positions_used, truncated.positions_used) == (22, 10)
    assert (split.pieces.long_documents, truncated.pieces.lost_tokens) == (1, 12)


def test_what_does_not_count_is_not_a_label_and_useless_pieces_go() -> None:
    counted = np.array([0, 0, 0, 0, 0, 1, 1, 0, 0, 0], dtype=np.uint8)
    documents = Documents(np.arange(10, dtype=np.int32), np.array([0, 10]), counted)
    packed = pack(documents, 3)
    batch = packed.batch(np.arange(len(packed)))
    assert sorted(batch.labels[batch.labels != IGNORE].tolist()) == [5, 6]
    assert len(packed) == 1, "the pieces before and after hold nothing to learn"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "mixtral"])
def test_packed_documents_give_the_logits_of_each_alone(kind: str, attention: str) -> None:
    section = Model(config=tiny_of_type(kind), init="scratch", precision="fp32", attention=attention)  # type: ignore[arg-type]
    model = build_model(section, seed=0).eval()
    documents = from_lists([np.arange(3, 20), np.arange(40, 50), np.arange(60, 65)])
    packed = pack(documents, 32)
    batch = packed.batch(np.arange(len(packed)))
    with torch.no_grad():
        logits = model(**batch.inputs()).logits
        for number in range(len(documents)):
            ids = torch.from_numpy(documents.document(number)[:-1].astype(np.int64))
            alone = model(input_ids=ids[None], use_cache=False).logits[0]
            row, column = next(
                (r, c)
                for r, ids_of_row in enumerate(batch.inputs()["input_ids"].tolist())
                for c in range(32)
                if ids_of_row[c : c + len(ids)] == ids.tolist()
            )
            torch.testing.assert_close(logits[row, column : column + len(ids)], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["mpt", "mamba"])
def test_models_that_would_mix_documents_are_refused(kind: str) -> None:
    with pytest.raises(BadInput, match=f"{kind} mixes them .*use packing: false, or, with data.format text, packing_m"):
        check_isolated(Model(config=tiny_of_type(kind), init="scratch", precision="fp32"))


def test_a_twin_that_does_not_run_says_nothing_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-J's rotary width is a size too: a twin with the whole model's would not run."""
    gptj = Model(config={"model_type": "gptj"}, init="scratch", precision="fp32")
    check_isolated(gptj)
    monkeypatch.setitem(tiny_sizes._SIZES, "rotary_dim", 64)
    with pytest.raises(BadInput, match=r"that can't be tested: a tiny gptj model does not run \(The size of tensor"):
        check_isolated(gptj)


def test_by_itself_text_of_such_models_becomes_a_stream_and_it_is_said() -> None:
    mpt = Model(config=tiny_of_type("mpt"), init="scratch", precision="fp32")
    section, notes = packing_of(Data(), mpt)
    assert section.packing_method == "stream"
    assert "packed as one stream: best_fit keeps documents apart, and mpt mixes them" in notes[0]
    for strict in (Data(packing_method="best_fit"), Data(format="chat")):
        with pytest.raises(BadInput):
            packing_of(strict, mpt)
    llama = Model(config=tiny_of_type("llama"), init="scratch", precision="fp32")
    assert packing_of(Data(), llama) == (Data(packing_method="best_fit"), ())


def test_models_that_keep_documents_apart_are_not() -> None:
    for kind in ("llama", "gemma3_text", "deepseek_v3", "opt"):
        check_isolated(Model(config=tiny_of_type(kind), init="scratch", precision="fp32"))
