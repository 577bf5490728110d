"""What accuracy means on a set of pairs: how far one gets by length alone, or by counting words.

Invariant: a reward model that does not beat these has learnt nothing; ties count one half and rows one, as everywhere.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from rm_train.data import content_text, prompt_key, split_by_prompt
from rm_train.pairs import Pair
from rm_train.row_reader import Content

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_WORD = re.compile(r"[぀-ヿ㐀-鿿가-힯豈-﫿]|[^\W_]+|[^\w\s]")
"""A word, a mark of punctuation, or one character of a script written without spaces."""
_LENGTH = 0
"""The index of the length feature; words follow."""
_MOST_PAIRS = 50_000
_L2_CHOICES = (1.0, 10.0, 100.0)
_DEFAULT_L2 = 10.0


def answer_length(pair: Pair) -> tuple[int, int]:
    """Characters of the chosen and of the rejected answer."""
    return len(content_text(pair.chosen)), len(content_text(pair.rejected))


def longer_wins(pairs: Iterable[Pair]) -> float:
    """Accuracy of calling the longer answer (in characters) the better one; equal lengths count one half."""
    scores, parts = [], []
    for pair in pairs:
        chosen, rejected = answer_length(pair)
        scores.append(_right(chosen - rejected, pair))
        parts.append(pair.row_part)
    if not scores:
        raise ValueError("no pairs: an accuracy needs at least one")
    return float(np.average(scores, weights=parts))


def shorter_wins(pairs: Iterable[Pair]) -> float:
    """Accuracy of calling the shorter answer the better one; equal lengths count one half."""
    return 1.0 - longer_wins(pairs)


def _right(difference: float, pair: Pair) -> float:
    return 0.5 if difference == 0 or pair.label == 0.5 else float(difference > 0)


def bag_of_words_accuracy(train: Sequence[Pair], heldout: Sequence[Pair]) -> float:
    """Held-out accuracy of ``BagOfWords`` trained on ``train``."""
    if not heldout:
        raise ValueError("no pairs: an accuracy needs at least one")
    return accuracy_of_margins(BagOfWords(train).margins(heldout).tolist(), heldout)


def accuracy_of_margins(margins: Sequence[float], pairs: Sequence[Pair]) -> float:
    """Share of the pairs' margins above zero; zero, and a label of one half, count one half."""
    right = [_right(margin, pair) for margin, pair in zip(margins, pairs, strict=True)]
    return float(np.average(right, weights=[pair.row_part for pair in pairs]))


