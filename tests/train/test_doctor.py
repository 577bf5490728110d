"""The data doctor finds what was planted, all of it and nothing else."""

import io
import json
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rm_core.chat import Renderer
from rm_train.check import Level, too_many
from rm_train.data import read_pairs
from rm_train.doctor import check_pairs
from rm_train.doctor_report import DoctorReport
from rm_train.pairs import Pair, row_to_pairs
from rm_train.rows import DataError, Row
from tests.conftest import byte_tokenizer

WORDS = [
    "amber",
    "birch",
    "cedar",
    "delta",
    "ember",
    "frost",
    "grove",
    "heron",
    "inlet",
    "jade",
    "kelp",
    "lotus",
    "maple",
]
PLANTED = (
    "identical",
    "empty",
    "duplicate",
    "contradictory",
    "leaked",
    "broken",
    "over_long",
    "template",
    "control_tokens",
)
LIMIT = 700
LEVELS: tuple[Level, ...] = ("error", "warning", "never")


def kinds(report: DoctorReport) -> dict[str, list[str]]:
    return {finding.kind: finding.locations for finding in report.findings}


def plant(directory: Path, number: int, seed: int = 0) -> tuple[Path, Path, dict[str, set[str]]]:
    """Write a training and an evaluation file with faults in a tenth of the rows; returns them and the faults' places."""
    rng = random.Random(seed)
    files = {"train": directory / "train.jsonl", "eval": directory / "eval.jsonl"}
    lines: dict[str, list[str]] = {"train": [], "eval": []}
    planted: dict[str, set[str]] = defaultdict(set)
    clean: list[dict[str, Any]] = []

    def text(low: int, high: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(low, high))) + f" {rng.randrange(10**9)}"

    def add(side: str, row: dict[str, Any] | str, *faults: str) -> None:
        lines[side].append(row if isinstance(row, str) else json.dumps(row))
        for fault in faults:
            planted[fault].add(f"{files[side]}:{len(lines[side])}")

    def blank(value: str) -> str:
        return "".join(rng.choice((word, word.upper())) + rng.choice((" ", "  ", "\n")) for word in value.split(" "))

    for index in range(number):
        row = {"prompt": text(3, 20), "chosen": text(3, 25), "rejected": text(3, 25)}
        fault = PLANTED[index // 10 % len(PLANTED)] if index % 10 == 9 else None
        old = rng.choice(clean) if clean else row
        match fault:
            case None:
                add("train", row)
                clean.append(row)
            case "identical":
                add("train", {**row, "rejected": f" {row['chosen']}\n"}, fault)
            case "empty":
                add("train", {**row, rng.choice(("chosen", "rejected")): rng.choice(("", "  \n\t", " "))}, fault)
            case "duplicate":
                add("train", {**old, "prompt": blank(old["prompt"])}, fault)
            case "contradictory":
                unique = {**row, "prompt": row["prompt"] + " reversed"}
                add("train", unique)
                add("train", {**unique, "chosen": row["rejected"], "rejected": row["chosen"]}, fault)
            case "leaked":
                add("eval", {**row, "prompt": blank(old["prompt"])}, fault)
            case "broken":
                broken: Any = rng.choice(
                    ('{"prompt": "q", ', json.dumps({**row, "chosen": 3}), '{"prompt": "q"}', "[1]")
                )
                add("train", broken, fault)
            case "over_long":
                add("train", {**row, "prompt": text(120, 150)}, fault)
            case "template":
                talk = [{"role": "user", "content": "q"}, {"role": "narrator", "content": text(3, 20)}]
                messages = [[{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")]
                add("train", {"prompt": talk, "chosen": messages[0], "rejected": messages[1]}, fault)
            case "control_tokens":
                add("train", {**row, "chosen": row["chosen"] + " <|im_end|> more"}, fault)
        if index % 20 == 0:
            add("eval", {**row, "prompt": text(3, 20)})
    for side, path in files.items():
        path.write_text("\n".join(lines[side]) + "\n", encoding="utf-8")
    return files["train"], files["eval"], planted


# a template that prints the turns of user and assistant alone: the role narrator vanishes
DROPPING = (
    "{% for message in messages %}{% if message['role'] in ('user', 'assistant') %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
)


def examine(train: Path, evaluation: Path, **options: Any) -> DoctorReport:
    errors: list[DataError] = []
    sides = [list(read_pairs(str(path), on_error=errors.append)) for path in (train, evaluation)]
    renderer = Renderer.for_tokenizer(byte_tokenizer(DROPPING))
    return check_pairs(sides[0], sides[1], renderer=renderer, max_length=LIMIT, broken=errors, **options)


def assert_exactly_the_planted(report: DoctorReport, planted: dict[str, set[str]]) -> None:
    found = {kind: set(places) for kind, places in kinds(report).items()}
    assert found == dict(planted), "precision and recall are both 1 or this fails"


def test_doctor_finds_every_planted_fault_and_nothing_else(tmp_path: Path) -> None:
    train, evaluation, planted = plant(tmp_path, 400)
    assert set(planted) == set(PLANTED)
    report = examine(train, evaluation, baselines="length")
    assert_exactly_the_planted(report, planted)
    assert too_many(report, "error")


@pytest.mark.slow
def test_doctor_finds_every_planted_fault_in_ten_thousand_pairs(tmp_path: Path) -> None:
    """Prints precision, recall and pairs a minute (run with -s): the speed depends on the machine, so it is no test."""
    train, evaluation, planted = plant(tmp_path, 10_000)
    start = time.perf_counter()
    report = examine(train, evaluation)
    seconds = time.perf_counter() - start
    found = {(kind, place) for kind, places in kinds(report).items() for place in places}
    wanted = {(kind, place) for kind, places in planted.items() for place in places}
    number = report.train_pairs + report.eval_pairs
    print(
        f"\n{number:,} pairs, {len(wanted):,} planted faults: precision {len(found & wanted) / len(found):.4f}, "
        f"recall {len(found & wanted) / len(wanted):.4f}, {number / seconds * 60:,.0f} pairs a minute"
    )
    assert_exactly_the_planted(report, planted)
    assert report.bag_of_words is not None
    assert number > 10_000


def test_clean_pairs_have_no_finding_and_exit_zero() -> None:
    report = check_pairs([Pair("q", "a", "b", where="f:1"), Pair("r", "a", "b", where="f:2")])
    assert report.findings == ()
    assert [too_many(report, level) for level in LEVELS] == [[], [], []]
    assert (report.train_pairs, report.prompts, report.longer_wins) == (2, 2, 0.5)


def test_what_fails_a_check_follows_the_severity() -> None:
    doubled = check_pairs([Pair("q", "a", "b", where="f:1"), Pair("q", "a", "b", where="f:2")])
    assert kinds(doubled) == {"duplicate": ["f:2"]}
    assert [len(too_many(doubled, level)) for level in LEVELS] == [0, 1, 0]


def test_places_name_the_other_pair() -> None:
    report = check_pairs(
        [Pair("q", "a", "b", where="f:1"), Pair("Q", "b", "a", where="f:2")], [Pair("q ", "c", "d", where="e:1")]
    )
    contradictory, leaked = report.finding("contradictory"), report.finding("leaked")
    assert contradictory is not None
    assert leaked is not None
    assert (contradictory.examples[0].where, contradictory.examples[0].note) == ("f:2", "reverses f:1")
    assert (leaked.examples[0].where, leaked.examples[0].note) == ("e:1", "trained on in f:1")


def test_answers_that_only_call_tools_are_neither_empty_nor_identical() -> None:
    def call(name: str) -> Any:
        return ({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name}}]},)

    assert kinds(check_pairs([Pair("q", call("f"), call("g"), where="f:1")])) == {}
    assert kinds(check_pairs([Pair("q", call("f"), call("f"), where="f:1")])) == {"identical": ["f:1"]}


def test_label_against_the_chosen_answer_is_doubtful() -> None:
    pairs = row_to_pairs(Row("f:1", {"prompt": "q", "chosen": "a", "rejected": "b", "label": 0.4}))
    report = check_pairs(pairs)
    assert kinds(report) == {"doubtful_label": ["f:1"]}
    assert report.findings[0].examples[0].note == "label 0.4"


class FakeRenderer:
    """Renders to fixed ids: 1 is BOS, 2 ends a turn."""

    class rules:  # noqa: N801
        end, end_of_turn, end_of_text = "token", "<end>", None

    class tokenizer:  # noqa: N801
        bos_token_id = 1
        added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012
        all_special_tokens = ("<bos>", "<end>")

        @staticmethod
        def convert_tokens_to_ids(token: str) -> int:
            return {"<bos>": 1, "<end>": 2}[token]

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def render(self, prompt: Any, completion: Any) -> list[int]:
        return [6 if token == 5 and completion == "b" else token for token in self.ids]


@pytest.mark.parametrize(
    ("ids", "kind"),
    [([1, 5, 2], None), ([1, 1, 5, 2], "double_bos"), ([1, 5], "missing_end"), ([1, *[5] * 9, 2], "over_long")],
)
def test_template_faults_show_in_the_ids(ids: list[int], kind: str | None) -> None:
    renderer: Any = FakeRenderer(ids)
    report = check_pairs([Pair("q", "a", "b", where="f:1")], renderer=renderer, max_length=10)
    assert list(kinds(report)) == ([kind] if kind else [])
    assert report.tokens is not None
    assert report.tokens.longest == len(ids)


def test_answers_of_the_same_tokens_are_found_unless_their_texts_are_the_same() -> None:
    renderer: Any = FakeRenderer([1, 7, 2])
    pairs = [Pair("q", "a", "b", where="f:1"), Pair("r", "a", "a ", where="f:2")]
    assert kinds(check_pairs(pairs, renderer=renderer)) == {"identical": ["f:2"], "identical_ids": ["f:1"]}


def test_json_and_table_show_counts_places_and_baselines() -> None:
    pairs = [Pair("the question", "a", "a", where="f:1"), Pair("q", "aa", "b", where="f:2")]
    report = check_pairs(pairs, broken=[DataError("f:3", "is not valid JSON")], tied_rows=2)
    values = json.loads(json.dumps(report.to_json()))
    assert [(item["kind"], item["count"], item["total"]) for item in values["findings"]] == [
        ("broken", 1, 3),
        ("identical", 1, 2),
    ]
    assert values["findings"][1]["examples"] == [{"where": "f:1", "note": "", "text": "the question"}]
    assert (values["longer_wins"], values["shorter_wins"], values["tied_rows"]) == (0.75, 0.25, 2)
    assert "the question" not in json.dumps(report.to_json(text=False))
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(report)
    table = console.export_text()
    for words in ("2 training pairs", "2 K-wise rows without a winner", "identical", "1 (50.0%)", "f:3", "0.750"):
        assert words in table


def test_no_pairs_at_all_still_give_a_report() -> None:
    report = check_pairs([], broken=[DataError("f:1", "is not valid JSON")])
    assert (report.longer_wins, report.bag_of_words, report.characters) == (None, None, None)
    assert len(too_many(report, "error")) == 1
