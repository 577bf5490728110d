"""Evaluation of files that pass through: pairs, best-of-N sets, and models beside each other."""

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from rm_core.checkpoint import read_record
from rm_core.model import RewardModel
from rm_train import evaluation as evaluation_module
from rm_train.baselines import accuracy_of_margins, longer_wins
from rm_train.best_of import ScoredBestOf, best_of_report, is_best_of, read_best_of
from rm_train.console import report_table
from rm_train.data import first_rows, read_items, read_pairs
from rm_train.encode import encode_pairs
from rm_train.eval_table import EvalTable, full_report, table_of
from rm_train.evaluation import Rewards, evaluate_stream, length_limit, quick_metrics, score_pairs
from rm_train.fit import fit
from rm_train.report_plots import by_group
from rm_train.rows import DataError, Row
from rm_train.run_directory import Run, write_evaluation
from rm_train.scoring import score_sequences
from tests.conftest import make_checkpoint, save_base
from tests.train.runs import Quiet, chat_rows, make_config, text_rows, write_rows
from tests.train.test_cli import run

BEST: list[dict[str, Any]] = [
    {"id": "0", "prompt": "Which? ", "chosen": ["this one"], "rejected": ["a", "b", "c"], "subset": "Facts"},
    {"id": "1", "prompt": "Why? ", "chosen": ["so", "thus"], "rejected": ["x"], "subset": "Facts"},
    {"id": "ref:7", "prompt": "A colour? ", "chosen": ["red"], "rejected": ["stone", "sky"], "subset": "Ties"},
    {"id": "tied:7", "prompt": "A colour? ", "chosen": ["red", "blue"], "rejected": ["stone"], "subset": "Ties"},
]


