"""Data formats: rows of a table to token ids, one batch of rows at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from toolkit.errors import first_line
from toolkit.recipe.sections import Data
from toolkit.runtime.corpus.token_documents import TOKEN
from toolkit.runtime.corpus.tokenizer import Message, Tokenizer

Rows = Mapping[str, Sequence[Any]]
"""Column → values."""
Segment = tuple[str, bool]
"""(text, whether the loss counts it)."""


@dataclass
class Encoded:
    """Token ids of a batch of rows."""

    documents: list[np.ndarray] = field(default_factory=list)
    counted: list[np.ndarray] = field(default_factory=list)
    """For each document, which tokens the loss counts; empty if all."""
    targets: list[np.ndarray] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    """A number for each document, if the format has any: a margin, whether an answer is good, how relevant it is."""
    groups: list[int] = field(default_factory=list)
    """Documents of each row, if rows differ."""
    empty: int = 0
    unanswered: int = 0
    unrolled: int = 0
    problems: list[tuple[int, str]] = field(default_factory=list)
    """(row, why it can't be read)."""

    def add(self, tokenizer: Tokenizer, segments: Sequence[Segment]) -> None:
        """Append a document that is made of segments."""
        ids = tokenizer.encode([text for text, _ in segments])
        flags = [np.full(len(part), counts) for part, (_, counts) in zip(ids, segments, strict=True)]
        if tokenizer.end is not None and not tokenizer.template_ends:
            ids.append(np.array([tokenizer.end]))
            flags.append(np.array([segments[-1][1] or not segments[-1][0]]))
        self.documents.append(np.concatenate(ids).astype(TOKEN))
        self.counted.append(np.concatenate(flags))


class Format(Protocol):
    """Reads rows of one data format."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Required columns."""

    def encode(self, rows: Rows) -> Encoded:
        """Token ids of a batch of rows."""


@dataclass(frozen=True)
class Text:
    """Plain documents."""

    tokenizer: Tokenizer
    column: str

    @property
    def columns(self) -> tuple[str, ...]:
        """The text column."""
        return (self.column,)

    def encode(self, rows: Rows) -> Encoded:
        texts = [str(text) for text in rows[self.column] if text]
        found = Encoded(empty=len(rows[self.column]) - len(texts), problems=text_problems(rows, self.columns))
        end = [] if self.tokenizer.end is None else [self.tokenizer.end]
        for ids in self.tokenizer.encode(texts):
            found.documents.append(np.concatenate([ids, end]).astype(TOKEN))
        return found


@dataclass(frozen=True)
class Answers:
    """Documents of which the loss counts some segments: conversations and instructions."""

    tokenizer: Tokenizer
    section: Data

    @property
    def columns(self) -> tuple[str, ...]:
        """The messages column, or the prompt, response and context columns."""
        if self.section.format == "chat":
            return (self.section.messages_column,)
        context = (self.section.context_column,) if self.section.context_column else ()
        return (self.section.prompt_column, self.section.response_column, *context)

    def encode(self, rows: Rows) -> Encoded:
        found = Encoded(problems=[] if self.section.format == "chat" else text_problems(rows, self.columns))
        for number in range(len(rows[self.columns[0]])):
            messages = self._messages({name: values[number] for name, values in rows.items()})
            problem = message_problem(messages)
            if problem:
                found.problems.append((number, problem))
            elif not messages:
                found.empty += 1
            else:
                self._add(found, number, messages, without_nulls(rows["tools"][number]) if "tools" in rows else None)
        return found

    def _messages(self, row: Mapping[str, Any]) -> Any:
        if self.section.format == "chat":
            return without_nulls(row[self.columns[0]])
        prompt, response = row[self.columns[0]], row[self.columns[1]]
        context = row[self.columns[2]] if len(self.columns) > 2 else None
        asked = "\n\n".join(str(part) for part in (prompt, context) if part)
        answer = [{"role": "assistant", "content": str(response)}] if response else []
        return [{"role": "user", "content": asked}, *answer] if asked or answer else []

    def _add(self, found: Encoded, number: int, messages: list[Any], tools: Any) -> None:
        try:
            documents, unrolled = self._documents(messages, tools)
        except Exception as error:  # templates are programs and may raise anything
            found.problems.append((number, first_line(error)))
            return
        found.unanswered += not documents
        found.unrolled += unrolled
        for segments in documents:
            found.add(self.tokenizer, segments)

    def _documents(self, messages: list[Any], tools: Any) -> tuple[list[list[Segment]], bool]:
        if self.tokenizer.has_template:
            turns = counted_turns(messages, self.section)
            return conversation(self.tokenizer, messages, tools, turns)
        if self.section.format == "chat":
            raise ValueError("the tokenizer has no chat template; use one that has, or `bytes`")
        texts = [str(message["content"]) for message in messages]
        return ([[(f"{texts[0]}\n", False), (texts[1], True)]] if len(texts) > 1 else []), False


@dataclass(frozen=True)
class Classes:
    """Texts with one class each."""

    tokenizer: Tokenizer
    section: Data
    names: tuple[str, ...] = ()
    """Names of classes, if labels are not numbers."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The text and label columns."""
        return (self.section.text_column, self.section.label_column)

    def encode(self, rows: Rows) -> Encoded:
        found, kept = Encoded(problems=text_problems(rows, self.columns[:1])), []
        for number, (text, label) in enumerate(zip(*(rows[name] for name in self.columns), strict=True)):
            place = label_number(label, self.names)
            if place is None:
                found.problems.append((number, f"label {label!r} is not a class: an integer or a name is required"))
            elif not text:
                found.empty += 1
            else:
                kept.append(str(text))
                found.labels.append(place)
        found.documents = self.tokenizer.encode_whole(kept)
        return found


@dataclass(frozen=True)
class Pairs:
    """Texts with one target text each."""

    tokenizer: Tokenizer
    section: Data

    @property
    def columns(self) -> tuple[str, ...]:
        """The prompt and response columns."""
        return (self.section.prompt_column, self.section.response_column)

    def encode(self, rows: Rows) -> Encoded:
        pairs = list(zip(*(rows[name] for name in self.columns), strict=True))
        kept = [(str(prompt), str(response)) for prompt, response in pairs if prompt and response]
        found = Encoded(unanswered=sum(1 for prompt, response in pairs if prompt and not response))
        found.problems += text_problems(rows, self.columns)
        found.empty = len(pairs) - len(kept) - found.unanswered
        found.documents = self.tokenizer.encode_whole([prompt for prompt, _ in kept])
        found.targets = self.tokenizer.encode_whole([response for _, response in kept])
        return found


@dataclass(frozen=True)
class Preferences:
    """Pairs of answers, of which one is better: two documents per row, the chosen one first."""

    tokenizer: Tokenizer
    section: Data

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of both answers; a prompt column is optional, because answers may be complete conversations."""
        return (self.section.chosen_column, self.section.rejected_column)

    def encode(self, rows: Rows) -> Encoded:
        found = Encoded()
        prompts = rows.get(self.section.prompt_column, [None] * len(rows[self.columns[0]]))
        for number, (prompt, *answers) in enumerate(zip(prompts, *(rows[name] for name in self.columns), strict=True)):
            try:
                documents = self._pair(prompt, *(without_nulls(answer) for answer in answers))
            except Exception as error:  # templates are programs and may raise anything
                found.problems.append((number, first_line(error)))
                continue
            for segments in documents:
                found.add(self.tokenizer, segments)
            if self.section.margin_column in rows:
                self._add_margin(found, number, rows[self.section.margin_column][number])
        return found

    def _add_margin(self, found: Encoded, number: int, margin: Any) -> None:
        if is_number(margin):
            found.scores += [float(margin), 0.0]
        else:
            found.problems.append((number, f"{self.section.margin_column} is {margin!r:.60}; a number is required"))

    def _pair(self, prompt: Any, chosen: Any, rejected: Any) -> list[list[Segment]]:
        """Segments of both documents: what precedes the answers, and each answer."""
        for name, answer in zip(self.columns, (chosen, rejected), strict=True):
            if not answer:
                raise ValueError(f"{name} is empty; both answers are required")
            if not isinstance(answer, str) and (problem := message_problem(answer)):
                raise ValueError(f"{name}: {problem}")
        if chosen == rejected:
            raise ValueError("both answers are the same; a pair must have a better and a worse one")
        if isinstance(chosen, str) != isinstance(rejected, str):
            raise ValueError("one answer is a text, the other one a list of messages; both must be of one kind")
        before, chosen, rejected = self._split(without_nulls(prompt), chosen, rejected)
        if not before:
            raise ValueError(f"no prompt: {self.section.prompt_column} is empty, and the answers have no common start")
        return [self._document(before, answer) for answer in (chosen, rejected)]

    def single(self, prompt: Any, answer: Any) -> list[Segment]:
        """Segments of a prompt with one answer."""
        if not answer:
            raise ValueError(f"{self.section.response_column} is empty; an answer is required")
        if not isinstance(answer, str) and (problem := message_problem(answer)):
            raise ValueError(f"{self.section.response_column}: {problem}")
        before, answer, _ = self._split(prompt, answer, answer)
        if not before:
            raise ValueError(f"{self.section.prompt_column} is empty; a prompt is required")
        return self._document(before, answer)

    def _split(self, prompt: Any, chosen: Any, rejected: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """(messages before the answers, messages of the chosen answer, of the rejected one)."""
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) and prompt else list(prompt or [])
        if problem := message_problem(before):
            raise ValueError(f"{self.section.prompt_column}: {problem}")
        if isinstance(chosen, str):
            return before, [{"role": "assistant", "content": chosen}], [{"role": "assistant", "content": rejected}]
        shared = 0
        while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
            shared += 1
        return [*before, *chosen[:shared]], chosen[shared:], rejected[shared:]

    def _document(self, before: list[Any], answer: list[Any]) -> list[Segment]:
        if not self.tokenizer.has_template:
            if any(len(messages) > 1 for messages in (before, answer)):
                raise ValueError("conversations need a tokenizer with a chat template; use one that has, or `bytes`")
            return [(f"{before[0]['content']}\n", False), (str(answer[0]["content"]), True)]
        text = self.tokenizer.render([*before, *answer], None, prompt=False)
        for prompt in (True, False):
            start = self.tokenizer.render(before, None, prompt=prompt)
            if text.startswith(start):
                return [(start, False), (text[len(start) :], True)]
        raise ValueError("the chat template does not render a beginning of a conversation as a beginning of its text")


def text_problems(rows: Rows, columns: Sequence[str]) -> list[tuple[int, str]]:
    """Rows whose text is something else, such as a number: trained on as its digits, it would hide a wrong column."""
    return [
        (number, f"{name} is {value!r:.60} ({type(value).__name__}); text is required, in quotes")
        for name in columns
        for number, value in enumerate(rows[name])
        if value is not None and not isinstance(value, str)
    ]


def is_number(value: Any) -> bool:
    """Whether a value of a table is a finite number."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and bool(np.isfinite(value))


def label_number(label: Any, names: Sequence[str]) -> int | None:
    """A label as a number; None if it is not a class."""
    if names:
        return names.index(str(label)) if str(label) in names else None
    return int(label) if isinstance(label, int | np.integer) else None


def message_problem(messages: Any) -> str:
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        return f"{type(messages).__name__} found; a list of messages with role and content is required"
    for place, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            return f"message {place + 1} has no role; user, assistant, system or tool is required"
        if message.get("content") is None and not message.get("tool_calls"):
            return f"message {place + 1} has neither content nor tool calls"
    return ""


def without_nulls(value: Any) -> Any:
    """Remove null values: tables fill keys that a row lacks with null, and templates must not see them."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list | tuple) else value


def counted_turns(messages: Sequence[Message], section: Data) -> list[int]:
    """Places of the messages that the loss counts."""
    turns = [place for place, message in enumerate(messages) if message.get("role") in section.roles]
    return turns[-1:] if section.train_on == "last_turn" else turns


def conversation(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Any] | None, turns: Sequence[int]
) -> tuple[list[list[Segment]], bool]:
    """(documents of a conversation as lists of segments, whether it was unrolled). `turns` are counted.

    One document if the template renders every beginning of the conversation as a beginning of the full text. Some
    templates rewrite earlier turns (they drop the assistant's reasoning). Then each counted turn becomes a document
    of its own, exactly as the model will see it at inference.
    """
    if not turns:
        return [], False
    cuts = [_cut(tokenizer, messages[: place + 1], tools) for place in turns]
    whole = tokenizer.render(messages, tools, prompt=False)
    if all(whole.startswith(before + answer) for before, answer in cuts):
        return [_segments(whole, cuts)], False
    return [[(before, False), (answer, True)] for before, answer in cuts], True


def _cut(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[str, str]:
    """(text before the last message, text of the last message, which is an answer)."""
    text = tokenizer.render(messages, tools, prompt=False)
    before = tokenizer.render(messages[:-1], tools, prompt=True)
    if not text.startswith(before):  # the generation prompt adds text that finished turns lack, such as a reasoning tag
        before = tokenizer.render(messages[:-1], tools, prompt=False)
    if not text.startswith(before):
        raise ValueError("the chat template does not render a beginning of a conversation as a beginning of its text")
    return before, text[len(before) :]


def _segments(whole: str, cuts: Sequence[tuple[str, str]]) -> list[Segment]:
    segments, done = [], 0
    for before, answer in cuts:
        end = len(before) + len(answer)
        segments += [(whole[done : len(before)], False), (whole[len(before) : end], True)]
        done = end
    return [*segments, (whole[done:], False)]
