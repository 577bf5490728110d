"""The report of a run: one page that needs nothing else, with every part that the run has data for."""

import base64
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rm_core.model import RewardModel
from rm_train.fit import fit
from rm_train.report import write_run_report
from rm_train.report_plots import by_group
from rm_train.run_directory import RunError, read_run
from tests.train.runs import Killed, Quiet, kill_at, make_config, text_rows, write_rows
from tests.train.test_cli import run

PLOTS = ["loss", "accuracy", "optimisation", "rewards", "margins", "reliability", "categories", "length"]
SECRET = "<script>alert('unescaped')</script> & quite private"


class _Parser(HTMLParser):
    """Which elements are open, and everything that would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "srcset") and value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    directory = tmp_path_factory.mktemp("run")
    rows = [{**row, "category": "odd" if index % 2 else "even"} for index, row in enumerate(text_rows(12))]
    held_out = [{**row, "category": "ab"[index % 2]} for index, row in enumerate(text_rows(8, seed=4))]
    # right only for a model that prefers the shorter and the longer answer at once: one of the two is a mistake
    held_out += [
        {"prompt": f"{SECRET} 1", "chosen": "yes", "rejected": "no no no", "category": "c"},
        {"prompt": f"{SECRET} 1", "chosen": "no no no", "rejected": "yes", "category": "c"},
    ]
    config = make_config(
        tiny_base,
        directory,
        write_rows(directory / "train.jsonl", [*rows, rows[0]]),
        write_rows(directory / "eval.jsonl", held_out),
        train={"max_steps": 6, "eval_every": 2},
    )
    return fit(config, Quiet()).directory


def parse(page: Path) -> tuple[str, _Parser]:
    text = page.read_text(encoding="utf-8")
    parser = _Parser()
    parser.feed(text)
    assert parser.open == []
    return text, parser


def test_page_is_whole_and_fetches_nothing(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "report", finished, "--output", tmp_path / "page.html")
    assert code == 0, err
    assert out == f"{tmp_path / 'page.html'}  (8 plots in {tmp_path / 'page'})\n"
    text, parser = parse(tmp_path / "page.html")
    assert all(target.startswith("data:image/png;base64,") for target in parser.fetched)
    assert len(parser.fetched) == len(PLOTS)
    assert "script" not in parser.tags
    assert "url(" not in text
    assert 'name="viewport"' in text
    pictures = [base64.b64decode(target.split(",")[1]) for target in parser.fetched]
    files = {path.name: path.read_bytes() for path in (tmp_path / "page").iterdir()}
    assert sorted(files) == sorted(f"{name}.png" for name in PLOTS)
    assert sorted(pictures) == sorted(files.values())


def test_page_says_what_was_trained_found_and_how_to_serve_it(finished: Path, tmp_path: Path) -> None:
    page, _ = write_run_report(finished, tmp_path / "page.html")
    text, _ = parse(page)
    record = read_run(finished).record
    assert record is not None
    wanted = [
        record.reward_id,
        f"{record.metrics['accuracy']['value']:.3f}",
        "LoRA, rank 4",
        "13 training, 10 evaluation",
        "6 steps",
        "duplicate",
        "bag of words",
        f"rm-server {finished / 'checkpoint'}",
        "the raw logit, at the last token",
        "baseline",
    ]
    for words in wanted:
        assert words in text, words
    for section in ("Training", "Rewards", "Worst mistakes", "What the data doctor found", "How to serve it"):
        assert f"<h2>{section}</h2>" in text


def test_texts_are_escaped_or_left_out(finished: Path, tmp_path: Path) -> None:
    text, _ = parse(write_run_report(finished, tmp_path / "with.html")[0])
    assert "&lt;script&gt;alert(&#x27;unescaped&#x27;)&lt;/script&gt; &amp; quite private" in text
    assert SECRET not in text
    without, _ = parse(write_run_report(finished, tmp_path / "without.html", text=False)[0])
    assert "quite private" not in without
    assert "no no no" not in without
    assert re.search(r"eval\.jsonl:(9|10)", without), "the place stays"


def test_same_run_gives_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    first, second = (write_run_report(finished, tmp_path / f"{name}.html")[0].read_bytes() for name in "ab")
    assert first == second


def test_unfinished_run_has_curves_and_says_so(tiny_base: Path, tmp_path: Path) -> None:
    pairs = write_rows(tmp_path / "pairs.jsonl", text_rows(12))
    with pytest.raises(Killed):
        fit(make_config(tiny_base, tmp_path, pairs, train={"max_steps": 6}), kill_at(3))
    directory = tmp_path / "runs" / "run"
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # the last line of a killed run
    page, pictures = write_run_report(directory)
    assert page == directory / "report.html"
    assert [picture.stem for picture in pictures] == ["loss", "accuracy", "optimisation"]
    text, _ = parse(page)
    assert "the run is not finished" in text
    assert "--resume" in text


def test_unfinished_second_run_does_not_show_what_the_first_one_left(tiny_base: Path, tmp_path: Path) -> None:
    pairs = write_rows(tmp_path / "pairs.jsonl", text_rows(12))
    directory = fit(make_config(tiny_base, tmp_path, pairs, train={"max_steps": 2}), Quiet()).directory
    os.utime(directory / "config.json")  # a copy of a run may have any times
    first = read_run(directory)
    assert first.record is not None
    assert first.pairs
    with pytest.raises(Killed):
        fit(make_config(tiny_base, tmp_path, pairs, train={"max_steps": 6, "batch_size": 2}), kill_at(3))
    second = read_run(directory)
    assert (second.record, second.pairs, len(second.steps)) == (None, [], 3)
    text, _ = parse(write_run_report(directory)[0])
    assert "the run is not finished" in text
    assert first.record.reward_id not in text
    assert RewardModel.load(str(directory / "checkpoint")).reward_id == first.record.reward_id, "it can still be served"


def test_even_pairs_are_no_mistakes_and_count_half(tiny_base: Path, tmp_path: Path) -> None:
    rows = [{**row, "category": "even", "label": 0.5} for row in text_rows(6)]
    pairs = write_rows(tmp_path / "pairs.jsonl", rows)
    config = make_config(tiny_base, tmp_path, pairs, pairs, train={"max_steps": 1})
    directory = fit(config, Quiet()).directory
    found = read_run(directory)
    assert [pair["label"] for pair in found.pairs] == [0.5] * 6
    assert not any("text" in pair for pair in found.pairs)
    assert by_group(found, "category") == [("even", 6, 0.5, 0.5, 0.5)]
    assert found.steps[0]["accuracy"] == 0.5
    assert found.record is not None
    assert found.record.metrics["bag_of_words"] == 0.5
    assert "None: every chosen answer" in parse(write_run_report(directory)[0])[0]


def test_directory_without_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "report", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "holds no run" in err


@pytest.mark.parametrize("name", ["page", "folder.html"])
def test_output_that_is_no_name_for_a_page_is_refused(name: str, finished: Path, tmp_path: Path) -> None:
    """Without a suffix the page and the folder of its plots would have one name."""
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(RunError, match=r"is no name for a page; end it in \.html"):
        write_run_report(finished, tmp_path / name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder.html"]


def test_missing_matplotlib_is_named(finished: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith("rm_train.report_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RunError, match=r"need matplotlib \(pip install"):
        write_run_report(finished, tmp_path / "page.html")


def test_evaluation_file_keeps_numbers_of_all_and_texts_of_mistakes_only(finished: Path) -> None:
    pairs: list[dict[str, Any]] = read_run(finished).pairs
    assert len(pairs) == 10
    for pair in pairs:
        assert {"where", "prompt", "chosen", "rejected", "chosen_length", "bag_of_words", "category"} <= set(pair)
        assert ("text" in pair) == (pair["chosen"] <= pair["rejected"])
