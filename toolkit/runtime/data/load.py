"""From a recipe's data section to samples: read, tokenise or look up in the cache, hold out, pack."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from toolkit.errors import BadInput
from toolkit.recipe.data_checks import PACKED_FORMATS, is_packed, source_weights, texts_per_sample
from toolkit.recipe.model_section import Model
from toolkit.recipe.objective_sections import SCORED, Objective
from toolkit.recipe.sections import Data, Recipe, Train
from toolkit.runtime.corpus.formats import lacks_prompt
from toolkit.runtime.corpus.grouped_formats import make_format
from toolkit.runtime.corpus.token_cache import TokenCache, find_or_make
from toolkit.runtime.corpus.token_documents import Documents
from toolkit.runtime.corpus.tokenizer import Bytes, Tokenizer, load_tokenizer
from toolkit.runtime.data.dataset import Dataset, check_labels, mixed, split
from toolkit.runtime.data.groups import GroupRows, mismatched
from toolkit.runtime.data.images import read_images
from toolkit.runtime.data.input_spec import InputSpec
from toolkit.runtime.data.packing import BestFit, Pieces, check_isolated, cut, why_not_shared
from toolkit.runtime.data.pairs import PairRows
from toolkit.runtime.data.prefetch import AHEAD
from toolkit.runtime.data.samples import Labelled, Padded, Samples, Stream, Synthetic
from toolkit.runtime.data.streaming import Streamed, windows
from toolkit.runtime.distributed.rank_zero_first import OncePerHost, SingleProcess


def load_data(
    recipe: Recipe, spec: InputSpec, once_per_host: OncePerHost | None = None, terminal: IO[str] | None = None
) -> Dataset:
    """Load the recipe's data; `BadInput` if there is none, or if it does not fit the model."""
    section = recipe.data
    if section.format == "image-classification":
        return _images(section, spec, recipe.model.path if recipe.model.init == "pretrained" else None)
    if section.path == "synthetic" and section.format == "text":
        samples = Synthetic(spec.need_vocab(), section.seq_len)
        return Dataset(train=samples, documents=len(samples), tokens=samples.positions, tokenizer=Bytes())
    objective = recipe.train.objective
    section, notes = packing_of(section, recipe.model, objective)
    tokenizer = load_recipe_tokenizer(recipe)
    loader = _Loader(section, spec, tokenizer, once_per_host or SingleProcess(), terminal, objective)
    if section.format == "preference" and objective != "reward":
        repeated = why_not_shared(recipe.model)
        loader = replace(loader, share_prompts=not repeated)
        what = f"repeated for each answer: {repeated}" if repeated else "computed once for both answers"
        notes = (*notes, f"prompts of pairs are {what}")
    loaded = loader.stream(recipe.train) if section.streaming else loader.load()
    return replace(loaded, notes=(*notes, *loaded.notes))


def packing_of(section: Data, model: Model, objective: Objective | None = None) -> tuple[Data, tuple[str, ...]]:
    """(section with a packing method that works for the model, remarks for the user)."""
    if not is_packed(section, objective) or section.packing_method == "stream":
        return section, ()
    try:
        check_isolated(model)
    except BadInput as error:
        if section.packing_method == "best_fit" or section.format != "text":
            raise
        why = error.problems[0].what.partition(";")[0]
        return replace(section, packing_method="stream"), (f"packed as one stream: {why}",)
    return replace(section, packing_method="best_fit"), ()


def _identity(section: Data, weights: Mapping[str, float]) -> dict[str, Any]:
    """Settings that the numbering of a stream's sequences depends on, besides the seed and the rows."""
    keys = ("format", "seq_len", "packing_method", "long_documents")
    shares = ", ".join(f"{weight:g}" for weight in weights.values())
    return {"path": f"sources with weights {shares}", **{key: getattr(section, key) for key in keys}}


def _images(section: Data, spec: InputSpec, model_path: str | None) -> Dataset:
    found = []
    for source in source_weights(section.path):
        images = read_images(section, source, spec, model_path)
        check_labels(images.labels, spec.need_labels(), source)
        found.append(images)
    if section.eval_path is not None:
        trains = [images.take(np.arange(len(images))[: section.max_samples]) for images in found]
        held_out = [read_images(section, section.eval_path, spec, model_path)]
    else:
        splits = [(images, *split(len(images), section.eval_fraction)) for images in found]
        trains = [images.take(numbers[: section.max_samples]) for images, numbers, _ in splits]
        held_out = [images.take(numbers) for images, _, numbers in splits if len(numbers)]
    return Dataset(
        train=mixed(trains, list(source_weights(section.path).values())),
        held_out=mixed(held_out, [1.0] * len(held_out)) if held_out else None,
        documents=sum(len(images) for images in found),
        tokens=sum(images.positions for images in found),
    )


