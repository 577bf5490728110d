"""Which pairs a step holds, and how a step is cut into forward passes.

Invariant: a step holds the pairs that a shuffled baseline would; cutting it changes speed and memory, never the loss.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

Item = TypeVar("Item")


def epoch_order(num_pairs: int, seed: int, epoch: int, prompts: Sequence[str] | None = None) -> list[int]:
    """The order of the pairs in one epoch: a function of its arguments alone, so that a resumed run repeats it.

    With ``prompts`` (a key for each pair) pairs of one prompt stand together, where the first of them would stand.
    """
    order = [int(index) for index in np.random.default_rng([seed, epoch]).permutation(num_pairs)]
    if prompts is None:
        return order
    together: dict[str, list[int]] = {}
    for index in order:
        together.setdefault(prompts[index], []).append(index)
    return [index for indices in together.values() for index in indices]


def step_batches(
    num_pairs: int, batch_size: int, seed: int, first_step: int = 0, prompts: Sequence[str] | None = None
) -> Iterator[tuple[int, list[int]]]:
    """Yield (epoch, pair indices) of every step from ``first_step`` on, for ever. An epoch's last step may be short."""
    steps_per_epoch = -(-num_pairs // batch_size)
    epoch, step = divmod(first_step, steps_per_epoch)
    while True:
        order = epoch_order(num_pairs, seed, epoch, prompts)
        for start in range(step * batch_size, num_pairs, batch_size):
            yield epoch, order[start : start + batch_size]
        epoch, step = epoch + 1, 0


def split_by_tokens(
    items: Sequence[Item],
    cost: Callable[[Sequence[Item]], int],
    size: Callable[[Item], int],
    prompt: Callable[[Item], Any],
    max_tokens: int,
) -> list[list[Item]]:
    """Cut items into micro-batches whose ``cost`` is at most ``max_tokens``.

    Items of one ``prompt`` stand together, as they share it. Those of like ``size`` share a micro-batch, longest first,
    so that padding is small and running out of memory shows in the first pass. An item that alone costs more than the
    budget gets a micro-batch of its own.
    """
    batches: list[list[Item]] = []
    longest: dict[Any, int] = {}
    for item in items:
        longest[prompt(item)] = max(longest.get(prompt(item), 0), size(item))
    first = {key: index for index, key in enumerate(longest)}
    for item in sorted(items, key=lambda item: (longest[prompt(item)], first[prompt(item)], size(item)), reverse=True):
        if batches and cost([*batches[-1], item]) <= max_tokens:
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches
