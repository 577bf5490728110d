"""Mathematical answers: what the verifier says is what math-verify says, called alone; and what that is."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rm_server.verifiers.answers import Answer, BadReferenceError
from rm_server.verifiers.math import check_math, last_boxed
from rm_server.verifiers.parts import MathPart
from rm_server.verifiers.pool import VerifierPool

ALONE = """
import json, sys
from math_verify import parse, verify
print(json.dumps([verify(parse(gold), parse(answer)) for gold, answer in json.load(sys.stdin)]))
"""

Pair = tuple[str, str]


def fraction(r: random.Random) -> tuple[str, str, str]:
    a, b = r.randint(1, 40), r.choice([2, 4, 5, 8, 10, 16])
    return f"$\\frac{{{a}}}{{{b}}}$", f"{a / b}", f"\\frac{{{a + 1}}}{{{b}}}"


def percent(r: random.Random) -> tuple[str, str, str]:
    a = r.randint(1, 99)
    return f"${a}\\%$", f"\\frac{{{a}}}{{100}}", f"{a + 1}\\%"


def root(r: random.Random) -> tuple[str, str, str]:
    a, b = r.randint(2, 9), r.choice([2, 3, 5, 7])
    return f"$\\sqrt{{{a * a * b}}}$", f"{a}\\sqrt{{{b}}}", f"{a + 1}\\sqrt{{{b}}}"


def polynomial(r: random.Random) -> tuple[str, str, str]:
    a, b = r.randint(1, 9), r.randint(1, 9)
    return f"$(x+{a})(x-{b})$", f"x^2 + {a - b}x - {a * b}", f"x^2 + {a - b}x + {a * b}"


def finite_set(r: random.Random) -> tuple[str, str, str]:
    values = r.sample(range(-20, 20), 3)
    shown = [", ".join(map(str, order)) for order in (values, values[::-1], [*values[:2], 99])]
    return f"$\\{{{shown[0]}\\}}$", f"\\{{{shown[1]}\\}}", f"\\{{{shown[2]}\\}}"


def interval(r: random.Random) -> tuple[str, str, str]:
    a = r.randint(-9, 9)
    return f"$[{a}, {a + 5})$", f"[{a}, {a + 5})", f"[{a}, {a + 5}]"


def point(r: random.Random) -> tuple[str, str, str]:
    a, b = r.randint(-9, 9), r.randint(10, 19)
    return f"$({a}, {b})$", f"({a}, \\frac{{{2 * b}}}{{2}})", f"({b}, {a})"


def unit(r: random.Random) -> tuple[str, str, str]:
    a = r.randint(2, 99)
    return f"${a} \\text{{ cm}}$", f"{a}", f"{a + 1} \\text{{ cm}}"


def equation(r: random.Random) -> tuple[str, str, str]:
    a = r.randint(2, 99)
    return f"${a}$", f"x = {a}", f"x = {a + 1}"


def large(r: random.Random) -> tuple[str, str, str]:
    a = r.randint(10**6, 10**7)
    return f"${a:,}$".replace(",", "{,}"), f"{a}", f"{a + 1}"


KINDS: list[Callable[[random.Random], tuple[str, str, str]]] = [
    fraction, percent, root, polynomial, finite_set, interval, point, unit, equation, large,
]  # fmt: skip
FRAMES = ("The answer is $ANSWER$.", "Thus \\boxed{ANSWER}", "$$ANSWER$$", "so we get\n\\[ANSWER\\]")
MALFORMED = (
    "", "I do not know.", "\\boxed{}", "\\boxed{ANSWER", "$\\frac{1}{$", "$$", "\\boxed{\\text{none}}", "}{", "\\frac",
    "answer: ANSWER ANSWER", "\\boxed{ANSWER}}", "$ANSWER", "\\boxed{\\boxed{ANSWER}}", "((((", "\\left( ANSWER",
    "ANSWER is not the answer, \\boxed{?}", "$\\sqrt{}$", "∅ ≠ 🎲", "\\(ANSWER", "\\begin{cases} ANSWER",
)  # fmt: skip


def pairs() -> dict[str, list[Pair]]:
    """100 right, 100 wrong and 100 malformed answers with their references, the same each time."""
    r = random.Random(0)
    made: dict[str, list[Pair]] = {"right": [], "wrong": [], "malformed": []}
    for i in range(100):
        gold, right, wrong = KINDS[i % 10](r)
        frame = FRAMES[i // 10 % 4]
        made["right"].append((gold, frame.replace("ANSWER", right)))
        made["wrong"].append((gold, frame.replace("ANSWER", wrong)))
        made["malformed"].append((gold, MALFORMED[i % 20].replace("ANSWER", right)))
    return made


@pytest.mark.slow
def test_300_pairs_agree_with_the_library_called_alone() -> None:
    made = pairs()
    every = [pair for group in made.values() for pair in group]
    assert len(every) == 300
    plain = subprocess.run(
        [sys.executable, "-c", ALONE], input=json.dumps(every), capture_output=True, text=True, timeout=600, check=True
    )
    alone = [float(verdict) for verdict in json.loads(plain.stdout)]
    pool = VerifierPool({"answer": MathPart(kind="math", timeout_seconds=60)}, num_workers=2)
    pool.start()
    try:
        futures = [pool.submit("answer", Answer(answer, gold)) for gold, answer in every]
        values = [future.result(600) for future in futures]
    finally:
        pool.close()
    assert [pair for pair, value, other in zip(every, values, alone, strict=True) if value != other] == []
    right, wrong, malformed = values[:100], values[100:200], values[200:]
    assert sum(right) == 100
    assert sum(wrong) == 0
    assert 0 < sum(malformed) < 100, "some are malformed in a way that the library forgives"


@pytest.mark.parametrize(
    ("answer", "reference", "value"),
    [
        ("The answer is 42.", 42, 1.0),
        ("The answer is 42.", "42", 1.0),
        ("$42.0$", 42.0, 1.0),
        ("so \\boxed{\\frac12}", "\\frac{1}{2}", 1.0),
        ("so \\boxed{\\frac12}", ["\\frac{1}{3}", "1/2"], 1.0),
        ("so \\boxed{\\frac12}", ["\\frac{1}{3}", "1/4"], 0.0),
        ("first $3$, no: $4$", 4, 1.0),
        ("\\boxed{3} and then $4$", 3, 1.0),
    ],
)
def test_reference_is_a_number_a_text_or_a_list(answer: str, reference: Any, value: float) -> None:
    assert check_math(answer, reference) == value


@pytest.mark.parametrize(
    ("answer", "boxed"),
    [
        ("\\boxed{1} and \\boxed{\\frac{1}{2}}.", "\\boxed{\\frac{1}{2}}"),
        ("\\boxed{\\{1, 2\\}} done", "\\boxed{\\{1, 2\\}}"),
        ("\\fbox {7}", "\\fbox {7}"),
        ("\\boxed{1} then \\boxed{2", "\\boxed{1}"),
        ("\\boxed{2", None),
        ("the answer is $2$", None),
    ],
)
def test_last_boxed_answer_whose_braces_close(answer: str, boxed: str | None) -> None:
    assert last_boxed(answer) == boxed


def test_only_a_boxed_answer_counts_where_the_recipe_says_so() -> None:
    assert check_math("the answer is $2$", 2, "boxed") == 0.0
    assert check_math("\\boxed{2}, that is $3$", 2, "boxed") == 1.0


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        (None, "is required"),
        ([], "must not be an empty list"),
        (" ", "must not be empty"),
        (True, "must be a text, a number"),
        ({"a": 1}, "must be a text, a number"),
        ("$$", "has no mathematical expression in it"),
    ],
)
def test_reference_that_cannot_be_compared_is_an_error_and_not_a_wrong_answer(reference: Any, says: str) -> None:
    with pytest.raises(BadReferenceError, match=says):
        check_math("$1$", reference)


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        ("The answer is 42", "42", "41"),
        ("The answer is 42.", "42", "41"),
        ("It is 3/4", "0.75", "3"),
        ("The answer is x + 1", "1 + x", "1"),
        ("42 apples", "42", "41"),
        ("John has 42 apples left.", "42", "41"),
        ("12 square meters", "12", "11"),
        ("12 cm", "12", "11"),
        ("He buys 3 bags of 14, so\nhe has 3*14=<<3*14=42>>42 apples.\n#### 42", "42", "14"),
        ("#### 1,234", "1234", "234"),
        ("She has 3 boxes of 4, so the answer is 12", "12", "3"),
        ("答案 是 42", "42", "41"),
        ("\\frac{1}{2} \\text{ of the way there}", "0.5", "2"),
        ("2 \\sqrt{3}", "\\sqrt{12}", "3"),
        ("2ab", "2ab", "3"),
        ("x = 4", "4", "5"),
        ("Paris", "\\text{Paris}", "\\text{Rome}"),
    ],
)
def test_reference_in_a_sentence_is_the_expression_in_it(reference: str, right: str, wrong: str) -> None:
    assert check_math(f"\\boxed{{{right}}}", reference) == 1.0
    assert check_math(f"\\boxed{{{wrong}}}", reference) == 0.0


@pytest.mark.parametrize("reference", ["no real solution", "It cannot be said.", "He does not know.\n#### no idea"])
def test_sentence_without_an_expression_is_refused(reference: str) -> None:
    with pytest.raises(BadReferenceError, match="has no mathematical expression in it"):
        check_math("\\boxed{42}", reference)
