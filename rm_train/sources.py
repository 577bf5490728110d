"""Read any source of pairs as a stream of rows, each with the place it came from.

Invariant: every row of a source is either yielded or reported with its place; none vanishes. What a row means is
decided in ``pairs.py``.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rm_train.config import SourceConfig
from rm_train.rows import DataError, ErrorHandler, Row, raise_error
from rm_train.tables import count_parquet, read_arrow, read_hub, read_parquet, read_saved_dataset
from rm_train.text_files import COMPRESSED, read_csv, read_json, read_jsonl

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather")
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")


def source_name(source: SourceConfig) -> str:
    """Short name of a source: a file's name without its suffixes, or the hub id."""
    path = Path(source.path)
    if not path.exists() and _HUB_ID.match(source.path):
        return source.path
    name = path.name or str(path)
    for suffix in (*COMPRESSED, *SUFFIXES):
        name = name.removesuffix(suffix)
    return name


def source_names(sources: Sequence[SourceConfig]) -> list[str]:
    """A name for each source: ``source_name``, with the folder before it where two paths share that, or the path."""
    names = {source.path: source_name(source) for source in sources}
    taken = Counter(names.values())
    names = {
        path: f"{Path(path).absolute().parent.name}/{name}" if taken[name] > 1 else name for path, name in names.items()
    }
    taken = Counter(names.values())
    return [source.path if taken[names[source.path]] > 1 else names[source.path] for source in sources]


def read_rows(source: SourceConfig, on_error: ErrorHandler = raise_error) -> Iterator[Row]:
    """Yield the rows of a source in order.

    A broken row goes to ``on_error`` and is left out when that returns. A source that cannot be read at all (missing,
    not decompressable, no known format) raises DataError whatever ``on_error`` is.
    """
    path = Path(source.path)
    if path.is_dir():
        yield from _read_directory(path, source, on_error)
    elif path.exists():
        yield from _read_file(path, on_error)
    elif _HUB_ID.match(source.path) and not source.path.lower().endswith((*SUFFIXES, *COMPRESSED)):
        yield from read_hub(source)
    else:
        raise DataError(source.path, "no such file or directory (a hub dataset is written org/name)")


def count_rows(source: SourceConfig) -> int | None:
    """About how many rows a source has, where that can be told at once; None for compressed text and hub sets."""
    path = Path(source.path)
    files = sorted(file for file in path.iterdir() if _format_of(file)) if path.is_dir() else [path]
    if not path.exists() or (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        return None
    counts = [_count_file(file) for file in files]
    return None if None in counts else sum(count for count in counts if count is not None)


def _count_file(path: Path) -> int | None:
    if not path.is_file():  # a pipe can be read only once
        return None
    if path.suffix.lower() in (".jsonl", ".ndjson", ".csv", ".tsv"):
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    return count_parquet(path) if path.suffix.lower() == ".parquet" else None


def _read_directory(path: Path, source: SourceConfig, on_error: ErrorHandler) -> Iterator[Row]:
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        yield from read_saved_dataset(path, source)
        return
    files = [file for file in sorted(path.iterdir()) if file.is_file() and _format_of(file) is not None]
    if not files:
        raise DataError(str(path), f"the directory holds no data file ({', '.join(SUFFIXES)})")
    for file in files:
        yield from _read_file(file, on_error)


def _format_of(path: Path) -> str | None:
    name = path.name.lower()
    for compressed in COMPRESSED:
        name = name.removesuffix(compressed)
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def _read_file(path: Path, on_error: ErrorHandler) -> Iterator[Row]:
    match _format_of(path):
        case ".jsonl" | ".ndjson":
            yield from read_jsonl(path, on_error)
        case ".json":
            yield from read_json(path, on_error)
        case ".csv":
            yield from read_csv(path, ",", on_error)
        case ".tsv":
            yield from read_csv(path, "\t", on_error)
        case ".parquet":
            yield from read_parquet(path)
        case ".arrow" | ".feather":
            yield from read_arrow(path)
        case _:
            raise DataError(str(path), f"unknown kind of file; known: {', '.join(SUFFIXES)} (text also .gz, .zst)")
