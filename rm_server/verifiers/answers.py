"""What a verifier is given, and what it says where the reference cannot be used."""

from dataclasses import dataclass
from decimal import Decimal
from typing import Any


class BadReferenceError(ValueError):
    """The reference, not the answer, is at fault. The message goes on behind ``reference: ``; it quotes nothing."""


@dataclass(frozen=True)
class Answer:
    """One answer to verify. ``reference`` is JSON of the caller's; ``finished`` is False where a limit cut it."""

    text: str
    reference: Any = None
    finished: bool = True


def texts_of(reference: Any) -> list[str]:
    """A text, a number or a list of these as texts, one at least. Raises BadReferenceError."""
    values = reference if isinstance(reference, list) else [reference]
    if reference is None:
        raise BadReferenceError("is required")
    if not values:
        raise BadReferenceError("must not be an empty list")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise BadReferenceError("must be a text, a number, or a list of these")
        if isinstance(value, float) and value.is_integer() and abs(value) >= 2**53:
            raise BadReferenceError("is too large to have kept all its digits; send it as a text")
    texts = [value if isinstance(value, str) else _digits(value) for value in values]
    if not all(text.strip() for text in texts):
        raise BadReferenceError("must not be empty")
    return texts


def _digits(value: float) -> str:
    """Without an exponent: 1e-07 would be read as e minus 7."""
    return format(Decimal(repr(value)), "f") if isinstance(value, float) else repr(value)


def text_after(text: str, mark: str | None) -> str:
    """What follows the last ``mark`` (such as ``</think>``); the whole text where there is no mark to look for, and
    nothing where the text does not have it."""
    if mark is None:
        return text
    _, found, rest = text.rpartition(mark)
    return rest if found else ""
