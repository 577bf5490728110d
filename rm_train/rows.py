"""What every reader of pairs yields and raises: a row with its place, and the error that names a place."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class DataError(ValueError):
    """Data that cannot be used. The text is one line: the place (``file:line``), what is wrong and what to do."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Row:
    """One row as the source has it.

    ``where`` is ``file:line``, or ``file:row`` (from 1) where there are no lines; no two rows of a source share it.
    """

    where: str
    values: Mapping[str, Any]


ErrorHandler = Callable[[DataError], None]


def raise_error(error: DataError) -> None:
    """Stop at the first broken row: what ``on_error`` is unless told otherwise."""
    raise error


def kind_of(value: Any) -> str:
    """Name a JSON value's type as a user knows it."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true/false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def first_line(error: Exception) -> str:
    """One line of another library's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
