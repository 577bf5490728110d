"""Format, length and repetition, and the options that parts add to them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rm_server.verifiers.answers import Answer, BadReferenceError, text_after
from rm_server.verifiers.formats import check_exact, check_json, check_regex, fenced_blocks
from rm_server.verifiers.lengths import check_length, overlong_penalty
from rm_server.verifiers.parts import (
    ExactPart,
    JsonPart,
    LengthPart,
    OverlongPart,
    RegexPart,
    RepetitionPart,
    VerifierPart,
)
from rm_server.verifiers.repetition import repetition_penalty
from rm_server.verifiers.work import prepare

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"age": {"type": "integer", "minimum": 0}},
}


def test_exact_compares_texts_and_lists_of_them() -> None:
    assert check_exact(" New\n York ", "New York") == 1.0
    assert check_exact("New York", ["Paris", "New York"]) == 1.0
    assert check_exact("new york", "New York") == 0.0
    assert check_exact("new york", "New York", ignore_case=True) == 1.0
    assert check_exact("New  York", "New York", ignore_space=False) == 0.0
    assert check_exact("3", 3) == 1.0
    with pytest.raises(BadReferenceError, match="is required"):
        check_exact("x", None)


def test_numbers_are_compared_by_all_their_digits() -> None:
    assert check_exact("9007199254740993", 9007199254740993) == 1.0
    assert check_exact("9007199254740992", 9007199254740993) == 0.0
    assert check_exact("0.0000001", 1e-7) == check_exact("4.0", 4.0) == check_exact("2.5", 2.5) == 1.0
    for lost in (1e16, -1e300, float(2**53), [1, 1e22]):
        with pytest.raises(BadReferenceError, match="send it as a text"):
            check_exact("1", lost)


def test_regex_matches_the_whole_answer_or_a_part() -> None:
    assert check_regex("<think>a</think>b", "<think>.*</think>.*") == 1.0
    assert check_regex("x<think>a</think>b", "<think>.*</think>.*") == 0.0
    assert check_regex("x<think>a</think>b", "<think>.*</think>", whole=False) == 1.0
    assert check_regex("<think>a\nb</think>", "<think>.*</think>") == 0.0
    assert check_regex("<think>a\nb</think>", "(?s)<think>.*</think>") == 1.0


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ('{"name": "Ada", "age": 36}', 1.0),
        ('```json\n{"name": "Ada"}\n```', 1.0),
        (' \n```\n{"name": "Ada"}\n```\n', 1.0),
        ('```json title=a\r\n{"name": "Ada"}\r\n```\r\n', 1.0),
        ('{"name": "Ada", "age": -1}', 0.0),
        ('{"age": 36}', 0.0),
        ('{"name": "Ada", "more": 1}', 0.0),
        ('{"name": "Ada", "name": "Bob"}', 0.0),
        ('{"name": "Ada", "age": NaN}', 0.0),
        ('Here: {"name": "Ada"}', 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_json_must_parse_and_fit_the_schema(answer: str, value: float) -> None:
    assert check_json(answer, PERSON) == value


def test_json_without_a_schema_is_any_json() -> None:
    assert check_json("3", {}) == 1.0
    assert check_json("three", {}) == 0.0


def test_fenced_blocks_are_found_with_their_language() -> None:
    text = "a\n```Python\nx\n```\nb\n~~~\ny\n```\n~~~\n```\nopen"
    assert fenced_blocks(text) == [("python", "x\n"), ("", "y\n```\n")]


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("1. So:\n   ```python\n   if x:\n       y\n   ```\n2. b", [("python", "if x:\n    y\n")]),
        ('- So:\n  ```python\n  s = """\nat the margin\n  """\n  ```', [("python", 's = """\nat the margin\n"""\n')]),
        ("```python\n    if x:\n        y\n```", [("python", "if x:\n    y\n")]),
        ("a\r\n```python\r\nx\r\n\r\ny\r\n```\r\nb", [("python", "x\r\n\r\ny\r\n")]),
        ("```python title=x\ny\n```\n~~~Py  {.a b}\nz\n~~~", [("python", "y\n"), ("py", "z\n")]),
    ],
)
def test_fences_in_lists_with_crlf_and_with_more_words_behind_them(text: str, blocks: list[tuple[str, str]]) -> None:
    assert fenced_blocks(text) == blocks


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (19, -0.75), (20, -1.0), (21, -1.0), (10**6, -1.0)],
)
def test_overlong_penalty_is_equation_13(length: int, penalty: float) -> None:
    """DAPO, equation 13, with L_max = 20 and L_cache = 4: at 17 ((20 - 4) - 17) / 4 = -0.25."""
    assert overlong_penalty(length, max_length=20, buffer=4) == penalty


def test_overlong_penalty_without_a_buffer_is_a_step() -> None:
    assert [overlong_penalty(length, 20, 0) for length in (20, 21)] == [0.0, -1.0]
    with pytest.raises(ValueError, match="buffer"):
        overlong_penalty(1, 3, 4)


@given(st.integers(0, 10_000), st.integers(1, 5_000), st.data())
def test_overlong_penalty_falls_and_stays_within_bounds(length: int, max_length: int, data: st.DataObject) -> None:
    buffer = data.draw(st.integers(0, max_length))
    here, next_one = (overlong_penalty(length + i, max_length, buffer) for i in (0, 1))
    assert -1.0 <= next_one <= here <= 0.0


def test_length_counts_characters() -> None:
    assert [check_length("äöü", 3, 3), check_length("äöü", 4), check_length("äöü", 0, 2)] == [1.0, 0.0, 0.0]


def test_repetition_counts_ngrams_by_hand() -> None:
    """a b, b a, a b, b a, a b: 2 distinct of 5."""
    assert repetition_penalty("a b A b a b", n=2) == pytest.approx(-0.6)
    assert repetition_penalty("a b c d", n=2) == 0.0
    assert repetition_penalty("a", n=2) == 0.0
    assert repetition_penalty("", n=1) == 0.0
    assert repetition_penalty("ababab", n=2, unit="characters") == pytest.approx(-0.6)


@given(st.text(alphabet="ab ", max_size=60), st.integers(1, 5))
def test_repetition_is_between_minus_1_and_0(text: str, n: int) -> None:
    assert -1.0 < repetition_penalty(text, n) <= 0.0


def test_text_after_the_last_mark() -> None:
    assert text_after("a</t>b</t>c", "</t>") == "c"
    assert text_after("abc", "</t>") == ""
    assert text_after("abc", None) == "abc"


@pytest.mark.parametrize(
    ("part", "answer", "value"),
    [
        (ExactPart(kind="exact", after="</think>", ignore_case=True), Answer("x</think> YES", "yes"), 1.0),
        (ExactPart(kind="exact", after="</think>"), Answer("yes", "yes"), 0.0),
        (RegexPart(kind="regex", pattern=r"\d+", after="="), Answer("1 =2"), 1.0),
        (RegexPart(kind="regex", pattern=r"\d+", whole=False), Answer("a1b"), 1.0),
        (JsonPart(kind="json", schema_=PERSON, after="</think>"), Answer('</think>{"name": "Ada"}'), 1.0),
        (LengthPart(kind="length", maximum=2), Answer("abc"), 0.0),
        (LengthPart(kind="length"), Answer(""), 0.0),
        (OverlongPart(kind="overlong", max_length=4, buffer=2), Answer("abc"), -0.5),
        (OverlongPart(kind="overlong", max_length=4, buffer=2), Answer("a", finished=False), -1.0),
        (OverlongPart(kind="overlong", max_length=4, buffer=2, unfinished=None), Answer("a", finished=False), 0.0),
        (RepetitionPart(kind="repetition", n=1, after="|"), Answer("a a a|b b"), -0.5),
        (RepetitionPart(kind="repetition", n=1, after="|"), Answer("a a a a"), -0.75),
        (RepetitionPart(kind="repetition", n=1, after="|"), Answer("a a a a|"), 0.0),
    ],
)
def test_part_gives_its_functions_value(part: VerifierPart, answer: Answer, value: float) -> None:
    assert prepare(part)(answer) == value