def test_stream_gives_the_numbers_of_pairs_in_memory(
    tiny_model: RewardModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of three, texts and chats mixed, K-wise rows among them."""
    kwise = {"prompt": "rank? ", "completions": ["a", "bb", "ccc"], "ranks": [2, 1, 3]}
    file = write_rows(tmp_path / "pairs.jsonl", [*text_rows(5), *chat_rows(3, seed=1), kwise])
    pairs = list(read_pairs(str(file)))
    encoded = encode_pairs(pairs, tiny_model.renderer, tiny_model.max_length)
    rewards = score_pairs(tiny_model, encoded, max_tokens=512)
    whole = table_of(encoded, rewards.chosen, rewards.rejected)
    monkeypatch.setattr(evaluation_module, "_CHUNK", 3)
    counted: list[int] = []
    found = evaluate_stream(tiny_model, read_items(str(file)), max_tokens=64, progress=counted.append)
    assert sum(counted) == len(pairs) == len(found.table)
    np.testing.assert_allclose(found.table.chosen, whole.chosen, atol=1e-4)
    assert full_report(found.table)["by_source"] == full_report(whole)["by_source"]
    assert full_report(found.table)["accuracy"] == full_report(whole)["accuracy"]


def test_table_keeps_numbers_and_no_texts() -> None:
    """Ten thousand pairs in less than a megabyte, whatever their length."""
    import tracemalloc

    from rm_train.encode import EncodedPair
    from rm_train.pairs import Pair

    item = EncodedPair([1] * 50_000, [2], True, Pair("q", "long " * 10_000, "b", category="c", source="s"))
    tracemalloc.start()
    table = EvalTable()
    table.add(item, 1.0, 0.0)
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(9_999):
        table.add(item, 1.0, 0.0)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 1_000_000
    assert len(table) == table.truncated == 10_000


def test_scores_come_back_in_order_whatever_the_budget(tiny_model: RewardModel) -> None:
    sequences = [[1 + (7 * i) % 11] * (1 + (i * 5) % 17) for i in range(40)]
    alone = [float(tiny_model.score_ids([ids])[0]) for ids in sequences]
    for budget in (16, 64, 4096):
        counted: list[int] = []
        found = score_sequences(tiny_model, sequences, max_tokens=budget, progress=counted.append)
        np.testing.assert_allclose(found, alone, atol=1e-4)
        assert sum(counted) == len(sequences)


def test_log_loss_counts_soft_labels_and_weights_as_training_does() -> None:
    """Differences 2 (label 3/4, weight 1) and −1 (all agree, weight 3); f = −log σ:
    (1·(3/4 f(2) + 1/4 f(−2)) + 3·f(−1)) / 4."""
    from rm_train.encode import EncodedPair
    from rm_train.pairs import Pair

    pairs = [
        EncodedPair([1], [2], False, Pair("q", "a", "b", label=0.75)),
        EncodedPair([1], [2], False, Pair("r", "a", "b", weight=3.0)),
    ]
    chosen, rejected = np.array([2.0, 0.0]), np.array([0.0, 1.0])

    def f(difference: float) -> float:
        return float(np.logaddexp(0, -difference))

    expected = pytest.approx((0.75 * f(2) + 0.25 * f(-2) + 3 * f(-1)) / 4)
    assert full_report(table_of(pairs, chosen, rejected))["log_loss"] == expected
    assert quick_metrics(Rewards(chosen, rejected), pairs)["loss"] == expected


def test_calibration_and_accuracy_count_soft_labels_and_weights() -> None:
    """Differences 2, −2, 2, labels 3/4, 3/4, 1/2, weights 3, 1, 0.

    What the model prefers is preferred by 3/4, 1/4 and 1/2, by weight (3·3/4 + 1/4)/4 = 5/8: the loss is least where
    σ(2/T) = 5/8, T = 2/ln(5/3), and then confidence equals accuracy. Accuracies count right, wrong, even: (1 + 0 + 1/2)/3.
    """
    from rm_train.encode import EncodedPair
    from rm_train.pairs import Pair

    pairs = [
        EncodedPair([1], [2], False, Pair("q", "long", "b", label=0.75, weight=3.0, category="c")),
        EncodedPair([1], [2], False, Pair("r", "long", "b", label=0.75, weight=1.0, category="c")),
        EncodedPair([1], [2], False, Pair("s", "long", "b", label=0.5, weight=0.0, category="even")),
    ]
    chosen, rejected = np.array([2.0, 0.0, 2.0]), np.array([0.0, 2.0, 0.0])
    report = full_report(table_of(pairs, chosen, rejected))
    calibration = report["calibration"]
    assert calibration["temperature"] == pytest.approx(2 / math.log(5 / 3), rel=1e-6)
    assert calibration["expected_error"] == pytest.approx(0.0, abs=1e-6)
    (used,) = [row for row in calibration["reliability"] if row["pairs"]]
    assert (used["pairs"], used["confidence"], used["accuracy"]) == (3, pytest.approx(0.625), pytest.approx(0.625))
    assert report["accuracy"]["value"] == pytest.approx(0.5)
    assert report["longer_wins"] == pytest.approx(2.5 / 3)
    assert report["by_category"]["even"]["accuracy"] == 0.5
    assert report["length"]["chosen_longer"]["accuracy"] == pytest.approx(0.5)
    assert quick_metrics(Rewards(chosen, rejected), pairs)["accuracy"] == pytest.approx(0.5)


def test_shares_of_processes_are_put_together_with_their_heads() -> None:
    whole = Rewards(np.arange(5.0), -np.arange(5.0), (np.arange(10.0).reshape(5, 2), np.ones((5, 2))))
    assert whole.heads is not None
    parts = [
        Rewards(whole.chosen[p::2], whole.rejected[p::2], (whole.heads[0][p::2], whole.heads[1][p::2]))
        for p in range(2)
    ]
    together = Rewards.interleave(parts)
    assert together.heads is not None
    for found, wanted in zip((together.chosen, *together.heads), (whole.chosen, *whole.heads), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert Rewards.interleave([Rewards(whole.chosen, whole.rejected)]).heads is None


def test_accuracy_by_length_difference(tiny_model: RewardModel) -> None:
    from rm_train.encode import EncodedPair
    from rm_train.pairs import Pair

    table = EvalTable()
    for chosen, rejected, right in ((10, 30, 1), (10, 15, 0), (100, 99, 1), (15, 10, 0), (30, 10, 1)):
        pair = Pair("q", "x" * chosen, "y" * rejected)
        table.add(EncodedPair([1], [2], False, pair), float(right), 0.5)
    bands = full_report(table)["by_length_difference"]
    assert {name: share["accuracy"] for name, share in bands.items()} == {
        "chosen under half": 1.0,
        "chosen shorter": 0.0,
        "within 10 %": 1.0,
        "chosen longer": 0.0,
        "chosen over double": 1.0,
    }


def test_kwise_row_counts_no_more_than_a_pair_in_every_accuracy(
    tiny_model: RewardModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row of eight answers is 28 pairs, all of them got wrong, beside two pairs that are got right: 2 of 3 rows and 2
    of 30 pairs, whatever the rows weigh in the loss."""
    completions = ["a" * (i + 1) for i in range(8)]
    rows = [
        {"prompt": "rank? ", "completions": completions, "ranks": list(range(8)), "weight": 5, "category": "many"},
        {"prompt": "one? ", "chosen": "bbb", "rejected": "b", "category": "few"},
        {"prompt": "two? ", "chosen": "bbb", "rejected": "b", "category": "few"},
    ]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    pairs = list(read_pairs(str(file)))
    encoded = encode_pairs(pairs, tiny_model.renderer, 128)
    chosen = np.array([0.0 if pair.category == "many" else 1.0 for pair in pairs])
    spread = np.stack([np.arange(3.0)] * len(pairs))  # the same for every answer
    heads = (chosen[:, None] + spread, 0.5 + spread)
    report = full_report(table_of(encoded, chosen, np.full(len(pairs), 0.5), heads))
    assert (report["pairs"], report["rows"]) == (30, 3)
    assert report["accuracy"]["value"] == pytest.approx(2 / 3)
    assert report["accuracy_of_pairs"] == pytest.approx(2 / 30)
    assert report["accuracy"]["low"] == 0.0
    assert report["accuracy"]["high"] == 1.0
    assert report["longer_wins"] == pytest.approx(2 / 3), "in the row of eight the shorter one is always the better"
    assert report["by_category"]["many"] == {"accuracy": 0.0, "pairs": 28}
    (source,) = report["by_source"].values()
    assert source == {"accuracy": pytest.approx(2 / 3), "pairs": 30}
    bands = report["by_length_difference"]
    assert bands["chosen over double"] == {"accuracy": 1.0, "pairs": 2}
    assert report["length"]["chosen_longer"]["accuracy"] == pytest.approx(1.0)
    assert report["heads"]["accuracy_mean_minus_std"] == pytest.approx(2 / 3)
    assert quick_metrics(Rewards(chosen, np.full(len(pairs), 0.5)), encoded)["accuracy"] == pytest.approx(2 / 3)
    assert longer_wins(pairs) == pytest.approx(2 / 3)
    assert accuracy_of_margins((chosen - 0.5).tolist(), pairs) == pytest.approx(2 / 3)

    write_evaluation(tmp_path, Rewards(chosen, np.full(len(pairs), 0.5)), encoded, None)
    lines = [json.loads(line) for line in (tmp_path / "evaluation.jsonl").read_text().splitlines()]
    for line in lines:
        line["category"] = "all"
    by_all = by_group(Run(tmp_path, {}, [], [], None, lines, None), "category")
    assert by_all == [("all", 30, pytest.approx(2 / 3), pytest.approx(2 / 3), None)]
    console = Console(width=120)
    with console.capture() as caught:
        console.print(report_table(report))
    assert "3, each counting one in an accuracy" in caught.get()
    assert "accuracy of pairs" in caught.get()
    plain = run(capsys, "eval", tiny_model.name, write_rows(tmp_path / "plain.jsonl", text_rows(3)))[1]
    assert "accuracy" in plain
    assert "accuracy of pairs" not in plain


# ------------------------------------------------------------------ best of N


def test_lists_of_answers_are_best_of_n_and_lists_of_messages_are_not() -> None:
    message = {"role": "assistant", "content": "a"}
    assert is_best_of({"chosen": ["a"], "rejected": ["b"]}, {})
    assert is_best_of({"chosen": [[message]], "rejected": "b"}, {})
    assert not is_best_of({"chosen": [message], "rejected": [message]}, {})
    assert not is_best_of({"chosen": "a", "rejected": "b"}, {})
    row = read_best_of(
        Row("f:1", {"prompt": [{"role": "user", "content": "q"}], "chosen": ["a"], "rejected": ["b"]}), {}
    )
    assert row.answers == (({"role": "assistant", "content": "a"},), ({"role": "assistant", "content": "b"},))


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": "q", "chosen": ["a"], "rejected": []}, "rejected: needs at least one answer"),
        ({"prompt": "q", "chosen": ["a"]}, "rejected: is missing"),
        ({"prompt": "q", "chosen": ["a"], "rejected": [3]}, r"rejected\[0\]: must be text"),
        ({"prompt": "q", "chosen": ["a"], "rejected": [[{"role": "assistant", "content": "b"}]]}, "mixes text and"),
        ({"prompt": "q", "chosen": ["a"], "rejected": ["b"], "tools": [{"name": "f"}]}, "tools: tool schemas are not"),
    ],
)
def test_wrong_best_of_n_row_is_named(row: dict[str, Any], named: str) -> None:
    with pytest.raises(DataError, match=rf"^f:1: .*{named}"):
        read_best_of(Row("f:1", row), {})


