"""The Bradley–Terry loss: −log σ(r_w − r_l), the negative log-likelihood that the chosen answer wins.

Source: Bradley and Terry 1952; as a reward-model loss Stiennon et al. 2020 (arXiv 2009.01325), eq. 1.
Invariant: finite for any finite rewards (±1e4 and beyond), unreduced unless asked, in fp32 at least.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import numpy as np

from rm_client.arrays import is_tensor

if TYPE_CHECKING:
    import torch

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

Reduction: TypeAlias = Literal["none", "mean", "sum"]


@overload
def bradley_terry_loss(
    r_chosen: torch.Tensor,
    r_rejected: torch.Tensor,
    *,
    margin: torch.Tensor | float | None = ...,
    weight: torch.Tensor | None = ...,
    label_smoothing: float = ...,
    target: torch.Tensor | float | None = ...,
    center_coefficient: float = ...,
    reduction: Reduction = ...,
) -> torch.Tensor: ...
@overload
def bradley_terry_loss(
    r_chosen: Array,
    r_rejected: Array,
    *,
    margin: Array | float | None = ...,
    weight: Array | None = ...,
    label_smoothing: float = ...,
    target: Array | float | None = ...,
    center_coefficient: float = ...,
    reduction: Reduction = ...,
) -> Array: ...
def bradley_terry_loss(
    r_chosen: Any,
    r_rejected: Any,
    *,
    margin: Any = None,
    weight: Any = None,
    label_smoothing: float = 0.0,
    target: Any = None,
    center_coefficient: float = 0.0,
    reduction: Reduction = "none",
) -> Any:
    """Loss per pair, with d = r_chosen − r_rejected − margin and p = P(chosen is truly better):

        loss = −p log σ(d) − (1 − p) log σ(−d)  +  center_coefficient · (r_chosen + r_rejected)²

    ``r_chosen``, ``r_rejected``: [B] raw rewards (any shape, the same for both), NumPy or torch; NumPy gives NumPy
    float64, torch gives torch in fp32 (fp64 stays) with gradients.
    ``margin``: [B] or a number, subtracted from the difference (Llama 2, arXiv 2307.09288, eq. 2).
    ``target``: p, [B] or a number in [0, 1]; default 1. ``label_smoothing``: ε, the same as target 1 − ε (cDPO's
    conservative label); give one of the two.
    ``center_coefficient``: keeps rewards near zero, since the loss sees only differences (TRL's
    ``center_rewards_coefficient``; Eisenstein et al. 2023, arXiv 2312.09244).
    ``weight``: [B], multiplies the pair's whole loss. ``reduction``: "none" gives [B]; "sum"; "mean" divides the sum
    by the sum of the weights (the number of pairs where there are none).

    Raises ValueError for shapes that differ (broadcasting [B] against [B, 1] would silently give B² pairs) and for
    options out of range, TypeError for a mixture of NumPy and torch.
    """
    if is_tensor(r_chosen) != is_tensor(r_rejected):
        raise TypeError("r_chosen and r_rejected: one is a torch tensor, the other is not")
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing: expected 0 <= x < 0.5, got {label_smoothing}")
    if label_smoothing and target is not None:
        raise ValueError("label_smoothing and target both state the label; give one")
    if center_coefficient < 0:
        raise ValueError(f"center_coefficient: expected x >= 0, got {center_coefficient}")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f'reduction: expected "none", "mean" or "sum", got {reduction!r}')
    if not is_tensor(r_chosen):
        r_chosen, r_rejected = np.asarray(r_chosen, dtype=np.float64), np.asarray(r_rejected, dtype=np.float64)
    if r_chosen.shape != r_rejected.shape:
        raise ValueError(f"r_chosen is {tuple(r_chosen.shape)}, r_rejected is {tuple(r_rejected.shape)}")
    for name, value in (("margin", margin), ("weight", weight), ("target", target)):
        shape = tuple(getattr(value, "shape", ()))
        if shape and shape != tuple(r_chosen.shape):
            raise ValueError(f"{name} is {shape}, the rewards are {tuple(r_chosen.shape)}")

    probability = 1.0 - label_smoothing if target is None else target
    if is_tensor(r_chosen):
        import torch

        dtype = torch.promote_types(torch.promote_types(r_chosen.dtype, r_rejected.dtype), torch.float32)
        chosen, rejected = r_chosen.to(dtype), r_rejected.to(dtype)
        difference = chosen - rejected if margin is None else chosen - rejected - margin
        # −p log σ(d) − (1−p) log σ(−d) = −log σ(d) + (1−p) d, and logsigmoid does not overflow.
        loss = -torch.nn.functional.logsigmoid(difference) + (1.0 - probability) * difference
    else:
        chosen, rejected = r_chosen, r_rejected
        difference = chosen - rejected if margin is None else chosen - rejected - np.asarray(margin)
        loss = np.logaddexp(0.0, -difference) + (1.0 - np.asarray(probability)) * difference
    if center_coefficient:
        loss = loss + center_coefficient * (chosen + rejected) ** 2
    if weight is not None:
        loss = loss * weight
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.mean() if weight is None else loss.sum() / weight.sum()
