"""Pairs become token ids, once, before training starts.

Invariant: no pair vanishes. What was cut to the maximum length is counted, and a pair that cannot be rendered is an
error that names its row.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rm_core.chat import Renderer, RenderError
from rm_train.data import prompt_key
from rm_train.pairs import Pair
from rm_train.rows import DataError


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """Two id sequences, at most the training length each, and the pair that they came from."""

    chosen: list[int]
    rejected: list[int]
    truncated: bool
    pair: Pair
    prompt: str = ""
    """The same for pairs that answer one prompt (``rm_train.data.prompt_key``)."""


def encode_pairs(
    pairs: Sequence[Pair], renderer: Renderer, max_length: int, progress: Callable[[], None] = lambda: None
) -> list[EncodedPair]:
    """Render every pair. ``progress`` is called once a pair. Raises DataError naming the row that has no rendering."""
    encoded = []
    for pair in pairs:
        try:
            chosen, rejected, truncated = renderer.render_pair(
                pair.prompt, pair.chosen, pair.rejected, max_length=max_length
            )
        except RenderError as error:
            raise DataError(pair.where, str(error)) from None
        encoded.append(EncodedPair(chosen, rejected, truncated, pair, prompt_key(pair)))
        progress()
    return encoded


def find_identical(encoded: Iterable[EncodedPair]) -> list[Pair]:
    """The pairs that are the same tokens on both sides although their rows differ."""
    return [item.pair for item in encoded if item.chosen == item.rejected and item.pair.chosen != item.pair.rejected]


def count_truncated(encoded: Iterable[EncodedPair]) -> int:
    """How many pairs lost turns or tokens."""
    return sum(item.truncated for item in encoded)