def test_interval_resamples_best_of_n_rows_that_stand_on_one_line(tmp_path: Path) -> None:
    """Of 400 prompts three quarters are right: 0.75 ± 1.96 · sqrt(0.75 · 0.25 / 400), about 0.708 to 0.792."""
    file = tmp_path / "best.json"
    file.write_text(json.dumps([{**BEST[0], "subset": None} for _ in range(400)]), encoding="utf-8")
    rows = [
        ScoredBestOf(np.array([float(index % 4 > 0), 0.5, 0.5, 0.5]), 1, None, None, item.where, False)
        for index, item in enumerate(read_items(str(file)))
    ]
    accuracy = best_of_report(rows)["accuracy"]
    assert accuracy["value"] == 0.75
    assert (accuracy["low"], accuracy["high"]) == pytest.approx((0.708, 0.792), abs=0.01)


def test_best_of_n_rows_are_no_training_pairs(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "best.jsonl", [*text_rows(1), BEST[0]])
    with pytest.raises(DataError, match=r"best\.jsonl:2: chosen: holds a list of answers"):
        list(read_pairs(str(file)))


def scored(rewards: list[float], num_right: int, subset: str | None = None, id_: str = "0") -> ScoredBestOf:
    return ScoredBestOf(np.array(rewards), num_right, subset, id_, f"f:{id_}", False)


