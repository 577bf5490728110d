"""Turn a row, in whatever form it comes, into preference pairs.

Invariant: the form is judged row by row, and a row either becomes pairs or is a ``DataError`` that names its place;
``margin``, ``weight`` and ``label`` stay with the pair they came with.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rm_train.config import Columns
from rm_train.human_assistant import is_human_assistant, parse_human_assistant
from rm_train.row_reader import Content, Message, RowReader, content_of, finite, list_of, refuse_tools
from rm_train.rows import Row


@dataclass(frozen=True, slots=True)
class Pair:
    """One answer preferred over another. Texts are ``str``; conversations are tuples of messages."""

    prompt: Content | None
    """What was asked; None when the answers are whole texts or conversations with nothing in common."""
    chosen: Content
    rejected: Content
    margin: float | None = None
    """By how much the chosen answer is better, on the data's own scale; None when the data does not say."""
    weight: float = 1.0
    """Weight in the loss; of a K-wise row, the row's own times ``row_part``."""
    label: float | None = None
    """Share of annotators that prefer ``chosen``; None means all."""
    turned: bool = False
    """The row names the two the other way round: its label says that fewer than half prefer what it calls chosen."""
    category: str | None = None
    source: str | None = None
    id: str | None = None
    where: str = ""
    """``file:line`` it came from."""
    row_part: float = 1.0
    """What the pair counts in an accuracy: 1/number of pairs for each pair of a K-wise row, whatever the row weighs."""


def row_to_pairs(row: Row, columns: Columns | None = None, source: str | None = None) -> list[Pair]:
    """Read one row.

    ``columns`` maps our names to the row's; a name mapped to None is ignored. ``source`` is used where the row names
    none. A K-wise row gives all its pairs of different rank, each weighing 1/number of pairs (none when all are tied).
    A row whose label is below one half becomes the pair the other way round: what is called chosen is preferred. Raises
    DataError.
    """
    reader = RowReader(row, columns or {})
    refuse_tools(reader)
    if reader.has("completions"):
        return list(_kwise(reader, source))
    prompt, (chosen, rejected) = _contents(
        reader, [("chosen", reader.need("chosen")), ("rejected", reader.need("rejected"))]
    )
    margin, label = reader.number("margin"), reader.number("label", 0.0, 1.0)
    turned = label is not None and label < 0.5
    if label is not None and turned:
        # the same loss; accuracies and baselines ask whether chosen wins
        chosen, rejected, label, margin = rejected, chosen, 1.0 - label, None if margin is None else -margin
    labels = _labels(reader, source)
    return [Pair(prompt, chosen, rejected, margin, _weight(reader), label, turned=turned, **labels)]


def _weight(reader: RowReader) -> float:
    weight = reader.number("weight", 0.0)
    return 1.0 if weight is None else weight


def _labels(reader: RowReader, source: str | None) -> dict[str, Any]:
    return {
        "category": reader.text("category"),
        "source": reader.text("source") or source,
        "id": reader.text("id"),
        "where": reader.where,
    }


def _kwise(reader: RowReader, source: str | None) -> Iterator[Pair]:
    completions = list_of(reader, "completions")
    for name in ("chosen", "rejected"):
        if reader.has(name):
            raise reader.error(name, "stands beside completions; a row is either a pair or K-wise")
    if len(completions) < 2:
        raise reader.error("completions", f"must hold at least two answers, not {len(completions)}")
    if reader.has("ranks") == reader.has("scores"):
        raise reader.error("completions", "needs exactly one of ranks (1 is best) and scores (higher is better)")
    by = "scores" if reader.has("scores") else "ranks"
    values = [finite(reader, by, value, -math.inf, math.inf) for value in list_of(reader, by)]
    if len(values) != len(completions):
        raise reader.error(by, f"has {len(values)} values for {len(completions)} completions")
    for name in ("margin", "label"):
        if reader.number(name) is not None:
            raise reader.error(name, f"has no meaning in a K-wise row; map it away by columns: {{{name}: null}}")
    prompt, answers = _contents(reader, [(f"completions[{i}]", value) for i, value in enumerate(completions)])
    quality = values if by == "scores" else [-value for value in values]
    ordered = [(i, j) for i in range(len(answers)) for j in range(len(answers)) if quality[i] > quality[j]]
    labels = _labels(reader, source)
    for i, j in ordered:
        yield Pair(
            prompt,
            answers[i],
            answers[j],
            margin=quality[i] - quality[j] if by == "scores" else None,
            weight=_weight(reader) / len(ordered),
            row_part=1 / len(ordered),
            **{**labels, "id": f"{labels['id']}:{i}>{j}" if labels["id"] else None},
        )


