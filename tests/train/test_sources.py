"""Reading files: every format gives the same rows, and a broken one is named with file and line."""

import csv
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rm_train import tables, text_files
from rm_train.config import SourceConfig, parse_source
from rm_train.rows import DataError, Row
from rm_train.sources import count_rows, read_rows, source_name, source_names

ROWS = [{"prompt": "q", "chosen": "yes é", "rejected": "no"}, {"prompt": "r", "chosen": "a\nb", "rejected": 'c,"d"'}]


def read(path: Path, **options: Any) -> list[Row]:
    return list(read_rows(SourceConfig(path=str(path), **options)))


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def write_table(path: Path, kind: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.Table.from_pylist(ROWS)
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
        return
    new = pa.ipc.new_file if kind == "arrow file" else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table)


def write_csv(path: Path, delimiter: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(ROWS[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)


def test_every_file_format_gives_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS))
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(ROWS))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(ROWS)))
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    (tmp_path / "lines.json").write_bytes(lines(ROWS))
    write_csv(tmp_path / "a.csv")
    write_csv(tmp_path / "a.tsv", "\t")
    write_table(tmp_path / "a.parquet", "parquet")
    write_table(tmp_path / "file.arrow", "arrow file")
    write_table(tmp_path / "stream.arrow", "arrow stream")
    for path in sorted(tmp_path.iterdir()):
        assert [row.values for row in read(path)] == ROWS, path.name


def test_rows_are_counted_beforehand_where_that_is_cheap(tmp_path: Path) -> None:
    """Only for a progress bar: a CSV header and line breaks in its cells are counted as rows."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(ROWS))
    write_table(folder / "b.parquet", "parquet")
    assert count_rows(SourceConfig(path=str(folder))) == 4
    write_csv(tmp_path / "a.csv")
    assert count_rows(SourceConfig(path=str(tmp_path / "a.csv"))) == 4
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(ROWS)))
    assert count_rows(SourceConfig(path=str(tmp_path / "a.jsonl.gz"))) is None
    assert count_rows(SourceConfig(path="owner/name")) is None


def test_places_are_lines_in_text_and_rows_in_tables(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n" + lines(ROWS))
    (tmp_path / "a.json").write_text("[\n\n" + json.dumps(ROWS[0]) + ",\n" + json.dumps(ROWS[1]) + "\n]\n", "utf-8")
    write_csv(tmp_path / "a.csv")
    write_table(tmp_path / "a.parquet", "parquet")
    places = {path.name: [row.where.rsplit(":", 1)[1] for row in read(path)] for path in tmp_path.iterdir()}
    assert places == {"a.jsonl": ["2", "3"], "a.json": ["3", "4"], "a.csv": ["2", "3"], "a.parquet": ["1", "2"]}


def test_no_two_rows_of_a_json_list_share_a_place(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"a": 1}, 2, {"a": 3},\n{"a": 4\n}, {"a": 5}]', encoding="utf-8")
    errors: list[DataError] = []
    rows = list(read_rows(SourceConfig(path=str(path)), errors.append))
    assert [row.where.removeprefix(f"{path}:") for row in rows] == ["1", "1 (row 3)", "2", "3"]
    assert str(errors[0]) == f"{path}:1 (row 2): must be an object with named fields, not a number"


def test_a_directory_is_read_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(lines(ROWS[1:]))
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS[:1]))
    (tmp_path / "README.md").write_text("not data")
    assert [row.values for row in read(tmp_path)] == ROWS


def test_a_saved_dataset_is_read_by_split(tmp_path: Path) -> None:
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "set"))
    assert [row.values for row in read(tmp_path / "set")] == ROWS
    with pytest.raises(DataError, match="has no split 'test'; it has train"):
        read(tmp_path / "set", split="test")
    assert parse_source(f"{tmp_path / 'set'}:train") == {"path": str(tmp_path / "set"), "split": "train"}
    assert parse_source(f"{tmp_path / 'none'}:train") == {"path": f"{tmp_path / 'none'}:train"}


@pytest.mark.parametrize(
    ("name", "content", "place", "problem"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \r\n', 2, "is not valid JSON: Expecting value at column 7"),
        ("a.jsonl", b'{"a": 1}\n\n[1]\n', 3, "must be an object with named fields, not a list"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', 2, "byte 8 of the line is not valid UTF-8"),
        ("a.jsonl", b'"' + b"[" * 3 + b"\n", 1, "is not valid JSON"),
        ("a.jsonl", b'{"a": 1}\n{"a": ' + b"1" * 5000 + b"}\n", 2, "a number has too many digits"),
        ("a.json", b'[{"a": 1},\n{"a": ' + b"1" * 5000 + b"}]", 2, "a number has too many digits"),
        ("a.json", b'[{"a": 1},\n\n{"a": }]', 3, "is not valid JSON"),
        ("a.json", b'[{"a": 1}\n{"a": 2}]', 2, "a comma or the list's end is missing"),
        ("a.json", b'[{"a": 1},\n3]', 2, "must be an object with named fields, not a number"),
        ("a.json", b'[{"a": 1},\n{"a": "\xff"}]', 2, "is not valid UTF-8"),
        ("a.json", b'[{"a": 1}\n', 2, "is not valid JSON"),
        ("a.json", b'[{"a": 1}]\nx', 1, "something follows the list"),
        ("a.json", b'"text"', 1, "must be a JSON list of objects"),
        ("a.csv", b"a,b\n1,2\n3\n", 3, "has 1 fields, the header has 2"),
        ("a.csv", b'a,b\n1,2\n"3,4\n', 3, "is not valid CSV"),
        ("a.csv", b"a,b\n1,2\n3,\xff\n", 3, "is not valid UTF-8"),
        ("a.csv", b"a,a\n1,2\n", 1, "names a column twice"),
    ],
)
def test_broken_row_names_file_and_line(tmp_path: Path, name: str, content: bytes, place: int, problem: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:{place}: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_broken_rows_can_be_collected_while_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{\n\xff\n{"a": 2}\n')
    errors: list[DataError] = []
    rows = list(read_rows(SourceConfig(path=str(path)), errors.append))
    assert [row.values for row in rows] == [{"a": 1}, {"a": 2}]
    assert [error.where for error in errors] == [f"{path}:2", f"{path}:3"]


def test_a_compressed_file_that_was_cut_raises_instead_of_ending_early(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines(ROWS * 100))[:-20])
    with pytest.raises(DataError, match="is not a whole compressed file"):
        read(path)
    path.write_bytes(b"plain text")
    with pytest.raises(DataError, match="is not a whole compressed file"):
        read(path)


def test_zstandard_is_read_by_what_the_training_install_brings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two frames behind each other are one file, as `zstd -c a b > c` and parallel writers make them."""
    import pyarrow as pa

    path = tmp_path / "a.jsonl.zst"
    many = ROWS[1:] * 5000
    parts = [pa.compress(lines(part), codec="zstd", asbytes=True) for part in (ROWS[:1], many)]
    path.write_bytes(b"".join(parts))
    assert [row.values for row in read(path)] == [*ROWS[:1], *many]
    for cut in (3, len(parts[1]) - 2, len(parts[1]) + 5):
        path.write_bytes(b"".join(parts)[:-cut])
        with pytest.raises(DataError, match="cannot be read: Truncated compressed stream"):
            read(path)
    path.write_bytes(b"plain text")
    with pytest.raises(DataError, match="cannot be read: ZSTD decompress failed"):
        read(path)

    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(text_files.importlib, "import_module", absent)
    with pytest.raises(DataError, match=r"reading \.zst needs pyarrow \(pip install 'betterthan\[train\]'\)"):
        read(path)


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "a.xlsx").write_bytes(b"")
    (tmp_path / "b.parquet").write_bytes(b"nothing")
    (tmp_path / "b.arrow").write_bytes(b"nothing")
    (tmp_path / "empty").mkdir()
    for name, problem in [
        ("absent.jsonl", "no such file or directory"),
        ("a.xlsx", "unknown kind of file; known: .jsonl"),
        ("b.parquet", "cannot be read"),
        ("b.arrow", "cannot be read"),
        ("empty", "the directory holds no data file"),
    ]:
        with pytest.raises(DataError) as caught:
            read(tmp_path / name)
        assert problem in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_hub_set_is_loaded_by_id_split_and_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def load_dataset(path: str, name: str | None, *, split: str, revision: str | None) -> list[dict[str, Any]]:
        calls.append((path, name, split, revision))
        if split == "absent":
            raise ValueError('Unknown split "absent".\nTraceback')
        return ROWS

    monkeypatch.setattr(tables, "_datasets", lambda where: SimpleNamespace(load_dataset=load_dataset))
    rows = list(read_rows(SourceConfig(path="org/pairs", split="test", subset="en", revision="main")))
    assert calls == [("org/pairs", "en", "test", "main")]
    assert [row.where for row in rows] == ["org/pairs:test:1", "org/pairs:test:2"]
    with pytest.raises(DataError) as caught:
        list(read_rows(SourceConfig(path="org/pairs", split="absent")))
    assert str(caught.value) == 'org/pairs: the hub dataset cannot be loaded: Unknown split "absent".'


