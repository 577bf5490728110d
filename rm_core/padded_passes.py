"""Score sequences in padded rows: for models that cannot compute a token tree.

Invariant: a batch's rows times its longest row stay within the token budget, unless it is one sequence alone.
"""

from collections.abc import Sequence

import numpy as np

from rm_core.network import RewardNetwork
from rm_core.passes import Scored, as_scored
from rm_core.token_reads import TokenReads


def score_padded(
    network: RewardNetwork, sequences: Sequence[Sequence[int]], max_tokens: int, reads: TokenReads | None = None
) -> Scored:
    """Score ``sequences`` (none empty), like lengths together. Call it under ``torch.inference_mode``."""
    several = network.num_heads > 1
    values = np.zeros((len(sequences), 1 + network.num_heads if several else 1), dtype=np.float32)
    batches: list[list[int]] = []
    for index in sorted(range(len(sequences)), key=lambda i: len(sequences[i]), reverse=True):
        if batches and network.batch_tokens([sequences[i] for i in [*batches[-1], index]]) <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    for batch in batches:
        texts = [sequences[index] for index in batch]
        if reads is not None and any(tuple(ids) in reads for ids in texts):
            values[batch] = _read(network, texts, reads)
        else:
            found = network(texts, all_heads=several).float().cpu().numpy()
            values[batch] = found if several else found[:, None]
    return as_scored(values, np.array([float(len(ids)) for ids in sequences]), 0, reads)


def _read(network: RewardNetwork, texts: Sequence[Sequence[int]], reads: TokenReads) -> np.ndarray:
    """What ``project_all`` gives at each sequence's last token, fp32 [B, 1 + K]; ``reads`` gets its own."""
    keys = [tuple(ids) for ids in texts]
    first = [min(reads.next_place(ids), len(ids) - 1) if ids in reads else len(ids) - 1 for ids in keys]
    last: list[np.ndarray] = []
    for ids, read in zip(keys, network.read_padded(keys, first), strict=True):
        values = read.float().cpu().numpy()
        last.append(values[-1])
        if ids in reads and reads.next_place(ids) < len(ids):  # an equal sequence may have been read before
            reads.add(ids, values[:, 0])
    return np.stack(last)
