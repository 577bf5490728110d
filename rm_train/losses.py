"""The training loss of a micro-batch of pairs.

Invariant: it is a sum over pairs, divided by the weight of the whole optimizer step, so that the gradient does not
depend on how the step was cut.
"""

from collections.abc import Sequence

import torch

from rm_client.bradley_terry import bradley_terry_loss
from rm_train.config import LossConfig
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
