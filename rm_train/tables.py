"""Read Parquet, Arrow and the datasets library's sets as rows with their row numbers, without holding them whole.

Invariant: files are memory-mapped and turned into Python objects a slice at a time. pyarrow and datasets are imported
when the first such file is read.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rm_train.config import SourceConfig
from rm_train.rows import DataError, Row, first_line

_BATCH_ROWS = 1024


def read_parquet(path: Path) -> Iterator[Row]:
    """Rows of a Parquet file."""
    parquet = _pyarrow("pyarrow.parquet", path)
    with _arrow_errors(path), parquet.ParquetFile(path, memory_map=True) as file:
        yield from _batches(str(path), file.iter_batches(batch_size=_BATCH_ROWS))


def count_parquet(path: Path) -> int:
    """Rows of a Parquet file, from its footer."""
    parquet = _pyarrow("pyarrow.parquet", path)
    with _arrow_errors(path), parquet.ParquetFile(path) as file:
        return int(file.metadata.num_rows)


def read_arrow(path: Path) -> Iterator[Row]:
    """Rows of an Arrow file, in either layout: with a footer, or as the stream that the datasets library writes."""
    arrow = _pyarrow("pyarrow", path)
    with _arrow_errors(path), arrow.memory_map(str(path)) as data:
        try:
            reader = arrow.ipc.open_file(data)
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        except arrow.ArrowInvalid:
            data.seek(0)
            batches = iter(arrow.ipc.open_stream(data))
        yield from _batches(str(path), batches)


def _batches(where: str, batches: Iterator[Any]) -> Iterator[Row]:
    number = 0
    for batch in batches:
        # a batch may be a whole file: turn only a slice of it into Python objects at a time
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            for values in batch.slice(start, _BATCH_ROWS).to_pylist():
                number += 1
                yield Row(f"{where}:{number}", values)


def _pyarrow(module: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(str(path), "reading this file needs pyarrow (pip install 'betterthan[train]')") from None


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    arrow = _pyarrow("pyarrow", path)
    try:
        yield
    except arrow.ArrowException as error:
        raise DataError(str(path), f"cannot be read: {first_line(error)}") from None
    except UnicodeDecodeError:
        raise DataError(str(path), "holds text that is not valid UTF-8") from None
    except OSError as error:
        raise DataError(str(path), f"cannot be read: {error.strerror or error}") from None


def read_hub(source: SourceConfig) -> Iterator[Row]:
    """Rows of one split of a hub dataset, from the hub or its local cache."""
    datasets = _datasets(source.path)
    try:
        rows = datasets.load_dataset(source.path, source.subset, split=source.split, revision=source.revision)
    except Exception as error:  # the hub's libraries have no common base for what they raise
        raise DataError(source.path, f"the hub dataset cannot be loaded: {first_line(error)}") from None
    yield from _dataset_rows(rows, f"{source.path}:{source.split}")


def read_saved_dataset(path: Path, source: SourceConfig) -> Iterator[Row]:
    """Rows of a directory written by ``Dataset.save_to_disk``."""
    datasets = _datasets(str(path))
    try:
        rows = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(str(path), f"the saved dataset cannot be loaded: {first_line(error)}") from None
    if hasattr(rows, "keys"):
        if source.split not in rows:
            raise DataError(str(path), f"has no split {source.split!r}; it has {', '.join(rows)}")
        rows = rows[source.split]
    yield from _dataset_rows(rows, str(path))


def _dataset_rows(rows: Any, where: str) -> Iterator[Row]:
    for number, values in enumerate(rows, start=1):
        yield Row(f"{where}:{number}", values)


def _datasets(where: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError:
        raise DataError(where, "reading it needs the package datasets (pip install 'betterthan[train]')") from None
