"""Token rewards: who may have them, and what text each token adds.

Invariant: the texts of a sequence's tokens, one behind the other, are the text of the sequence.
"""

from collections.abc import Callable, Sequence
from typing import Any

from rm_server.errors import InvalidRequestError, TooLargeError
from rm_server.scorer import ServedModel

MAX_ITEMS = 256
"""Items of a request that asks for token rewards: they are for reading, and an answer has some 20 bytes a token."""
_BEFORE = 6
"""Tokens decoded in front of a piece, for the spaces and characters that depend on them."""
_LONGEST_CHARACTER = 16
"""A character that is not complete after so many tokens never will be."""


def refuse_token_rewards(model: ServedModel, num_items: int) -> None:
    """Raise ServerError where this model, or a request of this size, can have none."""
    if model.token_rewards_off is not None:
        raise InvalidRequestError(f"token_rewards: is not supported by this model: {model.token_rewards_off}")
    if num_items > MAX_ITEMS:
        raise TooLargeError(f"token_rewards: {num_items} items are over the limit of {MAX_ITEMS} for it")


def token_texts(tokenizer: Any, ids: Sequence[int], start: int) -> list[str]:
    """What each token from ``start`` on adds to the text. A character of several tokens belongs to its last one."""

    def text_of(some: Sequence[int]) -> str:
        return str(tokenizer.decode(some, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    # Tokens that each stand for whole characters are read one by one: most answers, and much faster.
    single = {token: text_of([token]) for token in set(ids[start:])}
    texts = [single[token] for token in ids[start:]]
    return texts if "".join(texts) == text_of(ids[start:]) else _in_context(text_of, ids, start)


def _in_context(text_of: Callable[[Sequence[int]], str], ids: Sequence[int], start: int) -> list[str]:
    def decode(begin: int, end: int) -> str:
        return text_of(ids[begin:end])

    texts: list[str] = []
    window, done = max(start - _BEFORE, 0), start
    before = decode(window, done)
    for end in range(start + 1, len(ids) + 1):
        text = decode(window, end)
        if text.endswith("\ufffd") and end < len(ids) and end - done < _LONGEST_CHARACTER:
            texts.append("")
            continue
        texts.append(text[len(before) :])
        window, done = done, end
        before = decode(window, done)
    return texts
