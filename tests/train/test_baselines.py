"""The baselines: length alone, and counting words."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rm_train.baselines import BagOfWords, bag_of_words_accuracy, longer_wins, shorter_wins
from rm_train.data import read_pairs
from rm_train.pairs import Pair


def polite_pairs(number: int, seed: int = 0) -> list[Pair]:
    """The chosen answer says please, the rejected one never; the rest is noise of one length."""
    rng = np.random.default_rng(seed)
    words = [f"w{i:02d}" for i in range(40)]

    def text(extra: str) -> str:
        return " ".join([*rng.choice(words, 8), extra])

    return [Pair(f"p{seed}.{i}", text("please"), text("nonono")) for i in range(number)]


def test_length_ties_count_one_half() -> None:
    """Longer, shorter, equal: longer wins (1 + 0 + 1/2) / 3 = 1/2; two longer of two: 1, shorter 0."""
    pairs = [Pair("q", "aaa", "a"), Pair("q", "a", "aaa"), Pair("q", "a", "b")]
    assert longer_wins(pairs) == shorter_wins(pairs) == 0.5
    assert (longer_wins(pairs[:1]), shorter_wins(pairs[:1])) == (1.0, 0.0)


def test_length_is_of_the_answers_words_in_every_form() -> None:
    """Parts "ab" + "cd" are 4 characters against 3."""
    parts = ({"role": "assistant", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]},)
    assert longer_wins([Pair("q", parts, ({"role": "assistant", "content": "abc"},))]) == 1.0


def test_no_pairs_is_an_error() -> None:
    for call in (lambda: longer_wins([]), lambda: BagOfWords([]), lambda: bag_of_words_accuracy(polite_pairs(3), [])):
        with pytest.raises(ValueError, match="no pairs"):
            call()


def test_bag_of_words_learns_the_word_that_decides() -> None:
    assert bag_of_words_accuracy(polite_pairs(200), polite_pairs(50, seed=1)) == 1.0


def test_bag_of_words_learns_that_shorter_is_better() -> None:
    """Held-out words are unknown; only the length feature, a negative one, is left."""
    train = [Pair(f"p{i}", f"x{i}", f"y{i} y{i} y{i}") for i in range(60)]
    assert bag_of_words_accuracy(train, [Pair("q", "u", "v v v"), Pair("r", "w w", "z z z z")]) == 1.0


def test_bag_of_words_gives_one_half_to_what_it_cannot_tell_apart() -> None:
    assert bag_of_words_accuracy(polite_pairs(100), [Pair("q", "same", "same")]) == 0.5


def test_bag_of_words_honours_weights_and_soft_labels() -> None:
    """A contradiction of equal texts: the margin's sign follows the heavier side, and a label below 1/2 turns it."""
    heavy = [Pair("q", "aa", "bb", weight=3.0), Pair("q", "bb", "aa", weight=1.0)]
    assert BagOfWords(heavy).margins(heavy)[0] > 0
    light = [Pair("q", "aa", "bb", weight=1.0), Pair("q", "bb", "aa", weight=3.0)]
    assert BagOfWords(light).margins(light)[0] < 0
    doubted = [Pair("q", "aa", "bb", label=0.1)] * 2
    assert BagOfWords(doubted).margins(doubted)[0] < 0


def test_bag_of_words_reaches_the_minimum_of_its_loss() -> None:
    """At the minimum of the regularised loss of one pair with one feature x: l2 · c = x · σ(-x·c). Here the texts
    "aaa" against "a" (twice, so that neither word is rare) differ in length, x0 = ln(4/2), and in two words, x = ±1,
    and all of c = k · x with k = 2 σ(-k |x|²) / l2, |x|² = ln(2)² + 2.
    """
    pairs = [Pair("q", "aaa", "a")] * 2
    found = BagOfWords(pairs, l2=1.0)
    size = np.log(2) ** 2 + 2
    k = float(found.coefficients[0] / np.log(2))
    assert k == pytest.approx(2 / (1 + np.exp(k * size)), rel=1e-3)
    assert sorted(found.coefficients[1:]) == pytest.approx([-k, k], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "heldout", "expected"),
    [
        ("ukp_convarg", "eval_ukp_convarg", 0.81),
        ("hh_harmless", "eval_hh_harmless", 0.63),
        ("wmt_mqm_zhen", "eval_wmt_mqm_zhen", 0.66),
    ],
)
def test_bag_of_words_is_near_the_known_accuracy_of_real_data(
    shared_data: Callable[[str], Path], train: str, heldout: str, expected: float
) -> None:
    sides = [list(read_pairs(str(shared_data(f"{name}.jsonl")))) for name in (train, heldout)]
    assert bag_of_words_accuracy(sides[0], sides[1]) == pytest.approx(expected, abs=0.05)


def test_pairs_that_say_nothing_teach_the_bag_of_words_nothing() -> None:
    for fields in ({"label": 0.5}, {"weight": 0.0}):
        pairs = [Pair(f"q{index}", "good words", "bad words here", **fields) for index in range(4)]
        assert BagOfWords(pairs).margins(pairs).tolist() == [0.0] * 4
    assert longer_wins([Pair("q", "long", "b", label=0.5), Pair("q", "long", "b", label=0.6)]) == 0.75


@pytest.mark.parametrize(("name", "expected"), [("ukp_convarg", 0.77), ("hh_harmless", 0.44), ("qa_feedback", 0.51)])
def test_longer_wins_on_real_data(shared_data: Callable[[str], Path], name: str, expected: float) -> None:
    assert longer_wins(read_pairs(str(shared_data(f"{name}.jsonl")))) == pytest.approx(expected, abs=0.006)
