"""The GRPO objective for one batch of answers: clipped surrogate, k3 penalty, no value function.

Source: Shao et al. 2024 (arXiv 2402.03300), eq. 3 and 4; clipping as PPO's (arXiv 1707.06347), eq. 7; k3 from Schulman,
"Approximating KL divergence" (2020); normalisation of dr_grpo arXiv 2503.20783, of dapo arXiv 2503.14476.
Invariant: rewards, advantages, old and reference log-probabilities are constants; gradients reach ``log_probs`` only.

Shapes: B prompts, G answers each, T tokens of the longest answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import numpy as np

from rm_client.advantages import (
    ZERO_SPREAD,
    AdvantageReport,
    Scale,
    combine_rewards,
    grpo_advantage_report,
    grpo_advantages,
)
from rm_client.arrays import is_tensor

if TYPE_CHECKING:
    import torch

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

Aggregation: TypeAlias = Literal["sequence", "grpo", "dr_grpo", "dapo"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are cut off above this before ``exp`` (e^20 = 4.9e8; fp32 overflows at 88). Below, ``exp`` only nears 0
and nothing is cut. No gradient passes through a ratio that is cut; k3 goes on in a straight line, so that a policy far
below its reference is still pulled back. How often either happens is reported."""


@dataclass(frozen=True)
class GRPOStats:
    """Means over what counts (answers, or tokens), as Python floats.

    ``policy_loss`` + kl_coeff · (KL, aggregated the same way) is the loss. ``kl``: mean k3. ``ratio``: mean π/π_old.
    ``clip_fraction``: where the clipped term is the smaller one, so that no gradient flows. ``clamp_fraction``: where a
    log-ratio (new to old, or reference to new) exceeds the limit; it should be 0, and a long sum is the usual cause.
    ``advantages``: what became of the groups, where rewards were given.
    """

    loss: float
    policy_loss: float
    kl: float
    ratio: float
    clip_fraction: float
    clamp_fraction: float
    advantages: AdvantageReport | None


@overload
def k3_kl(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, *, limit: float = ...) -> torch.Tensor: ...
@overload
def k3_kl(log_probs: Array, ref_log_probs: Array, *, limit: float = ...) -> Array: ...
def k3_kl(log_probs: Any, ref_log_probs: Any, *, limit: float = LOG_RATIO_LIMIT) -> Any:
    """The k3 estimate of KL(new ‖ ref), per entry: exp(d) − d − 1 with d = ref − new.

    Any shape, the same for both, in nats; unreduced. Never negative, 0 where the two agree. Its mean over answers
    sampled from the *new* policy is KL(new ‖ ref): hence d = ref − new, not new − ref. Above ``limit``, where exp would
    overflow, its tangent goes on: exp(limit) · (1 + d − limit) − d − 1. The reference is a constant. NumPy gives NumPy
    float64, torch gives torch in fp32 at least.
    """
    if is_tensor(log_probs):
        import torch

        new = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
        d = ref_log_probs.detach().to(new.dtype) - new
        near, beyond = d.clamp(max=limit), torch.relu(d - limit)
        # expm1: exp(d) − 1 loses all digits for small d
        return (torch.expm1(near) - near + math.expm1(limit) * beyond).clamp(min=0.0)
    new_policy, reference = np.asarray(log_probs, dtype=np.float64), np.asarray(ref_log_probs, dtype=np.float64)
    difference = reference - new_policy
    close, farther = np.minimum(difference, limit), np.maximum(difference - limit, 0.0)
    return np.maximum(np.expm1(close) - close + math.expm1(limit) * farther, 0.0)