# ------------------------------------------------------------------ prompt and answers


def _contents(reader: RowReader, named: Sequence[tuple[str, Any]]) -> tuple[Content | None, list[Content]]:
    """Read prompt and answers, all answers in one form: text, or messages that follow the prompt."""
    answers = [content_of(reader, name, value) for name, value in named]
    texts = [answer for answer in answers if isinstance(answer, str)]
    talks = [answer for answer in answers if not isinstance(answer, str)]
    if texts and talks:
        other = next(name for (name, _), a in zip(named, answers, strict=True) if type(a) is not type(answers[0]))
        raise reader.error(named[0][0], f"is {_form(answers[0])}, but {other} is not; one row must have one form")
    raw_prompt = reader.get("prompt")
    prompt = None if raw_prompt is None else content_of(reader, "prompt", raw_prompt, may_be_empty=True)
    if texts:
        return _around_texts(reader, prompt, texts, named)
    if prompt is None or len(prompt) == 0:
        prefix, rests = _split_common_prefix(talks)
        return prefix or None, list(rests)
    return _around_messages(reader, prompt, talks, named)


def _form(content: Content) -> str:
    return "text" if isinstance(content, str) else "a list of messages"


def _around_texts(
    reader: RowReader, prompt: Content | None, texts: list[str], named: Sequence[tuple[str, Any]]
) -> tuple[Content | None, list[Content]]:
    if isinstance(prompt, tuple):
        # one answer of text to a conversation is one assistant turn
        return prompt or None, [(_assistant(text),) for text in texts]
    if prompt and is_human_assistant(prompt):
        turns = parse_human_assistant(prompt)
        if turns[-1]["role"] == "assistant" and not turns[-1]["content"]:
            turns = turns[:-1]
        return turns, [(_assistant(text.strip()),) for text in texts]
    if not prompt and any(map(is_human_assistant, texts)):
        for text, (name, _) in zip(texts, named, strict=True):
            if not is_human_assistant(text):
                raise reader.error(name, "is plain text, but another answer of the row is 'Human: … Assistant: …' text")
        prefix, rests = _split_common_prefix([parse_human_assistant(text) for text in texts])
        return prefix or None, list(rests)
    return prompt or None, list(texts)


def _around_messages(
    reader: RowReader, prompt: Content, talks: list[tuple[Message, ...]], named: Sequence[tuple[str, Any]]
) -> tuple[Content | None, list[Content]]:
    """Answers as messages beside a prompt: they may be the answer alone, or repeat the prompt before it."""
    turns = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
    repeated = [_length_of_repeat(turns, talk) for talk in talks]
    if all(repeated):
        prefix, rests = _split_common_prefix(talks)
        return prefix or None, list(rests)
    for talk, length, (name, _) in zip(talks, repeated, named, strict=True):
        if length or talk[0]["role"] in ("user", "system"):
            raise reader.error(
                name, f"begins with a {talk[0]['role']} message, but not all answers of the row repeat the prompt"
            )
    return turns, list(talks)


def _length_of_repeat(prompt: tuple[Message, ...], talk: tuple[Message, ...]) -> int:
    """How many messages at the talk's start are the prompt (after a system message of its own), 0 when they differ."""
    for start in (0, 1):
        end = start + len(prompt)
        if start == 1 and (not talk or talk[0]["role"] != "system"):
            break
        if len(talk) > end and talk[start:end] == prompt:
            return end
    return 0


def _split_common_prefix(
    talks: Sequence[tuple[Message, ...]],
) -> tuple[tuple[Message, ...], list[tuple[Message, ...]]]:
    """What all conversations share, and what remains of each: always at least its last message."""
    length = min(len(talk) for talk in talks) - 1
    shared = 0
    while shared < length and all(talk[shared] == talks[0][shared] for talk in talks):
        shared += 1
    return talks[0][:shared], [talk[shared:] for talk in talks]


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
