"""``rm-train check``: what it prints, what fails it, and that ``fit`` says the same first."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rm_train.check import Allowance, CheckInput, examine, parse_allowance
from rm_train.config import SourceConfig
from tests.train.runs import Quiet, make_config, text_rows, write_rows
from tests.train.test_cli import run

FAULTY: list[dict[str, Any]] = [
    *text_rows(6),
    {"prompt": "same? ", "chosen": "yes", "rejected": "yes"},
    {"prompt": "blank? ", "chosen": " ", "rejected": "no"},
    text_rows(6)[0],
]


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    path = write_rows(tmp_path / "faulty.jsonl", FAULTY)
    with path.open("a") as file:
        file.write('{"prompt": "q"\n')
    return path


def test_findings_are_shown_and_the_exit_code_is_1(faulty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "check", faulty)
    assert code == 1, err
    for words in ("9 training pairs", "identical", "empty", "duplicate", "broken", "the longer wins"):
        assert words in out
    assert out.endswith("not fit for training: broken, identical, empty\n")
    assert "Traceback" not in err


def test_clean_pairs_exit_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "check", write_rows(tmp_path / "clean.jsonl", text_rows(60)))
    assert code == 0
    assert "no faults found" in out
    assert "bag of words, held out" in out
    assert "bag of words" not in run(capsys, "check", "--fast", tmp_path / "clean.jsonl")[1]


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "json"])
def test_nothing_to_train_on_is_no_clean_bill(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty file, and one whose K-wise rows are all tied."""
    tied = {"prompt": "q", "completions": ["a", "b"], "ranks": [1, 1]}
    for rows in ([], [tied]):
        file = write_rows(tmp_path / "empty.jsonl", rows)
        code, out, err = run(capsys, "check", file, *options)
        assert (code, out) == (2, "")
        assert err.splitlines()[-1] == f"rm-train: error: {file}: holds no pairs"


def test_context_of_the_model_is_the_limit_where_none_is_named(
    tmp_path: Path, tiny_base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer knows no limit; the model's config says 512."""
    file = write_rows(
        tmp_path / "long.jsonl", [*text_rows(3), {"prompt": "long ", "chosen": "a" * 600, "rejected": "b"}]
    )
    report = json.loads(run(capsys, "check", file, "--model", tiny_base, "--json")[1])
    assert report["max_length"] == 512
    assert [(finding["kind"], finding["count"]) for finding in report["findings"]] == [("over_long", 1)]


def test_json_is_one_document_that_names_what_fails(faulty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "check", faulty, "--json", "--examples", 1)
    assert code == 1
    report = json.loads(out)
    assert report["failing"] == ["broken", "identical", "empty"]
    counts = {finding["kind"]: finding["count"] for finding in report["findings"]}
    assert counts == {"broken": 1, "identical": 1, "empty": 1, "duplicate": 1}
    assert report["findings"][1]["examples"] == [{"where": f"{faulty}:7", "note": "", "text": "same?"}]
    assert "same?" not in run(capsys, "check", faulty, "--json", "--no-text")[1]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--fail-on", "never"], 0),
        (["--fail-on", "warning"], 1),
        (["--allow", "broken=1", "--allow", "identical=50%", "--allow", "empty=1"], 0),
        (["--allow", "broken=1", "--allow", "identical=1%", "--allow", "empty=1"], 1),
        (["--allow", "broken=1", "--allow", "identical=1", "--allow", "empty=1", "--fail-on", "warning"], 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_thresholds_decide_the_exit_code(
    options: list[str], code: int, faulty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "check", faulty, *options)[0] == code


def test_allowances_are_counts_or_shares() -> None:
    assert parse_allowance("leaked=3") == Allowance("leaked", count=3)
    assert parse_allowance("leaked=0.5%") == Allowance("leaked", share=0.005)


@pytest.mark.parametrize("text", ["leeked=3", "leaked", "leaked=x", "leaked=-1", "leaked=101%"])
def test_wrong_allowance_is_wrong_usage(text: str, faulty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "check", faulty, "--allow", text)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert text.partition("=")[0] in err


def test_leaks_lengths_and_columns(tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"q": row["prompt"], "chosen": row["chosen"], "rejected": row["rejected"]} for row in text_rows(5)]
    rows.append({"q": "x" * 200, "chosen": "a", "rejected": "b<|im_end|>"})
    train = write_rows(tmp_path / "train.jsonl", rows)
    held_out = write_rows(tmp_path / "eval.jsonl", [{**rows[0], "q": rows[0]["q"].upper()}])
    options = ["--model", tiny_base, "--max-length", 128, "--column", "prompt=q", "--json"]
    report = json.loads(run(capsys, "check", train, "--eval", held_out, *options)[1])
    assert {finding["kind"] for finding in report["findings"]} == {"leaked", "over_long", "control_tokens"}
    assert (report["max_length"], report["eval_pairs"], report["tokens"]["longest"]) == (128, 1, 202)


def test_a_training_config_names_data_columns_and_limits(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"q": "x" * 200, "chosen": "a", "rejected": "b"}]
    pairs = write_rows(tmp_path / "pairs.jsonl", rows)
    config = tmp_path / "run.yaml"
    config.write_text(
        f"run: {{name: a}}\nmodel: {{base: {tiny_base}, max_length: 100}}\n"
        f"data: {{train: [{pairs}], columns: {{prompt: q}}}}\n"
    )
    code, out, _ = run(capsys, "check", config, "--json")
    report = json.loads(out)
    assert (code, report["max_length"]) == (0, 100)
    assert [finding["kind"] for finding in report["findings"]] == ["over_long"]
    code, _, err = run(capsys, "check", config, pairs)
    assert (code, err.count("\n")) == (2, 1)
    assert "examined alone" in err


