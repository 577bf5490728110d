"""Rows of every form become the pairs they mean; what is wrong names the row."""

from typing import Any

import numpy as np
import pytest

from rm_client.bradley_terry import bradley_terry_loss
from rm_train.human_assistant import is_human_assistant, parse_human_assistant
from rm_train.pairs import Pair, row_to_pairs
from rm_train.rows import DataError, Row


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def pairs_of(columns: dict[str, str | None] | None = None, **values: Any) -> list[Pair]:
    return row_to_pairs(Row("file.jsonl:7", values), columns, "file")


def pair_of(columns: dict[str, str | None] | None = None, **values: Any) -> Pair:
    (pair,) = pairs_of(columns, **values)
    return pair


def refusal(columns: dict[str, str | None] | None = None, **values: Any) -> str:
    with pytest.raises(DataError) as caught:
        pairs_of(columns, **values)
    assert str(caught.value).startswith("file.jsonl:7: ")
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix("file.jsonl:7: ")


def contents(pair: Pair) -> tuple[Any, Any, Any]:
    return pair.prompt, pair.chosen, pair.rejected


# ------------------------------------------------------------------ explicit prompt


def test_three_texts_stay_text() -> None:
    assert contents(pair_of(prompt="q", chosen="a", rejected="b")) == ("q", "a", "b")


def test_messages_stay_messages() -> None:
    pair = pair_of(prompt=[user("q")], chosen=[assistant("a")], rejected=[assistant("b")])
    assert contents(pair) == ((user("q"),), (assistant("a"),), (assistant("b"),))


def test_text_answers_to_a_conversation_become_assistant_turns() -> None:
    pair = pair_of(prompt=[user("q")], chosen="a", rejected="b")
    assert contents(pair) == ((user("q"),), (assistant("a"),), (assistant("b"),))


def test_message_answers_to_a_text_prompt_make_it_a_user_turn() -> None:
    pair = pair_of(prompt="q", chosen=[assistant("a")], rejected=[assistant("b")])
    assert contents(pair) == ((user("q"),), (assistant("a"),), (assistant("b"),))


def test_a_single_message_stands_for_a_list_of_one() -> None:
    assert pair_of(prompt="q", chosen=assistant("a"), rejected=assistant("b")).chosen == (assistant("a"),)


@pytest.mark.parametrize("prompt", ["q", [{"role": "user", "content": "q"}]])
def test_a_prompt_repeated_inside_the_answers_is_taken_once(prompt: Any) -> None:
    """UltraFeedback's form: the prompt as text, and again as the first message of both conversations."""
    system = {"role": "system", "content": "s"}
    pair = pair_of(
        prompt=prompt, chosen=[system, user("q"), assistant("a")], rejected=[system, user("q"), assistant("b")]
    )
    assert contents(pair) == ((system, user("q")), (assistant("a"),), (assistant("b"),))


def test_answers_that_begin_with_another_user_turn_are_refused() -> None:
    problem = refusal(prompt="q", chosen=[user("other"), assistant("a")], rejected=[assistant("b")])
    assert problem.startswith("chosen: begins with a user message")


# ------------------------------------------------------------------ implicit prompt


def test_common_messages_become_the_prompt() -> None:
    pair = pair_of(
        chosen=[user("q"), assistant("x"), user("r"), assistant("a")],
        rejected=[user("q"), assistant("x"), user("r"), assistant("b")],
    )
    assert contents(pair) == ((user("q"), assistant("x"), user("r")), (assistant("a"),), (assistant("b"),))


def test_null_or_empty_prompt_is_implicit() -> None:
    for prompt in (None, [], ""):
        pair = pair_of(prompt=prompt, chosen=[user("q"), assistant("a")], rejected=[user("q"), assistant("b")])
        assert pair.prompt == (user("q"),)
        assert pair_of(prompt=prompt, chosen="a", rejected="b").prompt is None


def test_identical_conversations_keep_their_last_message_as_the_answer() -> None:
    talk = [user("q"), assistant("a")]
    assert contents(pair_of(chosen=talk, rejected=talk)) == ((user("q"),), (assistant("a"),), (assistant("a"),))


def test_conversations_with_nothing_in_common_have_no_prompt() -> None:
    pair = pair_of(chosen=[user("p"), assistant("a")], rejected=[user("q"), assistant("b")])
    assert contents(pair) == (None, (user("p"), assistant("a")), (user("q"), assistant("b")))


def test_whole_texts_have_no_prompt() -> None:
    assert contents(pair_of(chosen="the same start a", rejected="the same start b")) == (
        None,
        "the same start a",
        "the same start b",
    )


# ------------------------------------------------------------------ Human / Assistant text


def test_human_assistant_texts_become_messages() -> None:
    start = "\n\nHuman: hi there\n\nAssistant: hello\n\nHuman: more\n\nAssistant:"
    pair = pair_of(chosen=f"{start} good one", rejected=f"{start} bad:\n\nvery bad")
    assert contents(pair) == (
        (user("hi there"), assistant("hello"), user("more")),
        (assistant("good one"),),
        (assistant("bad:\n\nvery bad"),),
    )