@overload
def grpo_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor | None = ...,
    rewards: Any = ...,
    advantages: torch.Tensor | None = ...,
    clip_eps: float = ...,
    kl_coeff: float = ...,
    aggregation: Aggregation = ...,
    mask: torch.Tensor | None = ...,
    *,
    clip_eps_high: float | None = ...,
    max_length: int | None = ...,
    scale: Scale = ...,
    ddof: int = ...,
    eps: float = ...,
    limit: float = ...,
) -> tuple[torch.Tensor, GRPOStats]: ...
@overload
def grpo_loss(
    log_probs: Array,
    old_log_probs: Array,
    ref_log_probs: Array | None = ...,
    rewards: Any = ...,
    advantages: Array | None = ...,
    clip_eps: float = ...,
    kl_coeff: float = ...,
    aggregation: Aggregation = ...,
    mask: Array | None = ...,
    *,
    clip_eps_high: float | None = ...,
    max_length: int | None = ...,
    scale: Scale = ...,
    ddof: int = ...,
    eps: float = ...,
    limit: float = ...,
) -> tuple[np.floating[Any], GRPOStats]: ...
def grpo_loss(
    log_probs: Any,
    old_log_probs: Any,
    ref_log_probs: Any = None,
    rewards: Any = None,
    advantages: Any = None,
    clip_eps: float = 0.2,
    kl_coeff: float = 0.05,
    aggregation: Aggregation = "sequence",
    mask: Any = None,
    *,
    clip_eps_high: float | None = None,
    max_length: int | None = None,
    scale: Scale = "std",
    ddof: int = 1,
    eps: float = 1e-4,
    limit: float = LOG_RATIO_LIMIT,
) -> tuple[Any, GRPOStats]:
    """Loss (a scalar with gradient) and its statistics, from log-probabilities in nats.

    With ρ = exp(log_probs − old_log_probs) and A the advantage, each entry costs

        −min(ρ A, clip(ρ, 1 − clip_eps, 1 + clip_eps_high) A)  +  kl_coeff · k3(ref − new)

    ``aggregation`` says what an entry is and how entries become one number:
    "sequence": log-probabilities [B, G], the sum over an answer's tokens ([B, G, T] with a mask is summed here); mean
    over answers. The others take [B, G, T], and every token of an answer shares its advantage: "grpo" mean over the
    tokens of an answer, then over answers with tokens; "dr_grpo" sum of all tokens / (B · G · ``max_length``), default
    T; "dapo" sum of all tokens / their number.
    ``old_log_probs``: of the policy that sampled; ``ref_log_probs``: of the frozen start (not needed where ``kl_coeff``
    is 0). ``rewards`` [B, G], which become advantages by ``scale``, ``ddof``, ``eps`` (grpo_advantages: None and NaN
    get 0), or ``advantages`` [B, G] ([B, G, T] per token): exactly one of the two.
    ``mask``: bool or 0/1, True for what counts: tokens [B, G, T], or answers [B, G]. What is masked may hold anything,
    NaN too. ``clip_eps_high``: upper side of the clip, default ``clip_eps`` (DAPO's "clip higher").

    Computed in fp32 at least, by torch; NumPy's ``log_probs`` give NumPy's loss, a number without gradient. Raises
    ValueError for shapes that do not fit. Nothing to average gives a loss of 0.
    """
    import torch

    if not is_tensor(log_probs):
        loss, stats = grpo_loss(
            _as_tensor(log_probs), old_log_probs, ref_log_probs, rewards, advantages, clip_eps, kl_coeff, aggregation,
            mask, clip_eps_high=clip_eps_high, max_length=max_length, scale=scale, ddof=ddof, eps=eps, limit=limit,
        )  # fmt: skip
        if stats.advantages is not None:
            arrays = stats.advantages.advantages.numpy()
            stats = replace(stats, advantages=replace(stats.advantages, advantages=arrays))
        return loss.numpy()[()], stats
    old_log_probs, ref_log_probs, advantages, mask = (
        None if value is None else _as_tensor(value, log_probs)
        for value in (old_log_probs, ref_log_probs, advantages, mask)
    )
    if (rewards is None) == (advantages is None):
        raise ValueError("give rewards or advantages, one of the two")
    if aggregation not in ("sequence", "grpo", "dr_grpo", "dapo"):
        raise ValueError(f"aggregation: unknown {aggregation!r}; there are sequence, grpo, dr_grpo and dapo")
    if ref_log_probs is None and kl_coeff != 0:
        raise ValueError("ref_log_probs: needed for the KL term; pass kl_coeff=0 to do without it")
    shape = log_probs.shape
    for name, other in (("old_log_probs", old_log_probs), ("ref_log_probs", ref_log_probs), ("mask", mask)):
        if other is not None and other.shape != shape:
            raise ValueError(f"{name} is {tuple(other.shape)}, log_probs is {tuple(shape)}")
    if log_probs.dim() not in ((2, 3) if aggregation == "sequence" else (3,)):
        wanted = "[B, G] or [B, G, T]" if aggregation == "sequence" else "[B, G, T]"
        raise ValueError(f"log_probs is {tuple(shape)}; {aggregation!r} takes {wanted}")

    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    keep = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask.bool()

    def entries(value: torch.Tensor) -> torch.Tensor:
        """fp32, masked entries 0 before any exp, so that what stands there reaches neither loss nor gradient."""
        return torch.where(keep, value.to(dtype), torch.zeros((), dtype=dtype, device=value.device))

    new, old = entries(log_probs), entries(old_log_probs.detach())
    ref = new.detach() if ref_log_probs is None else entries(ref_log_probs.detach())
    if aggregation == "sequence" and log_probs.dim() == 3:
        new, old, ref, keep = new.sum(-1), old.sum(-1), ref.sum(-1), keep.any(-1)

    report = None
    if advantages is None:
        answers = keep if keep.dim() == 2 else keep.any(-1)
        report = grpo_advantage_report(_tensor_like(rewards, new), scale, ddof, eps, answers)
        advantages = report.advantages
    if advantages.shape not in (new.shape, new.shape[:2]):
        raise ValueError(f"advantages is {tuple(advantages.shape)}, expected {tuple(new.shape[:2])}")
    advantages = advantages.detach().to(dtype)
    advantages = advantages.unsqueeze(-1) if advantages.dim() < new.dim() else advantages
    advantages = torch.where(keep, advantages, torch.zeros((), dtype=dtype, device=advantages.device))

    log_ratio = new - old
    ratio = torch.exp(log_ratio.clamp(max=limit))
    clipped = ratio.clamp(1 - clip_eps, 1 + (clip_eps if clip_eps_high is None else clip_eps_high))
    policy = -torch.minimum(ratio * advantages, clipped * advantages)
    kl = k3_kl(new, ref, limit=limit)
    total = policy + kl_coeff * kl if kl_coeff else policy

    counted = keep.to(dtype)
    num_entries = counted.sum().clamp(min=1)
    if aggregation == "grpo":
        lengths = counted.sum(-1)
        weight = counted / lengths.clamp(min=1).unsqueeze(-1) / (lengths > 0).sum().clamp(min=1)
    elif aggregation == "dr_grpo":
        weight = counted / (shape[0] * shape[1] * (shape[2] if max_length is None else max_length))
    else:
        weight = counted / num_entries
    loss = (total * weight).sum()

    with torch.no_grad():

        def mean(value: torch.Tensor) -> float:
            return float((value.to(dtype) * counted).sum() / num_entries)

        stats = GRPOStats(
            loss=float(loss),
            policy_loss=float((policy * weight).sum()),
            kl=mean(kl),
            ratio=mean(ratio),
            clip_fraction=mean(clipped * advantages < ratio * advantages),
            clamp_fraction=mean((log_ratio > limit) | (ref - new > limit)),
            advantages=report,
        )
    return loss, stats


