"""Formats whose rows are groups of documents, or answers with a label; and the table of all formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.errors import BadInput, first_line
from toolkit.recipe.sections import Data
from toolkit.runtime.corpus.formats import (
    Answers,
    Classes,
    Encoded,
    Format,
    Pairs,
    Preferences,
    Rows,
    Text,
    is_number,
    without_nulls,
)
from toolkit.runtime.corpus.token_documents import TOKEN
from toolkit.runtime.corpus.tokenizer import ItemIds, Tokenizer


@dataclass(frozen=True)
class LabelledAnswers:
    """Answers that are good or bad: one document per row, with the score 1 or 0."""

    tokenizer: Tokenizer
    section: Data

    @property
    def columns(self) -> tuple[str, ...]:
        """The prompt, response and label columns."""
        return (self.section.prompt_column, self.section.response_column, self.section.label_column)

    def encode(self, rows: Rows) -> Encoded:
        found = Encoded()
        documents = Preferences(self.tokenizer, self.section)
        for number, (prompt, answer, label) in enumerate(zip(*(rows[name] for name in self.columns), strict=True)):
            try:
                segments = documents.single(*(without_nulls(each) for each in (prompt, answer)))
                good = self._is_good(label)
            except Exception as error:  # templates are programs and may raise anything
                found.problems.append((number, first_line(error)))
                continue
            found.add(self.tokenizer, segments)
            found.scores.append(good)
        return found

    def _is_good(self, label: Any) -> float:
        if isinstance(label, bool | np.bool_) or (is_number(label) and label in (0, 1)):
            return float(label)
        raise ValueError(f"{self.section.label_column} is {label!r:.60}; true or false is required")


@dataclass(frozen=True)
class QueryPairs:
    """A query, what is to be found for it, and hard negatives: as many documents per row as the recipe asks for."""

    tokenizer: Tokenizer
    section: Data

    @property
    def columns(self) -> tuple[str, ...]:
        """The query and positive columns, and that of the negatives if they are used."""
        section = self.section
        return (section.query_column, section.positive_column, *([section.negatives_column] * (section.negatives > 0)))

    def encode(self, rows: Rows) -> Encoded:
        found = Encoded()
        for number, (query, positive, *more) in enumerate(zip(*(rows[name] for name in self.columns), strict=True)):
            try:
                texts = [query, positive, *self._negatives(more[0] if more else [])]
                documents = [
                    encoded(self.tokenizer, text, name) for text, name in zip(texts, self._names(), strict=True)
                ]
                if any(np.array_equal(documents[1], other) for other in documents[2:]):
                    raise ValueError(f"{self.section.negatives_column} has the positive itself; remove it")
            except ValueError as error:
                found.problems.append((number, str(error)))
                continue
            found.documents += documents
        return found

    def _names(self) -> list[str]:
        section = self.section
        return [section.query_column, section.positive_column, *([section.negatives_column] * section.negatives)]

    def _negatives(self, given: Any) -> list[Any]:
        count, name = self.section.negatives, self.section.negatives_column
        if not isinstance(given, list | tuple) or len(given) < count:
            size = f"{len(given)} given" if isinstance(given, list | tuple) else f"{given!r:.40} given"
            raise ValueError(f"{name}: {size}; a list of at least {count} is required (data.negatives)")
        return list(given[:count])


@dataclass(frozen=True)
class Ranked:
    """Candidates of a query with their relevance: one document per candidate, query and candidate together."""

    tokenizer: Tokenizer
    section: Data

    @property
    def columns(self) -> tuple[str, ...]:
        """The query, candidates and scores columns."""
        return (self.section.query_column, self.section.candidates_column, self.section.scores_column)

    def encode(self, rows: Rows) -> Encoded:
        found = Encoded()
        for number, (query, candidates, scores) in enumerate(zip(*(rows[name] for name in self.columns), strict=True)):
            if problem := self._problem(query, candidates, scores):
                found.problems.append((number, problem))
                continue
            found.documents += self.tokenizer.encode_pairs([(query, candidate) for candidate in candidates])
            found.scores += [float(score) for score in scores]
            found.groups.append(len(candidates))
        return found

    def _problem(self, query: Any, candidates: Any, scores: Any) -> str:
        """Why a row can't be used; empty if it can."""
        section = self.section
        if not isinstance(query, str) or not query:
            return f"{section.query_column} is {query!r:.60}; a text is required"
        for name, values in ((section.candidates_column, candidates), (section.scores_column, scores)):
            if not isinstance(values, list | tuple):
                return f"{name} is {values!r:.60}; a list is required"
        if not all(isinstance(text, str) and text for text in candidates):
            return f"{section.candidates_column} has an entry that is not a text"
        if len(candidates) != len(scores):
            return f"{len(candidates)} candidates and {len(scores)} scores; one score per candidate is required"
        if not 2 <= len(candidates) <= section.candidates:
            return f"{len(candidates)} candidates; 2 to {section.candidates} are required (data.candidates)"
        if not all(is_number(score) and score >= 0 for score in scores):
            return f"{section.scores_column} has a value that is not a number of at least 0"
        if not any(score > 0 for score in scores):
            return f"{section.scores_column} has no relevant candidate: one score must be above 0"
        return ""