def load_recipe_tokenizer(recipe: Recipe) -> Tokenizer:
    """The tokenizer of the recipe's data."""
    name = recipe.data.tokenizer or ("bytes" if recipe.data.path == "synthetic" and not recipe.model.path else None)
    return load_tokenizer(name, recipe.model.path, trust_remote_code=recipe.model.trust_remote_code)


@dataclass(frozen=True)
class _Loader:
    section: Data
    spec: InputSpec
    tokenizer: Tokenizer
    once_per_host: OncePerHost
    terminal: IO[str] | None
    objective: Objective | None = None
    share_prompts: bool = False
    """Whether both answers of a pair continue one prompt."""

    def load(self) -> Dataset:
        self._check_tokenizer()
        found = {source: self._documents(source) for source in source_weights(self.section.path)}
        fraction = self.section.eval_fraction
        splits = [(documents, *split(self._num_samples(documents), fraction)) for documents in found.values()]
        most = self.section.max_samples
        trains = [self._samples(documents, numbers[:most]) for documents, numbers, _ in splits]
        self._check_enough(found, trains)
        return Dataset(
            train=mixed(trains, list(source_weights(self.section.path).values())),
            held_out=self._held_out(splits),
            documents=sum(len(documents) for documents in found.values()),
            tokens=sum(len(documents.tokens) for documents in found.values()),
            notes=tuple(self._notes(found, trains)),
            tokenizer=self.tokenizer,
        )

    def stream(self, train: Train) -> Dataset:
        """Samples that are read during training; the figures are those of the first window."""
        self._check_tokenizer()
        reader = make_format(self.section, self.tokenizer)
        weights = source_weights(self.section.path)
        found = windows(self.section, weights, reader, train.seed)
        start, first = next(found)
        streamed = Streamed(
            open=lambda start: windows(self.section, weights, reader, train.seed, start),
            make=lambda documents: self._samples(documents, np.arange(len(documents))),
            seq_len=self.section.seq_len,
            keep=(AHEAD + 2) * train.global_batch,
            identity=_identity(self.section, weights),
            windows=itertools.chain([(start, first)], found),
        )
        return Dataset(
            train=streamed,
            held_out=self._held_out([]),
            documents=len(first),
            tokens=len(first.tokens),
            notes=(f"streamed: figures are of the first {len(first):,} documents",),
            tokenizer=self.tokenizer,
        )

    def _check_tokenizer(self) -> None:
        if self.tokenizer.vocab > self.spec.need_vocab():
            what = f"{self.tokenizer.vocab} tokens; the model's embedding has {self.spec.vocab} rows"
            raise BadInput("data.tokenizer", f"{what}; use a model and a tokenizer that match")
        if self.spec.reads_last and self.spec.pad != self._pad:
            what = f"{self.spec.pad} given; the tokenizer pads with {self.tokenizer.pad}"
            raise BadInput(
                "model.config.pad_token_id",
                f"{what}, by which the model finds a text's last token",
            )

    def _documents(self, source: str) -> Documents:
        root = Path(self.section.cache).expanduser()
        cache = TokenCache(root, self.section.workers or os.cpu_count() or 1, self.terminal)
        documents = find_or_make(cache, self.section, source, self.tokenizer, self.once_per_host)
        self._check_labels(documents, source)
        if self.section.format == "preference":
            return self._compared(documents, source)
        return documents

    def _compared(self, documents: Documents, source: str) -> Documents:
        """Pairs of documents for the objective; `BadInput` if the source has labels where it needs pairs."""
        if self.objective == "kto":
            return mismatched(documents)
        unpaired = documents.scores is not None and len(documents) == documents.counts.rows
        if unpaired:
            columns = f"{self.section.chosen_column} and {self.section.rejected_column}"
            what = f"{source} has answers with a label; {self.objective} needs pairs, in the columns {columns}"
            raise BadInput("train.objective", f"{what}; use kto, or other data")
        return documents if self.objective == "reward" else replace(documents, scores=None)

    def _check_labels(self, documents: Documents, source: str) -> None:
        if documents.labels is None or not len(documents):
            return
        check_labels(documents.labels, self.spec.need_labels(), source)

    def _held_out(self, splits: Sequence[tuple[Documents, np.ndarray, np.ndarray]]) -> Samples | None:
        if self.section.eval_path is not None:
            documents = self._documents(self.section.eval_path)
            samples = self._samples(documents, np.arange(self._num_samples(documents)), self.section.eval_path)
            if not len(samples):
                raise BadInput("data.eval_path", f"{self.section.eval_path}: no sample in {len(documents)} documents")
            return samples
        if not self.section.eval_fraction:
            return None
        held_out = [self._samples(documents, numbers) for documents, _, numbers in splits]
        found = [samples for samples in held_out if len(samples)]
        if not found:
            raise BadInput("data.eval_fraction", "the held-out documents make no sample; increase it")
        return mixed(found, [1.0] * len(found))

    def _num_samples(self, documents: Documents) -> int:
        """Documents, or groups of them."""
        if documents.groups is not None:
            return len(documents.groups)
        return len(documents) // (2 if self.section.format == "preference" else self._texts)

    @property
    def _pad(self) -> int:
        """Padding id: by it a model with a head for scores finds a text's last token."""
        own = self.spec.pad if self.objective in SCORED and self.spec.reads_last else None
        return self.tokenizer.pad if own is None else own

    @property
    def _texts(self) -> int:
        return texts_per_sample(self.section, self.objective)

    def _samples(self, documents: Documents, numbers: np.ndarray, source: str | None = None) -> Samples:
        section, pad = self.section, self._pad
        if self._texts > 1:
            groups = GroupRows.of(documents, numbers, self._texts, section.seq_len, pad)
            return groups.with_keys() if self.objective == "contrastive" else groups
        if section.format == "preference":
            share, where = self.share_prompts, source or str(section.path)
            return PairRows.pack(documents, numbers, section.seq_len, pad, where, share=share)
        if section.format not in PACKED_FORMATS:
            start = self.spec.need_start() if section.format == "seq2seq" else 0
            return Labelled(documents.take(numbers), section.seq_len, pad, start)
        if not section.packing:
            pieces = cut(documents, numbers, section.seq_len, "truncate")
            return Padded(documents, pieces.starts, pieces.lengths, section.seq_len, pad)
        if section.packing_method == "stream":
            whole = documents if len(numbers) == len(documents) else documents.take(numbers)
            return Stream(whole.tokens, section.seq_len)
        return BestFit.pack(documents, self._cut(documents, numbers), section.seq_len, pad)

    def _cut(self, documents: Documents, numbers: np.ndarray) -> Pieces:
        return cut(documents, numbers, self.section.seq_len, self.section.long_documents)

    def _check_enough(self, found: dict[str, Documents], trains: Sequence[Samples]) -> None:
        for (source, documents), samples in zip(found.items(), trains, strict=True):
            if not len(samples):
                what = f"{len(documents.tokens)} tokens in {len(documents)} documents"
                needed = f"; one sequence needs {self.section.seq_len + 1}" if isinstance(samples, Stream) else ""
                notes = "".join(f"; {note}" for note in documents.counts.notes())
                raise BadInput("data.path", f"{source}: {what} make no sample{needed}{notes}")

    def _notes(self, found: dict[str, Documents], trains: Sequence[Samples]) -> list[str]:
        notes = [note for documents in found.values() for note in documents.counts.notes()]
        long = sum(self._num_long(documents) for documents in found.values())
        if long and not (self.section.packing_method == "stream" and self.section.packing):
            split = self.section.packing and self.section.long_documents == "split"
            can_split = split and is_packed(self.section, self.objective)
            how = "split" if can_split else "truncated"
            notes.append(f"{long:,} documents longer than {self.section.seq_len} tokens {how}")
        if self.section.format in ("instruction", "chat", "preference") and lacks_prompt(self.tokenizer):
            notes.append("the chat template has no generation prompt: nothing tells the model at inference to answer")
        return notes

    def _num_long(self, documents: Documents) -> int:
        spare = 1 if self.section.format in PACKED_FORMATS else 0
        return int((documents.lengths > self.section.seq_len + spare).sum())