def test_fit_prints_the_findings_first_and_keeps_them(tiny_base: Path, tmp_path: Path) -> None:
    from rm_train.fit import fit

    pairs = write_rows(tmp_path / "pairs.jsonl", FAULTY)
    held_out = write_rows(tmp_path / "eval.jsonl", text_rows(3, seed=9))
    source = {"path": str(pairs), "mix_weight": 2.0}
    config = make_config(tiny_base, tmp_path, pairs, held_out, data={"train": [source]}, train={"max_steps": 1})
    reporter = Quiet()
    result = fit(config, reporter)
    found = [text for text in reporter.said if text.startswith("check: ")]
    # a row that is mixed in twice is no duplicate
    assert [text.split(": ")[2].split(" (")[0] for text in found] == ["identical", "empty", "duplicate"]
    assert found[0].startswith("check: error: identical (1 of 12): ")
    assert f"first {pairs}:7" in found[0]
    stored = json.loads((result.directory / "check.json").read_text())
    assert [finding["kind"] for finding in stored["findings"]] == ["identical", "empty", "duplicate"]
    assert "same?" not in json.dumps(stored)


def test_fit_keeps_what_shows_in_the_rendered_pairs(tiny_base: Path, tmp_path: Path) -> None:
    """The same findings as ``check --model`` has, at the same places; a row that is mixed in twice counts once."""
    from rm_train.fit import fit

    rows = [*text_rows(4), {"prompt": "long " * 40, "chosen": "a", "rejected": "b"}]
    token = AutoTokenizer.from_pretrained(tiny_base).eos_token
    held_out = [*text_rows(2, seed=9), {"prompt": "q", "chosen": f"a{token}b", "rejected": "c"}]
    pairs, apart = write_rows(tmp_path / "pairs.jsonl", rows), write_rows(tmp_path / "eval.jsonl", held_out)
    source = {"path": str(pairs), "mix_weight": 2.0}
    config = make_config(tiny_base, tmp_path, pairs, apart, data={"train": [source]}, train={"max_steps": 1})
    reporter = Quiet()
    stored = json.loads((fit(config, reporter).directory / "check.json").read_text())
    sources = [[SourceConfig(path=str(path))] for path in (pairs, apart)]
    wanted = examine(CheckInput(*sources, model=str(tiny_base), max_length=128))
    assert {kind["kind"]: [example["where"] for example in kind["examples"]] for kind in stored["findings"]} == {
        finding.kind: finding.locations for finding in wanted.findings
    }
    assert {finding.kind for finding in wanted.findings} == {"over_long", "control_tokens"}
    assert stored["max_length"] == 128
    said = [text.split(": ")[2] for text in reporter.said if text.startswith("check: ")]
    assert said == ["over_long (1 of 8)", "control_tokens (1 of 8)"]
