"""Score many sequences with a loaded model, in forward passes under a token budget.

Invariant: rewards come back in the order of the input, one for each sequence.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import numpy as np

from rm_core.checkpoint import CheckpointError
from rm_core.model import RewardModel

Item = TypeVar("Item")

_PASSES = 4
"""Progress is reported after about so many forward passes."""


def score_sequences(
    model: RewardModel,
    sequences: Sequence[Sequence[int]],
    *,
    max_tokens: int = 4096,
    progress: Callable[[int], None] = lambda count: None,
) -> np.ndarray:
    """Rewards, float32 [N]. ``progress`` is called with the number of sequences of each finished part."""
    return score_heads(model, sequences, max_tokens=max_tokens, progress=progress)[0]


def score_heads(
    model: RewardModel,
    sequences: Sequence[Sequence[int]],
    *,
    max_tokens: int = 4096,
    progress: Callable[[int], None] = lambda count: None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Rewards, float32 [N], and those of the single heads, float32 [N, K]; None where there is one head alone."""
    num_heads = model.network.num_heads
    rewards = np.zeros(len(sequences), dtype=np.float32)
    heads = np.zeros((len(sequences), num_heads), dtype=np.float32) if num_heads > 1 else None
    for part in _parts(model, sequences, _PASSES * max_tokens):
        scored = model.score_batch([sequences[index] for index in part], max_tokens=max_tokens)
        rewards[part] = scored.rewards
        if heads is not None:
            heads[part] = scored.heads
        progress(len(part))
    return rewards, heads


def need_heads(model: RewardModel) -> None:
    """Raise CheckpointError where there is one head alone."""
    if model.num_heads == 1:
        raise CheckpointError(f"{model.name}: has one head alone (head.count), so nothing tells how sure a reward is")


def chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """``items`` in lists of ``size``, the last one shorter: what is held at a time when they pass through."""
    left = iter(items)
    while chunk := list(islice(left, size)):
        yield chunk


def _parts(model: RewardModel, sequences: Sequence[Sequence[int]], max_tokens: int) -> Iterator[list[int]]:
    """Indices in parts of some passes each: what shares a beginning stays together, or else what has like length."""
    if model.shares_prefixes:
        order = sorted(range(len(sequences)), key=lambda index: tuple(sequences[index]))
    else:
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]), reverse=True)
    part: list[int] = []
    tokens = 0
    for index in order:
        if part and tokens + len(sequences[index]) > max_tokens:
            yield part
            part, tokens = [], 0
        part.append(index)
        tokens += len(sequences[index])
    if part:
        yield part