def _as_tensor(value: Any, like: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor as it is; NumPy's array, or lists, as a copy on the device of ``like``."""
    import torch

    if is_tensor(value):
        return value
    return torch.tensor(np.ascontiguousarray(value), device=None if like is None else like.device)


def _tensor_like(rewards: Any, like: torch.Tensor) -> torch.Tensor:
    """Rewards [B, G] as a constant float64 tensor; None becomes NaN."""
    import torch

    if not is_tensor(rewards):
        if not all(hasattr(row, "__len__") for row in rewards):
            raise ValueError(f"rewards: expected {tuple(like.shape[:2])}, one list per prompt")
        rows = [[np.nan if value is None else float(value) for value in row] for row in rewards]
        rewards = torch.tensor(rows, dtype=torch.float64)
    if rewards.shape != like.shape[:2]:
        raise ValueError(f"rewards is {tuple(rewards.shape)}, expected {tuple(like.shape[:2])}")
    tensor: torch.Tensor = rewards.detach().to(like.device)
    return tensor


__all__ = [
    "LOG_RATIO_LIMIT",
    "ZERO_SPREAD",
    "AdvantageReport",
    "GRPOStats",
    "combine_rewards",
    "grpo_advantage_report",
    "grpo_advantages",
    "grpo_loss",
    "k3_kl",
]
