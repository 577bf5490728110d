"""Read JSON lines, JSON lists and CSV, plain or compressed, as rows with their line numbers.

Invariant: a row that cannot be read is reported with its line; what cannot be resumed behind a fault (a broken quote
in CSV, a broken list in JSON, a file that ends early) raises instead of ending quietly.
"""

import csv
import gzip
import importlib
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rm_train.rows import DataError, ErrorHandler, Row, kind_of

COMPRESSED = (".gz", ".zst")


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes, decompressed; what goes wrong while it is read becomes a DataError."""
    try:
        with _decompressed(path) as file:
            yield file
    except DataError:
        raise
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(str(path), f"is not a whole compressed file: {error}") from None
    except ImportError as error:
        raise DataError(str(path), str(error)) from None
    except OSError as error:
        raise DataError(str(path), f"cannot be read: {error.strerror or error}") from None


def _decompressed(path: Path) -> IO[bytes]:
    name = path.name.lower()
    if name.endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(path))
    if name.endswith(".zst"):
        return io.BufferedReader(_import_pyarrow().CompressedInputStream(str(path), "zstd"))
    return open(path, "rb")


def _import_pyarrow() -> Any:
    try:
        return importlib.import_module("pyarrow")
    except ImportError:
        raise ImportError("reading .zst needs pyarrow (pip install 'betterthan[train]')") from None


# ------------------------------------------------------------------ JSON


def _decode_line(path: Path, number: int, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number}", f"byte {error.start + 1} of the line is not valid UTF-8") from None


def _as_row(where: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise DataError(where, f"must be an object with named fields, not {kind_of(value)}")
    return Row(where, value)


def read_jsonl(path: Path, on_error: ErrorHandler) -> Iterator[Row]:
    """One JSON object per line; blank lines are skipped."""
    with _opened(path) as file:
        yield from _json_lines(path, file, on_error)


def _json_lines(path: Path, file: IO[bytes], on_error: ErrorHandler) -> Iterator[Row]:
    for number, data in enumerate(file, start=1):
        if not data.strip():
            continue
        where = f"{path}:{number}"
        try:
            text = _decode_line(path, number, data)
            try:
                value = json.loads(text.rstrip("\r\n"))  # a line cut short breaks off in its own last column
            except (ValueError, RecursionError) as error:
                raise DataError(where, f"is not valid JSON: {_json_problem(error)}") from None
            row = _as_row(where, value)
        except DataError as error:
            on_error(error)
            continue
        yield row


def _json_problem(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"


def read_json(path: Path, on_error: ErrorHandler) -> Iterator[Row]:
    """A JSON list of objects; what is named .json but holds one object per line is read so."""
    with _opened(path) as file:
        data = file.read()
    if data.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{":
        yield from _json_lines(path, io.BytesIO(data), on_error)
        return
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}", "is not valid UTF-8") from None
    decoder, blank = json.JSONDecoder(), re.compile(r"[ \t\r\n]*")
    position, line, counted = _skip(blank, text, 0), 1, 0
    number, previous = 0, 0
    if text[position : position + 1] != "[":
        raise DataError(f"{path}:1", "must be a JSON list of objects, or one object per line")
    separator = "["
    while True:
        position = _skip(blank, text, position + 1)
        line += text.count("\n", counted, position)
        counted = position
        if text[position : position + 1] == "]" and separator == "[":
            break
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            at = error.lineno if isinstance(error, json.JSONDecodeError) else line
            raise DataError(f"{path}:{at}", f"is not valid JSON: {_json_problem(error)}") from None
        number += 1
        # the place tells rows apart, and a list may stand on one line
        where, previous = f"{path}:{line}" + (f" (row {number})" if line == previous else ""), line
        try:
            yield _as_row(where, value)
        except DataError as error:
            on_error(error)
        position = _skip(blank, text, position)
        separator = text[position : position + 1]
        if separator == "]":
            break
        if separator != ",":
            at = text.count("\n", 0, position) + 1
            raise DataError(f"{path}:{at}", "is not valid JSON: a comma or the list's end is missing")
    if text[position + 1 :].strip():
        raise DataError(
            f"{path}:{text.count(chr(10), 0, position) + 1}", "is not valid JSON: something follows the list"
        )


def _skip(blank: re.Pattern[str], text: str, position: int) -> int:
    found = blank.match(text, position)
    assert found is not None, "a pattern that may be empty always matches"
    return found.end()


# ------------------------------------------------------------------ CSV


def read_csv(path: Path, delimiter: str, on_error: ErrorHandler) -> Iterator[Row]:
    """CSV with a header; every value is text."""
    # Answers are longer than the module's default limit of 131,072 characters a field.
    csv.field_size_limit(max(csv.field_size_limit(), min(sys.maxsize, 2**31 - 1)))
    with _opened(path) as file:
        reader = csv.reader(
            (_decode_line(path, n, line) for n, line in enumerate(file, 1)), delimiter=delimiter, strict=True
        )
        header: list[str] | None = None
        while True:
            where = f"{path}:{reader.line_num + 1}"
            try:
                record = next(reader, None)
            except csv.Error as error:
                # after a broken quote nothing tells where the next record begins
                raise DataError(where, f"is not valid CSV: {error}") from None
            if record is None:
                break
            if not record:
                continue
            if header is None:
                header = record
                if len(set(header)) != len(header):
                    raise DataError(where, "the header names a column twice")
            elif len(record) != len(header):
                on_error(DataError(where, f"has {len(record)} fields, the header has {len(header)}"))
            else:
                yield Row(where, dict(zip(header, record, strict=True)))