def test_human_assistant_prompt_with_text_answers_becomes_messages() -> None:
    pair = pair_of(prompt="\n\nHuman: q\n\nAssistant:", chosen=" a", rejected=" b")
    assert contents(pair) == ((user("q"),), (assistant("a"),), (assistant("b"),))


def test_turns_of_one_speaker_in_a_row_become_one_message() -> None:
    assert parse_human_assistant("\n\nHuman: a\n\nHuman: b\n\nAssistant: c") == (user("a\n\nb"), assistant("c"))


def test_an_empty_answer_of_human_assistant_text_is_kept_as_an_empty_turn() -> None:
    pair = pair_of(chosen="\n\nHuman: q\n\nAssistant: a", rejected="\n\nHuman: q\n\nAssistant:")
    assert contents(pair) == ((user("q"),), (assistant("a"),), (assistant(""),))


def test_text_that_merely_mentions_humans_is_left_alone() -> None:
    assert not is_human_assistant("A Human: and an\n\nAssistant: walk in")
    assert not is_human_assistant("Human: no reply")


def test_half_a_human_assistant_row_is_refused() -> None:
    problem = refusal(chosen="\n\nHuman: q\n\nAssistant: a", rejected="just text")
    assert problem.startswith("rejected: is plain text, but another answer of the row is")


# ------------------------------------------------------------------ parts, tools, system


def test_system_tools_and_content_parts_pass_through() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": None}}}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "q", "cache": None}]}
    result = {"role": "tool", "content": "3", "name": "f"}
    pair = pair_of(
        prompt=[{"role": "system", "content": "s"}, parts],
        chosen=[call, result, assistant("3")],
        rejected=[assistant("4")],
    )
    assert pair.prompt == (
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
    )
    assert pair.chosen == ({**call, "content": ""}, result, assistant("3"))


def test_null_fields_that_arrow_adds_are_dropped() -> None:
    pair = pair_of(prompt=[{**user("q"), "tool_calls": None}], chosen=[assistant("a")], rejected=[assistant("b")])
    assert pair.prompt == (user("q"),)


def test_tool_schemas_are_refused_and_can_be_mapped_away() -> None:
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "tools": [{"name": "f"}]}
    assert refusal(**row).startswith("tools: tool schemas are not rendered")
    assert pair_of({"tools": None}, **row).prompt == "q"


# ------------------------------------------------------------------ numbers and labels


def test_margin_weight_and_label_stay_with_their_pair() -> None:
    pair = pair_of(chosen="a", rejected="b", margin=2, weight=0.5, label=0.75, category="c", id=3)
    assert (pair.margin, pair.weight, pair.label) == (2.0, 0.5, 0.75)
    assert (pair.category, pair.id, pair.source, pair.where) == ("c", "3", "file", "file.jsonl:7")


def test_missing_margin_is_none_and_not_zero() -> None:
    assert pair_of(chosen="a", rejected="b", margin=None).margin is None
    assert pair_of(chosen="a", rejected="b").margin is None


def test_label_below_one_half_turns_the_pair_round() -> None:
    """Both ways give one loss: s·f(d − m) + (1 − s)·f(m − d) with f = −log σ; chosen is what most prefer, so that
    accuracies and baselines mean what they say."""
    pair = pair_of(prompt="q", chosen="a", rejected="b", margin=2, label=0.25)
    assert (*contents(pair), pair.margin, pair.label, pair.turned) == ("q", "b", "a", -2.0, 0.75, True)
    straight = bradley_terry_loss(np.array([1.0]), np.array([3.0]), margin=2.0, target=0.25)
    turned = bradley_terry_loss(np.array([3.0]), np.array([1.0]), margin=-2.0, target=0.75)
    assert straight == pytest.approx(turned)
    assert pair_of(chosen="a", rejected="b", label=0.5).turned is False


def test_numbers_of_csv_are_read_and_its_empty_cells_are_absent() -> None:
    pair = pair_of(chosen="a", rejected="", margin="1.5", weight="", label=" ", category="")
    assert (pair.margin, pair.weight, pair.label, pair.category) == (1.5, 1.0, None, None)
    assert pair.rejected == ""


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("margin", "big", "margin: must be a number, not 'big'"),
        ("margin", True, "margin: must be a number, not true/false"),
        ("margin", float("nan"), "margin: must be a finite number, not nan"),
        ("margin", 10**400, "margin: must be a finite number, not inf"),
        ("weight", -1, "weight: must be a finite number of at least 0, not -1"),
        ("label", 1.5, "label: must be a finite number of at least 0 and at most 1, not 1.5"),
        ("category", ["x"], "category: must be text, not a list"),
    ],
)
def test_wrong_number_or_label_is_named(field: str, value: Any, problem: str) -> None:
    assert refusal(chosen="a", rejected="b", **{field: value}) == problem


# ------------------------------------------------------------------ columns