class BagOfWords:
    """A Bradley-Terry model whose reward is a sum over the words of an answer (square root of count) and its length.

    The loss is convex: no seed, no learning rate. How strongly it is regularised is chosen on a fifth of the training
    prompts, so that the baseline is not weak for want of tuning. NumPy only; 10,000 pairs take a few seconds, and of
    more than 50,000 every n-th is taken, so that time and memory stay bounded.
    """

    def __init__(self, train: Sequence[Pair], *, l2: float | None = None) -> None:
        if not train:
            raise ValueError("no pairs to train the bag of words on")
        train = train[:: -(-len(train) // _MOST_PAIRS)]
        counts = Counter(word for pair in train for word in {*_words(pair.chosen), *_words(pair.rejected)})
        frequent = sorted(word for word, count in counts.items() if count >= 2)
        self._index = {word: number for number, word in enumerate(frequent, start=_LENGTH + 1)}
        rows = self._rows(train)
        weights = np.array([pair.weight for pair in train])
        shares = np.array([1.0 if pair.label is None else pair.label for pair in train])

        def fit(chosen: Ints, strength: float) -> Floats:
            features = _Sparse([rows[index] for index in chosen])
            return _fit_logistic(features, weights[chosen], shares[chosen], len(frequent) + 1, strength)

        self.l2 = _DEFAULT_L2 if l2 is None else l2
        inside = _inner_split(train)
        if l2 is None and inside is not None:
            kept, apart = inside
            features = _Sparse([rows[index] for index in apart])

            def loss(strength: float) -> float:
                margins = features.times(fit(kept, strength))
                return float(weights[apart] @ (np.logaddexp(0.0, -margins) + (1 - shares[apart]) * margins))

            self.l2 = min(_L2_CHOICES, key=loss)
        self.coefficients = fit(np.arange(len(train)), self.l2)

    def margins(self, pairs: Sequence[Pair]) -> Floats:
        """Reward of chosen minus rejected, float64 [N]."""
        return _Sparse(self._rows(pairs)).times(self.coefficients)

    def _rows(self, pairs: Sequence[Pair]) -> list[tuple[Ints, Floats]]:
        """Columns and values of each pair's features."""
        rows = []
        for pair in pairs:
            row: dict[int, float] = {}
            for answer, sign in ((pair.chosen, 1.0), (pair.rejected, -1.0)):
                for word, count in Counter(_words(answer)).items():
                    column = self._index.get(word)
                    if column is not None:
                        row[column] = row.get(column, 0.0) + sign * math.sqrt(count)
            chosen, rejected = answer_length(pair)
            row[_LENGTH] = math.log1p(chosen) - math.log1p(rejected)
            columns = [column for column, value in row.items() if value]
            rows.append((np.array(columns, dtype=np.int64), np.array([row[column] for column in columns])))
        return rows


def _inner_split(train: Sequence[Pair]) -> tuple[Ints, Ints] | None:
    """Indices of four fifths and one fifth of the pairs, by prompt; None when too few to tell anything."""
    if len(train) < 50 or len({prompt_key(pair) for pair in train}) < 5:
        return None
    apart = {id(pair) for pair in split_by_prompt(train, 0.2, seed=0)[1]}
    is_apart = np.array([id(pair) in apart for pair in train])
    return np.flatnonzero(~is_apart), np.flatnonzero(is_apart)


def _words(answer: Content) -> list[str]:
    return _WORD.findall(content_text(answer).casefold())


class _Sparse:
    """A sparse matrix, given as columns and values of each row."""

    def __init__(self, rows: Sequence[tuple[Ints, Floats]]) -> None:
        self.num_rows = len(rows)
        self._rows: Ints = np.repeat(np.arange(len(rows)), [len(columns) for columns, _ in rows])
        self._columns: Ints = np.concatenate([np.zeros(0, dtype=np.int64), *(columns for columns, _ in rows)])
        self._values: Floats = np.concatenate([np.zeros(0), *(values for _, values in rows)])

    def times(self, vector: Floats) -> Floats:
        """Matrix times vector."""
        return _summed(self._rows, self._values * vector[self._columns], self.num_rows)

    def transposed_times(self, vector: Floats, num_columns: int) -> Floats:
        """Transposed matrix times vector."""
        return _summed(self._columns, self._values * vector[self._rows], num_columns)


def _summed(places: Ints, values: Floats, size: int) -> Floats:
    return np.asarray(np.bincount(places, values, minlength=size), dtype=np.float64)


def _fit_logistic(features: _Sparse, weights: Floats, shares: Floats, size: int, l2: float) -> Floats:
    """Minimise sum w·(softplus(-m) + (1-s)·m) + l2/2·|c|² over c, m = features·c, by Newton's method.

    Each step is solved by conjugate gradients and halved until the loss falls.
    """
    coefficients = np.zeros(size)

    def loss_at(point: Floats) -> float:
        margins = features.times(point)
        return float(weights @ (np.logaddexp(0.0, -margins) + (1 - shares) * margins) + l2 / 2 * point @ point)

    loss = loss_at(coefficients)
    for _ in range(12):
        probability = _sigmoid(features.times(coefficients))
        gradient = features.transposed_times(weights * (probability - shares), size) + l2 * coefficients
        step = _newton_step(features, weights * probability * (1 - probability), gradient, l2)
        scale, slope = 1.0, float(gradient @ step)
        while (new_loss := loss_at(coefficients + scale * step)) > loss + 1e-4 * scale * slope and scale > 1e-4:
            scale /= 2
        if new_loss > loss:
            break
        coefficients, improvement, loss = coefficients + scale * step, loss - new_loss, new_loss
        if improvement <= 1e-5 * abs(loss):
            break
    return coefficients


def _newton_step(features: _Sparse, curvature: Floats, gradient: Floats, l2: float) -> Floats:
    step = np.zeros_like(gradient)
    residual = -gradient
    direction, size = residual.copy(), float(residual @ residual)
    limit = 0.01 * size
    if size == 0:  # nothing to learn: every label even, or every weight zero
        return step
    for _ in range(20):
        curved = features.transposed_times(curvature * features.times(direction), len(gradient)) + l2 * direction
        length = size / float(direction @ curved)
        step += length * direction
        residual -= length * curved
        new_size = float(residual @ residual)
        if new_size <= limit:
            break
        direction, size = residual + new_size / size * direction, new_size
    return step


def _sigmoid(values: Floats) -> Floats:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * values)), dtype=np.float64)
