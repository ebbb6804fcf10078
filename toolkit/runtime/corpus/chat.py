"""Conversations: which part of the rendered text is the assistant's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.runtime.corpus.tokenizer import Message, Tokenizer

Segment = tuple[str, bool]
"""Text, and whether the loss counts it."""


def conversation(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Any] | None
) -> tuple[list[list[Segment]], bool]:
    """A conversation as documents, each a list of segments; and whether it had to be unrolled.

    One document, if the template renders a beginning of the conversation as the beginning of the whole. Some rewrite
    earlier turns (they drop what the assistant thought): then each turn of the assistant is a document of its own,
    exactly as it will be when the model is asked.
    """
    turns = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns:
        return [], False
    cuts = [_cut(tokenizer, messages[: place + 1], tools) for place in turns]
    whole = tokenizer.render(messages, tools, prompt=False)
    if all(whole.startswith(before + answer) for before, answer in cuts):
        return [_segments(whole, cuts)], False
    return [[(before, False), (answer, True)] for before, answer in cuts], True


def _cut(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[str, str]:
    """What stands before the last message, an answer, and the answer."""
    text = tokenizer.render(messages, tools, prompt=False)
    before = tokenizer.render(messages[:-1], tools, prompt=True)
    if not text.startswith(before):  # the prompt opens what finished turns do not show, e.g. a place to think
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