def test_columns_map_names_and_errors_use_the_files_names() -> None:
    columns: dict[str, str | None] = {"prompt": "question", "chosen": "best", "rejected": "worst", "label": None}
    assert contents(pair_of(columns, question="q", best="a", worst="b", label="helpful")) == ("q", "a", "b")
    assert refusal(columns, question="q", best=3, worst="b") == "best: must be text or a list of messages, not a number"
    assert refusal(columns, question="q", best=[{"role": 3}], worst="b").startswith("best[0].role: is missing")
    assert refusal(columns, best="a", worst="b").startswith("question: is missing, though columns maps prompt to it")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "q", "chosen": "a"}, "rejected: is missing; the row has prompt, chosen"),
        ({"chosen": None, "rejected": "b"}, "chosen: is null"),
        ({"chosen": "a", "rejected": [{"role": "assistant", "content": "b"}]}, "chosen: is text, but rejected is not"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "prompt: must be text or a list of messages, not a number"),
        ({"chosen": [], "rejected": []}, "chosen: is an empty list of messages"),
        ({"chosen": ["x"], "rejected": ["y"]}, "chosen[0]: must be an object with role and content, not text"),
        ({"chosen": [{"from": "gpt", "value": "x"}], "rejected": "b"}, "chosen[0].role: is missing or not text"),
        ({"chosen": [{"role": "assistant"}], "rejected": "b"}, "chosen[0].content: must be text or a list of parts"),
        ({"chosen": [{"role": "user", "content": [3]}], "rejected": "b"}, "chosen[0].content[0]: must be an object"),
        ({"chosen": "a\ud800", "rejected": "b"}, "chosen: character 2 is half of a surrogate pair"),
    ],
)
def test_wrong_row_is_named_with_the_field(row: dict[str, Any], problem: str) -> None:
    assert refusal(**row).startswith(problem)


def test_rows_of_different_form_in_one_file_are_each_read_for_themselves() -> None:
    """TRL 1.16 judges a file by its first row."""
    text = pair_of(prompt="q", chosen="a", rejected="b")
    talk = pair_of(prompt=[user("q")], chosen=[assistant("a")], rejected=[assistant("b")])
    implicit = pair_of(chosen=[user("q"), assistant("a")], rejected=[user("q"), assistant("b")])
    assert text.prompt == "q"
    assert contents(talk) == contents(implicit)


# ------------------------------------------------------------------ K-wise


def test_ranks_give_all_pairs_and_the_row_weighs_one() -> None:
    """Ranks 2, 1, 3: answer 1 beats 0 and 2, answer 0 beats 2: three pairs of weight 1/3."""
    pairs = pairs_of(prompt="q", completions=["a", "b", "c"], ranks=[2, 1, 3], id="x")
    assert [(pair.chosen, pair.rejected) for pair in pairs] == [("a", "c"), ("b", "a"), ("b", "c")]
    assert [pair.weight for pair in pairs] == [pair.row_part for pair in pairs] == [1 / 3] * 3
    assert [pair.margin for pair in pairs] == [None] * 3
    assert [pair.id for pair in pairs] == ["x:0>2", "x:1>0", "x:1>2"]


def test_scores_give_margins_and_ties_give_no_pair() -> None:
    """Scores 5, 5, 2: both fives beat the two by 3, and say nothing about each other."""
    pairs = pairs_of(prompt="q", completions=["a", "b", "c"], scores=[5, 5, 2], weight=2)
    assert [(pair.chosen, pair.rejected, pair.margin, pair.weight) for pair in pairs] == [
        ("a", "c", 3.0, 1.0),
        ("b", "c", 3.0, 1.0),
    ]
    assert [pair.row_part for pair in pairs] == [0.5, 0.5], "the row's own weight is for the loss"
    assert pairs_of(prompt="q", completions=["a", "b"], scores=[1, 1]) == []


def test_kwise_answers_may_be_messages() -> None:
    pairs = pairs_of(prompt=[user("q")], completions=[[assistant("a")], [assistant("b")]], ranks=[1, 2])
    assert contents(pairs[0]) == ((user("q"),), (assistant("a"),), (assistant("b"),))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"completions": "a", "ranks": [1]}, "completions: must be a list, not text"),
        ({"completions": ["a"], "ranks": [1]}, "completions: must hold at least two answers, not 1"),
        ({"completions": ["a", "b"]}, "completions: needs exactly one of ranks"),
        ({"completions": ["a", "b"], "ranks": [1, 2], "scores": [1, 2]}, "completions: needs exactly one of ranks"),
        ({"completions": ["a", "b"], "ranks": [1]}, "ranks: has 1 values for 2 completions"),
        ({"completions": ["a", "b"], "scores": [1, "x"]}, "scores: must be a number, not text"),
        ({"completions": ["a", "b"], "scores": [1, 2], "chosen": "a"}, "chosen: stands beside completions"),
        ({"completions": ["a", "b"], "scores": [1, 2], "margin": 1}, "margin: has no meaning in a K-wise row"),
        ({"completions": ["a", 3], "scores": [1, 2]}, "completions[1]: must be text or a list of messages"),
    ],
)
def test_wrong_kwise_row_is_named(row: dict[str, Any], problem: str) -> None:
    assert refusal(prompt="q", **row).startswith(problem)
