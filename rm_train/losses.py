"""The training loss of a micro-batch of pairs.

Invariant: it is a sum over pairs, divided by the weight of the whole optimizer step, so that the gradient does not
depend on how the step was cut.
"""

from collections.abc import Sequence

import numpy as np
import torch

from rm_client.bradley_terry import bradley_terry_loss
from rm_train.config import LossConfig
from rm_train.data import prompt_key
from rm_train.encode import EncodedPair


def pair_losses(
    r_chosen: torch.Tensor, r_rejected: torch.Tensor, pairs: Sequence[EncodedPair], config: LossConfig
) -> torch.Tensor:
    """Weighted Bradley-Terry loss of each pair, fp32 [B], from rewards fp32 [B]."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=r_chosen.device)

    smoothing = config.label_smoothing
    shares = [1.0 if item.pair.label is None else item.pair.label for item in pairs]
    return bradley_terry_loss(
        r_chosen,
        r_rejected,
        margin=column([item.pair.margin or 0.0 for item in pairs]) if config.use_margin else None,
        weight=column([item.pair.weight for item in pairs]),
        # (1 − ε) of the label and ε of its opposite
        target=column([share * (1 - smoothing) + (1 - share) * smoothing for share in shares]),
        center_coefficient=config.centering,
    )


def head_losses(
    r_chosen: torch.Tensor,
    r_rejected: torch.Tensor,
    pairs: Sequence[EncodedPair],
    config: LossConfig,
    samples: Sequence[Sequence[float]],
) -> torch.Tensor:
    """Loss of each pair, fp32 [B], as the mean over heads, each weighing the pair by its bootstrap sample.

    Rewards are fp32 [B, K], ``samples`` [B][K].
    """
    weights_BK = torch.tensor(samples, dtype=torch.float32, device=r_chosen.device)
    of_heads = [pair_losses(r_chosen[:, k], r_rejected[:, k], pairs, config) for k in range(r_chosen.shape[1])]
    return (torch.stack(of_heads, dim=1) * weights_BK).mean(dim=1)


class BootstrapSamples:
    """How often each head sees each pair: Poisson(1) counts, which stand for drawing with replacement.

    All pairs of a prompt have one count in a head, as they are not independent. A function of seed and prompts alone.
    """

    def __init__(self, pairs: Sequence[EncodedPair], num_heads: int, seed: int) -> None:
        self._counts: np.ndarray | None = None
        if num_heads > 1:
            _, group = np.unique([prompt_key(item.pair) for item in pairs], return_inverse=True)
            drawn = np.random.default_rng([seed, num_heads]).poisson(1.0, (int(group.max()) + 1, num_heads))
            self._counts = drawn[group].astype(np.float32)

    def weights(self, indices: Sequence[int]) -> list[list[float]] | None:
        """The counts of these pairs, [B][K]; None where there is one head, which sees each pair once."""
        if self._counts is None:
            return None
        counts: list[list[float]] = self._counts[list(indices)].tolist()
        return counts
