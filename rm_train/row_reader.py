"""Read the fields of one row under a column mapping: numbers, texts, lists, contents.

Invariant: whatever is wrong with a field, the error names the row's place and the field as the file calls it.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from rm_train.config import Columns
from rm_train.rows import DataError, Row, kind_of

Message = Mapping[str, Any]
Content = str | tuple[Message, ...]
"""A text, or the messages of a conversation."""


class RowReader:
    """One row under its column mapping. Knows the place, so that every error names it."""

    def __init__(self, row: Row, columns: Columns) -> None:
        self.where = row.where
        self._values = row.values
        self._columns = columns

    def column(self, name: str) -> str | None:
        """What the row calls the field; None when it is mapped away."""
        return self._columns.get(name, name)

    def get(self, name: str) -> Any:
        """The field's value, None when it is absent; an absent field that was mapped on purpose is an error."""
        column = self.column(name)
        if column is None:
            return None
        if column != name and column not in self._values:
            raise self.error(name, f"is missing, though columns maps {name} to it; the row has {self._names()}")
        return self._values.get(column)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.get(name) is not None

    def need(self, name: str) -> Any:
        """The field's value, which must be there."""
        value = self.get(name)
        if value is None:
            column = self.column(name)
            state = (
                "is null"
                if column in self._values
                else f"is missing; the row has {self._names()} (columns can map names)"
            )
            raise self.error(name, state)
        return value

    def error(self, name: str, problem: str) -> DataError:
        """An error about a field or a part of it (``chosen[1].role``), under the row's own name for it."""
        field = re.split(r"[.\[]", name, maxsplit=1)[0]
        return DataError(self.where, f"{self.column(field)}{name[len(field) :]}: {problem}")

    def _names(self) -> str:
        return ", ".join(map(str, self._values)) or "no fields"

    def number(self, name: str, low: float = -math.inf, high: float = math.inf) -> float | None:
        """A finite number within bounds, None when absent."""
        value = self.get(name)
        if isinstance(value, str):  # CSV has only text
            if not value.strip():
                return None
            try:
                value = float(value)
            except ValueError:
                raise self.error(name, f"must be a number, not {value!r}") from None
        return None if value is None else finite(self, name, value, low, high)

    def text(self, name: str) -> str | None:
        """A label; numbers become text, the empty text becomes None."""
        value = self.get(name)
        if value is None or value == "":
            return None
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self.error(name, f"must be text, not {kind_of(value)}")
        return str(value)


def refuse_tools(reader: RowReader) -> None:
    """Raise DataError where the row holds tool schemas, which no rendering shows to the model."""
    if reader.get("tools"):
        raise reader.error("tools", "tool schemas are not rendered; leave them out by columns: {tools: null}")


def finite(reader: RowReader, name: str, value: Any, low: float, high: float) -> float:
    """Check one number of a field."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise reader.error(name, f"must be a number, not {kind_of(value)}")
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf if value > 0 else -math.inf
    if not math.isfinite(number) or not low <= number <= high:
        bounds = (
            "" if low == -math.inf else f" of at least {low:g}" + ("" if high == math.inf else f" and at most {high:g}")
        )
        raise reader.error(name, f"must be a finite number{bounds}, not {number:g}")
    return number


def list_of(reader: RowReader, name: str) -> list[Any]:
    """The field's value, which must be a list."""
    value = reader.need(name)
    if not isinstance(value, list | tuple):
        raise reader.error(name, f"must be a list, not {kind_of(value)}")
    return list(value)


def content_of(reader: RowReader, name: str, value: Any, may_be_empty: bool = False) -> Content:
    """Check a text, or a list of messages (a single message stands for a list of one)."""
    if isinstance(value, str):
        _check_unicode(reader, name, value)
        return value
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple):
        raise reader.error(name, f"must be text or a list of messages, not {kind_of(value)}")
    if not value and not may_be_empty:
        raise reader.error(name, "is an empty list of messages")
    return tuple(_message(reader, f"{name}[{index}]", message) for index, message in enumerate(value))


def _message(reader: RowReader, name: str, value: Any) -> Message:
    if not isinstance(value, Mapping):
        raise reader.error(name, f"must be an object with role and content, not {kind_of(value)}")
    # Arrow gives every message every field that any message has: null means absent
    message = {key: field for key, field in value.items() if field is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise reader.error(f"{name}.role", f"is missing or not text; the message has {', '.join(map(str, message))}")
    content = message.get("content")
    if isinstance(content, str):
        _check_unicode(reader, f"{name}.content", content)
    elif isinstance(content, list | tuple):
        message["content"] = [_part(reader, f"{name}.content[{i}]", part) for i, part in enumerate(content)]
    elif content is None and message.get("tool_calls"):
        message["content"] = ""
    else:
        raise reader.error(f"{name}.content", f"must be text or a list of parts, not {kind_of(content)}")
    return message


def _part(reader: RowReader, name: str, value: Any) -> Message:
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        raise reader.error(name, 'must be an object such as {"type": "text", "text": "…"}')
    part = {key: field for key, field in value.items() if field is not None}
    if isinstance(part.get("text"), str):
        _check_unicode(reader, f"{name}.text", part["text"])
    return part


def _check_unicode(reader: RowReader, name: str, text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise reader.error(name, f"character {error.start + 1} is half of a surrogate pair") from None
