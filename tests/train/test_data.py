"""From sources to the pairs of a run: split, mixing, drawing, leaks, fingerprint."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rm_train.config import DataConfig
from rm_train.data import data_fingerprint, draw, find_leaks, load_fit_data, prompt_key, read_pairs, split_by_prompt
from rm_train.pairs import Pair
from rm_train.rows import DataError


def make_pairs(*prompts: str) -> list[Pair]:
    return [Pair(prompt, f"good {i}", f"bad {i}", where=f"f:{i + 1}") for i, prompt in enumerate(prompts)]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def rows(number: int, prefix: str = "q") -> list[dict[str, Any]]:
    return [{"prompt": f"{prefix}{i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(number)]


def test_prompt_key_ignores_case_blanks_unicode_form_and_message_or_text() -> None:
    message = ({"role": "user", "content": [{"type": "text", "text": "What is  CAFÉ?"}]},)
    keys = {
        prompt_key(Pair(prompt, "a", "b"))
        for prompt in (
            "What is café?",
            " what IS\ncafe\u0301? ",
            ({"role": "user", "content": "what is café?"},),
            message,
        )
    }
    assert len(keys) == 1
    assert prompt_key(Pair("what is tea?", "a", "b")) not in keys


def test_prompt_key_of_whole_texts_is_what_both_share_up_to_a_line_break() -> None:
    first = Pair(None, "The question\nanswer one", "The question\nanswer two")
    second = Pair(None, "the question\nsomething", "the question\nelse")
    assert prompt_key(first) == prompt_key(second)
    assert prompt_key(Pair(None, "abc", "abd")) != prompt_key(Pair(None, "abc", "abe"))


@given(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=60), st.floats(0.05, 0.95), st.integers(0, 5))
def test_split_never_puts_a_prompt_on_both_sides(prompts: list[str], fraction: float, seed: int) -> None:
    pairs = make_pairs(*prompts)
    if len(set(prompts)) < 2:
        with pytest.raises(DataError, match="cannot split 1 distinct prompt"):
            split_by_prompt(pairs, fraction, seed)
        return
    train, evaluation = split_by_prompt(pairs, fraction, seed)
    assert train
    assert evaluation
    assert not find_leaks(train, evaluation)
    assert sorted(pair.where for pair in (*train, *evaluation)) == sorted(pair.where for pair in pairs)


def test_split_does_not_depend_on_the_order_of_the_pairs_but_on_the_seed() -> None:
    pairs = make_pairs(*(f"prompt {i % 50}" for i in range(200)))
    held = {pair.where for pair in split_by_prompt(pairs, 0.2, seed=1)[1]}
    assert held == {pair.where for pair in split_by_prompt(pairs[::-1], 0.2, seed=1)[1]}
    assert held != {pair.where for pair in split_by_prompt(pairs, 0.2, seed=2)[1]}
    assert len(held) == 40


def test_one_large_group_is_not_set_apart() -> None:
    pairs = make_pairs(*["big"] * 90, *(f"small {i}" for i in range(10)))
    for seed in range(20):
        train, evaluation = split_by_prompt(pairs, 0.1, seed)
        assert (len(train), len(evaluation)) == (90, 10)


def test_leaks_name_both_places() -> None:
    leaks = find_leaks(make_pairs("p", "q"), make_pairs("x", "Q "))
    assert [(leak.train.where, leak.eval.where) for leak in leaks] == [("f:2", "f:2")]


def test_fingerprint_is_of_content_and_order_and_not_of_places() -> None:
    pairs = make_pairs("p", "q")
    moved = [Pair(p.prompt, p.chosen, p.rejected, where="elsewhere", source="s", id="i") for p in pairs]
    weighed = [Pair(p.prompt, p.chosen, p.rejected, weight=0.5) for p in pairs]
    assert data_fingerprint(pairs) == data_fingerprint(moved)
    assert data_fingerprint(pairs).startswith("sha256:")
    assert len({data_fingerprint(p) for p in (pairs, pairs[::-1], weighed, pairs[:1])}) == 4


def test_reading_counts_rows_pairs_and_tied_rows(tmp_path: Path) -> None:
    path = write(
        tmp_path / "k.jsonl",
        [
            {"prompt": "q", "completions": ["a", "b", "c"], "ranks": [1, 2, 3]},
            {"prompt": "q", "completions": ["a", "b"], "ranks": [1, 1]},
            {"prompt": "q", "chosen": "a", "rejected": "b"},
        ],
    )
    tally: Counter[str] = Counter()
    assert len(list(read_pairs(path, tally=tally))) == 4
    assert tally == {"rows": 3, "pairs": 4, "tied_rows": 1}


def test_broken_rows_can_be_collected(tmp_path: Path) -> None:
    path = write(tmp_path / "b.jsonl", [{"chosen": "a"}, {"chosen": "a", "rejected": "b"}])
    errors: list[DataError] = []
    assert len(list(read_pairs(path, on_error=errors.append))) == 1
    assert [error.where for error in errors] == [f"{path}:1"]


def test_fit_data_splits_one_prompt_of_two_sources_to_one_side(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.jsonl", rows(40)), write(tmp_path / "b.jsonl", rows(40))
    data = load_fit_data(DataConfig(train=[first, second], eval_fraction=0.25), seed=0)
    assert (len(data.train), len(data.eval), data.leaks) == (60, 20, [])
    assert {pair.source for pair in data.train} == {"a", "b"}


def test_fit_data_reports_leaked_evaluation_prompts(tmp_path: Path) -> None:
    train, held = write(tmp_path / "a.jsonl", rows(5)), write(tmp_path / "e.jsonl", [*rows(1), *rows(2, "new")])
    data = load_fit_data(DataConfig(train=[train], eval=[held]), seed=0)
    assert [leak.eval.where for leak in data.leaks] == [f"{held}:1"]


def test_mixing_weight_repeats_rows_and_draws_the_fraction(tmp_path: Path) -> None:
    path, held = write(tmp_path / "a.jsonl", rows(10)), write(tmp_path / "e.jsonl", rows(3, "e"))
    data = load_fit_data(DataConfig(train=[{"path": path, "mix_weight": 1.5}], eval=[held]), seed=0)
    assert sorted(Counter(pair.where for pair in data.train).values()) == [1] * 5 + [2] * 5
    half = load_fit_data(DataConfig(train=[{"path": path, "mix_weight": 0.5}], eval=[held]), seed=0)
    assert len(half.train) == 5
    assert len(half.eval) == 3


def test_rows_of_a_list_on_one_line_are_mixed_and_drawn_one_by_one(tmp_path: Path) -> None:
    path, held = tmp_path / "a.json", write(tmp_path / "e.jsonl", rows(3, "e"))
    path.write_text(json.dumps(rows(10)), encoding="utf-8")
    source = {"path": str(path), "mix_weight": 1.5}
    data = load_fit_data(DataConfig(train=[source], eval=[held]), seed=0)
    assert sorted(Counter(pair.prompt for pair in data.train).values()) == [1] * 5 + [2] * 5
    limited = load_fit_data(DataConfig(train=[str(path)], eval=[held], limit=4), seed=0)
    assert len({pair.prompt for pair in limited.train}) == 4
    lines = write(tmp_path / "a.jsonl", rows(10))
    as_lines = load_fit_data(DataConfig(train=[{**source, "path": lines}], eval=[held], limit=7), seed=0)
    as_list = load_fit_data(DataConfig(train=[source], eval=[held], limit=7), seed=0)
    assert [pair.prompt for pair in as_list.train] == [pair.prompt for pair in as_lines.train]


def test_files_of_one_name_are_sources_of_their_own(tmp_path: Path) -> None:
    for folder in "ab":
        (tmp_path / folder).mkdir()
    paths = [write(tmp_path / folder / "train.jsonl", rows(3, folder)) for folder in "ab"]
    held = write(tmp_path / "a" / "eval.jsonl", rows(2, "e"))
    data = load_fit_data(DataConfig(train=paths, eval=[held, paths[0]]), seed=0)
    assert [pair.source for pair in data.train] == ["a/train"] * 3 + ["b/train"] * 3
    assert [pair.source for pair in data.eval] == ["eval"] * 2 + ["a/train"] * 3


def test_limits_are_drawn_by_the_seed(tmp_path: Path) -> None:
    config = DataConfig(train=[write(tmp_path / "a.jsonl", rows(100))], limit=20, eval_limit=5)
    data, again, other = (load_fit_data(config, seed) for seed in (0, 0, 1))
    assert (len(data.train), len(data.eval)) == (20, 5)
    assert data == again
    assert data.train != other.train


def test_a_drawn_kwise_row_stays_whole() -> None:
    pairs = [Pair("q", "a", "b", weight=1 / 3, where=f"f:{row}") for row in range(10) for _ in range(3)]
    drawn = draw(pairs, 10, "seed")
    assert set(Counter(pair.where for pair in drawn).values()) == {3}
    assert len(drawn) == 9
    with pytest.raises(DataError, match="a limit of 2 pairs holds no row"):
        draw(pairs, 2, "seed")


def test_a_sources_own_columns_lie_over_the_common_ones(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", [{"q": "p1", "w": "a", "l": "b"}])
    second = write(tmp_path / "b.jsonl", [{"question": "p2", "w": "a", "l": "b"}])
    columns = {"prompt": "q", "chosen": "w", "rejected": "l"}
    config = DataConfig(train=[first, {"path": second, "columns": {"prompt": "question"}}], columns=columns)
    data = load_fit_data(config.model_copy(update={"eval_fraction": 0.5}), seed=0)
    assert {pair.prompt for pair in (*data.train, *data.eval)} == {"p1", "p2"}


def test_a_source_without_pairs_is_refused(tmp_path: Path) -> None:
    train, empty = write(tmp_path / "a.jsonl", rows(5)), write(tmp_path / "e.jsonl", [])
    with pytest.raises(DataError, match=r"e\.jsonl: no pairs to eval on"):
        load_fit_data(DataConfig(train=[train], eval=[empty]), seed=0)


@pytest.mark.parametrize(
    ("name", "number", "form"),
    [("ukp_convarg", 8613, str), ("hh_harmless", 1685, tuple), ("eval_wmt_mqm_zhen", 268, str)],
)
def test_real_data_is_read_whole(shared_data: Callable[[str], Path], name: str, number: int, form: type) -> None:
    pairs = list(read_pairs(str(shared_data(f"{name}.jsonl"))))
    assert len(pairs) == number
    assert all(isinstance(content, form) for pair in pairs for content in (pair.prompt, pair.chosen, pair.rejected))


def test_training_prompts_of_real_data_do_not_leak(shared_data: Callable[[str], Path]) -> None:
    train = read_pairs(str(shared_data("hh_harmless.jsonl")))
    assert not find_leaks(train, read_pairs(str(shared_data("eval_hh_harmless.jsonl"))))