def test_a_file_that_is_absent_is_not_taken_for_a_hub_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no such file or directory"):
        list(read_rows(SourceConfig(path="data/pairs.jsonl")))


def test_sources_of_one_name_are_told_apart_by_folder_or_path(tmp_path: Path) -> None:
    def names(*paths: str) -> list[str]:
        found = source_names([SourceConfig(path=f"{tmp_path}/{path}") for path in paths])
        return [name.removeprefix(f"{tmp_path}/") for name in found]

    assert names("a/x.jsonl", "b/x.jsonl", "y.csv", "b/x.jsonl") == ["a/x", "b/x", "y", "b/x"]
    paths = ["1/a/x.jsonl", "2/a/x.jsonl", "b/x.jsonl", "c/z.csv", "c/z.jsonl"]
    assert names(*paths) == [*paths[:2], "b/x", *paths[3:]]
    assert source_names([SourceConfig(path="org/x"), SourceConfig(path="other/x")]) == ["org/x", "other/x"]


def test_a_source_is_named_after_its_file(tmp_path: Path) -> None:
    (tmp_path / "ukp.jsonl.gz").write_bytes(b"")
    assert source_name(SourceConfig(path=str(tmp_path / "ukp.jsonl.gz"))) == "ukp"
    assert source_name(SourceConfig(path="org/pairs")) == "org/pairs"


def test_an_answer_longer_than_the_csv_modules_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("chosen,rejected\n" + "x" * 200_000 + ",y\n", encoding="utf-8")
    assert len(read(path)[0].values["chosen"]) == 200_000