def test_best_of_n_report_by_subset() -> None:
    """Facts: right, then a tie of the right with one wrong answer (1/2). Maths: wrong. Mean of subsets (3/4 + 0)/2."""
    rows = [
        scored([3.0, 1.0, 2.0], 1, "Facts", "0"),
        scored([3.0, 3.0, 2.0], 1, "Facts", "1"),
        scored([0.0, 1.0], 1, "Maths", "2"),
    ]
    report = best_of_report(rows)
    assert report["accuracy"]["value"] == pytest.approx(0.5)
    assert report["by_subset"] == {"Facts": {"score": 0.75, "prompts": 2}, "Maths": {"score": 0.0, "prompts": 1}}
    assert report["mean_of_subsets"] == pytest.approx(0.375)


def test_ties_couples_must_be_whole() -> None:
    """A gap of 2 with a spread of 0.5 on both sides: 0.3 + 0.3 + 0.2 + 0.2 + 0.01·tanh(2/0.5 - 1)."""
    couple = [scored([3.0, 1.0], 1, "Ties", "ref:7"), scored([3.5, 3.0, 1.0], 2, "Ties", "tied:7")]
    report = best_of_report(couple)
    assert report["by_subset"]["Ties"]["score"] == pytest.approx(1.0 + 0.01 * math.tanh(3))
    assert "accuracy" not in report
    with pytest.raises(DataError, match="only ref:7"):
        best_of_report(couple[:1])
    with pytest.raises(DataError, match="is called ref:N or tied:N, not '3'"):
        best_of_report([scored([1.0, 0.0], 1, "Ties", "3")])


def test_eval_takes_pairs_and_best_of_n_rows_of_one_file(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_rows(tmp_path / "both.jsonl", [*text_rows(4), *BEST])
    code, out, err = run(capsys, "eval", tiny_checkpoint, file, "--dtype", "float32", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["pairs"] == 4
    assert report["best_of_n"]["prompts"] == 4
    assert set(report["best_of_n"]["by_subset"]) == {"Facts", "Ties"}
    model = RewardModel.load(str(tiny_checkpoint), dtype="float32")
    ids = [model.renderer.render("Which? ", answer) for answer in ("this one", "a", "b", "c")]
    first = model.score_ids(ids)
    code, out, _ = run(capsys, "eval", tiny_checkpoint, write_rows(tmp_path / "one.jsonl", BEST[:1]))
    assert code == 0
    assert "best-of-N accuracy" in out
    assert f"{float(first[0] > first[1:].max()):.3f}" in out


# ------------------------------------------------------------------ the first pairs


def test_limit_takes_the_first_pairs_and_reads_no_further(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind what is taken the files hold what is no row at all, and are not even looked through for their length."""
    kwise = {"prompt": "rank? ", "completions": ["a", "bb", "ccc"], "ranks": [2, 1, 3]}
    rows = [*text_rows(2), kwise, BEST[0]]
    whole = write_rows(tmp_path / "whole.jsonl", rows)
    broken = tmp_path / "broken.jsonl"
    broken.write_text(whole.read_text(encoding="utf-8") + "no JSON\n", encoding="utf-8")
    options = ["--dtype", "float32", "--json"]
    expected = json.loads(run(capsys, "eval", tiny_checkpoint, whole, *options)[1])
    assert run(capsys, "eval", tiny_checkpoint, broken, *options)[0] == 2
    monkeypatch.setattr("rm_train.evaluate.count_rows", lambda source: pytest.fail("the file was looked through"))
    code, out, err = run(capsys, "eval", tiny_checkpoint, broken, *options, "--limit", 6)
    assert code == 0, err
    found = json.loads(out)
    assert (found["pairs"], found["rows"], found["best_of_n"]["prompts"]) == (5, 3, 1)
    assert found["accuracy"] == expected["accuracy"]
    code, out, err = run(capsys, "compare", tiny_checkpoint, tiny_checkpoint, broken, *options, "--limit", 2)
    assert code == 0, err
    assert [model["pairs"] for model in json.loads(out)["models"]] == [2, 2]


@pytest.mark.parametrize(
    ("limit", "taken", "asked"), [(None, 6, 6), (1, 1, 1), (2, 1, 2), (4, 4, 4), (5, 5, 5), (6, 6, 6)]
)
def test_limit_takes_rows_whole(limit: int | None, taken: int, asked: int, tmp_path: Path) -> None:
    """A pair, three pairs of one row, two pairs: the row of three comes whole or not at all."""
    kwise = {"prompt": "rank? ", "completions": ["a", "bb", "ccc"], "ranks": [2, 1, 3]}
    plain = text_rows(3)
    pairs = list(read_pairs(str(write_rows(tmp_path / "rows.jsonl", [plain[0], kwise, *plain[1:]]))))
    seen: list[Any] = []

    def items() -> Any:
        for pair in pairs:
            seen.append(pair)
            yield pair

    assert list(first_rows(items(), limit)) == pairs[:taken]
    assert len(seen) == asked
    with pytest.raises(DataError, match="a limit of 2 pairs does not hold this row, which has 3"):
        list(first_rows(pairs[1:], 2))


# ------------------------------------------------------------------ the length limit


def long_rows(count: int) -> list[dict[str, Any]]:
    return [{**row, "prompt": f"{row['prompt']}{'much too long ' * 20}"} for row in text_rows(count, seed=5)]


def test_eval_gives_the_numbers_that_fit_recorded_on_the_same_file(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained at 128 tokens, on a model that reads 512: both cut the same pairs at the same place."""
    file = write_rows(tmp_path / "pairs.jsonl", [*text_rows(6), *long_rows(6), *chat_rows(2, seed=1)])
    train = {"max_steps": 3, "learning_rate": 3e-3}
    result = fit(make_config(tiny_base, tmp_path, file, file, train=train), Quiet())
    assert result.record is not None
    recorded = result.record.metrics
    checkpoint = result.directory / "checkpoint"
    report = json.loads(run(capsys, "eval", checkpoint, file, "--dtype", "float32", "--json")[1])
    assert (report["max_length"], report["truncated"]) == (recorded["max_length"], recorded["truncated"]) == (128, 6)
    assert report["accuracy"] == recorded["accuracy"]
    assert report["log_loss"] == pytest.approx(recorded["log_loss"], abs=1e-4)
    assert report["reward"]["mean"] == pytest.approx(recorded["reward"]["mean"], abs=1e-4)

    shown = run(capsys, "eval", checkpoint, file, "--dtype", "float32")[1].split("\n")
    assert any(line.split() == ["length", "limit", "128", "tokens"] for line in shown)
    assert any("14 (6 cut to the length limit)" in line for line in shown)
    whole = json.loads(run(capsys, "eval", checkpoint, file, "--dtype", "float32", "--max-length", 512, "--json")[1])
    assert (whole["max_length"], whole["truncated"]) == (512, 0)
    assert whole["log_loss"] != pytest.approx(recorded["log_loss"], abs=1e-4)
    code, _, err = run(capsys, "eval", checkpoint, file, "--max-length", 513)
    assert code == 2
    assert "reads at most 512 tokens; --max-length is 513" in err


def test_compare_and_calibrate_cut_where_training_did(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some 300 tokens a pair; recorded are 256. Best-of-N rows are cut alike."""
    best = {"prompt": "y" * 300, "chosen": ["a"], "rejected": ["b"]}
    file = write_rows(tmp_path / "pairs.jsonl", [*long_rows(3), best])
    arguments = ["compare", tiny_checkpoint, tiny_checkpoint, file, "--dtype", "float32"]
    for options, limit, cut in (([], 256, 3), (["--max-length", 400], 400, 0)):
        models = json.loads(run(capsys, *arguments, *options, "--json")[1])["models"]
        found = {(model["max_length"], model["truncated"], model["best_of_n"]["truncated"]) for model in models}
        assert found == {(limit, cut, cut // 3)}
    assert "3 cut to 256 tokens" in run(capsys, *arguments)[1]
    for name, options, cut in (("recorded", [], 3), ("given", ["--training-length", 400], 0)):
        output = tmp_path / name
        assert run(capsys, "calibrate", tiny_checkpoint, file, "--output", output, *options)[0] == 0
        record = read_record(output)
        assert record is not None
        assert (record.metrics["max_length"], record.metrics["truncated"]) == (record.training_length, cut)


def test_model_without_a_training_length_is_cut_where_it_ends(tiny_model: RewardModel) -> None:
    adopted = copy.copy(tiny_model)
    adopted.record = None
    assert length_limit(adopted) == adopted.max_length == 512
    assert length_limit(tiny_model) == 256
    assert length_limit(tiny_model, 512) == 512


# ------------------------------------------------------------------ compare


@pytest.fixture(scope="module")
def other_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("other")
    return make_checkpoint(directory / "checkpoint", save_base(directory / "base", num_hidden_layers=3))


def test_compare_of_a_model_with_itself_finds_no_difference(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_rows(tmp_path / "pairs.jsonl", [*text_rows(10), *BEST])
    code, out, err = run(capsys, "compare", tiny_checkpoint, tiny_checkpoint, file, "--dtype", "float32", "--json")
    assert code == 0, err
    (found,) = json.loads(out)["comparisons"]
    assert found["pairs"]["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert (found["pairs"]["p_value"], found["best_of_n"]["difference"]["value"]) == (1.0, 0.0)
    assert found["rewards"]["scale"] == pytest.approx(1.0, abs=1e-6)
    assert found["rewards"]["offset"] == pytest.approx(0.0, abs=1e-6)


def test_compare_maps_the_rewards_of_one_model_onto_the_other(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second model is the first with its head three times as large: scale 3, offset 0, the same accuracy."""
    from safetensors.torch import load_file, save_file

    scaled = tmp_path / "scaled"
    shutil.copytree(tiny_checkpoint, scaled)
    (scaled / "reward_model.json").unlink()
    weights = load_file(scaled / "adapter_model.safetensors")
    save_file(
        {name: value * 3 if "score" in name else value for name, value in weights.items()},
        scaled / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    shutil.copytree(tiny_checkpoint, tmp_path / "plain")
    (tmp_path / "plain" / "reward_model.json").unlink()  # both then end their texts as the template does
    file = write_rows(tmp_path / "pairs.jsonl", text_rows(12))
    code, out, err = run(capsys, "compare", tmp_path / "plain", scaled, file, "--dtype", "float32", "--json")
    assert code == 0, err
    (found,) = json.loads(out)["comparisons"]
    assert found["rewards"]["scale"] == pytest.approx(3.0, rel=1e-4)
    assert found["rewards"]["offset"] == pytest.approx(0.0, abs=1e-3)
    assert found["rewards"]["correlation"] == pytest.approx(1.0, abs=1e-6)
    assert found["pairs"]["difference"]["value"] == 0.0


def test_compare_takes_further_models_and_prints_a_table(
    tiny_checkpoint: Path, other_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_rows(tmp_path / "pairs.jsonl", text_rows(12))
    arguments = ["compare", tiny_checkpoint, other_checkpoint, file, "--also", tiny_checkpoint, "--dtype", "float32"]
    code, out, err = run(capsys, *arguments)
    assert code == 0, err
    assert out.count("difference in accuracy") == 2
    assert out.count("new reward ≈") == 2
    result = json.loads(run(capsys, *arguments, "--json")[1])
    first, second, third = result["models"]
    assert first["reward_id"] == third["reward_id"] != second["reward_id"]
    difference = result["comparisons"][0]["pairs"]["difference"]["value"]
    assert difference == pytest.approx(second["accuracy"]["value"] - first["accuracy"]["value"])
