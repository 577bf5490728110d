"""Score many sequences with a loaded model, in forward passes under a token budget.

Invariant: rewards come back in the order of the input, one for each sequence.
"""

from collections.abc import Callable, Sequence

import numpy as np

from rm_core.model import RewardModel


def score_sequences(
    model: RewardModel,
    sequences: Sequence[Sequence[int]],
    *,
    max_tokens: int = 4096,
    progress: Callable[[int], None] = lambda count: None,
) -> np.ndarray:
    """Rewards, float32 [N]. ``progress`` is called with the number of sequences of each finished forward pass."""
    rewards = np.zeros(len(sequences), dtype=np.float32)
    for batch in plan_batches(model, sequences, max_tokens):
        rewards[batch] = model.score_ids([sequences[index] for index in batch])
        progress(len(batch))
    return rewards


def plan_batches(model: RewardModel, sequences: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Indices of the sequences that share each forward pass: like lengths together, under the budget."""
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]), reverse=True)
    batches: list[list[int]] = []
    for index in order:
        candidate = [*batches[-1], index] if batches else [index]
        if batches and model.network.batch_tokens([sequences[i] for i in candidate]) <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