def encoded(tokenizer: Tokenizer, value: Any, name: str) -> np.ndarray:
    """Token ids of a text, or the item ids of a list; `ValueError` if it is neither."""
    if isinstance(tokenizer, ItemIds):
        items = [value] if isinstance(value, int) and not isinstance(value, bool) else value
        if not isinstance(items, list | tuple) or not items or not all(isinstance(item, int) for item in items):
            raise ValueError(f"{name} is {value!r:.60}; an item id or a list of them is required")
        wrong = [item for item in items if not 0 <= item < tokenizer.items]
        if wrong:
            raise ValueError(f"{name} has the item {wrong[0]}; ids from 0 to {tokenizer.items - 1} are required")
        return np.asarray(items, TOKEN)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {value!r:.60}; a text is required")
    return tokenizer.encode_whole([value])[0]


def make_format(section: Data, tokenizer: Tokenizer, names: tuple[str, ...] = (), given: Sequence[str] = ()) -> Format:
    """The reader of the recipe's format; `given`: columns of the data, if they are known."""
    if section.format == "text":
        return Text(tokenizer, section.text_column)
    if section.format in ("instruction", "chat"):
        return Answers(tokenizer, section)
    if section.format == "preference":
        labelled = LabelledAnswers(tokenizer, section)
        unpaired = section.chosen_column not in given and section.label_column in given
        return labelled if unpaired else Preferences(tokenizer, section)
    if section.format == "pairs":
        return QueryPairs(tokenizer, section)
    if section.format == "ranking":
        return Ranked(tokenizer, section)
    if section.format == "classification":
        return Classes(tokenizer, section, names)
    if section.format == "seq2seq":
        return Pairs(tokenizer, section)
    raise BadInput("data.format", f"{section.format} is not a text format")


def optional_columns(section: Data) -> tuple[str, ...]:
    """Columns that a format reads if the data has them."""
    found = {"chat": ("tools",), "preference": (section.prompt_column, section.margin_column)}
    return found.get(section.format, ())


def key_columns(section: Data) -> tuple[str | int | None, ...]:
    """Settings of the data section that decide which columns are read, and how much of them."""
    if section.format == "preference":
        return (section.prompt_column, section.chosen_column, section.rejected_column, section.response_column,
                section.label_column, section.margin_column)  # fmt: skip
    if section.format == "pairs":
        return (section.query_column, section.positive_column, section.negatives_column, section.negatives)
    if section.format == "ranking":
        return (section.query_column, section.candidates_column, section.scores_column, section.candidates)
    usual = (section.text_column, section.messages_column, section.prompt_column, section.response_column,
             section.context_column, section.label_column)  # fmt: skip
    if (section.train_on, section.roles) != ("all", ("assistant",)):
        return (*usual, section.train_on, *section.roles)
    return usual
