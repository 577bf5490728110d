"""Group-relative advantages: a reward made relative to the other answers to the same prompt.

Sources: GRPO, Shao et al. 2024 (arXiv 2402.03300), section 4.1; mean only, Dr. GRPO (arXiv 2503.20783); batch scale,
"Tricks or Traps?" (arXiv 2508.08221); several rewards normalised one by one, GDPO (arXiv 2601.05242).
Invariant: what carries no information gives exactly 0: a missing reward, a group of one, a group whose rewards differ
by no more than rounding. Same kind in, same kind out (NumPy, torch, nested lists); in float64, without gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import numpy as np

from rm_client.arrays import is_tensor

if TYPE_CHECKING:
    import torch

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
    Nested: TypeAlias = Sequence[Sequence[float | None]]

Scale: TypeAlias = Literal["std", "none", "batch"]

ZERO_SPREAD = 1e-6
"""A group whose max − min is at most this times its largest |reward| has zero spread: about eight rounding steps of
fp32, in which rewards travel."""


@dataclass(frozen=True)
class AdvantageReport:
    """``advantages`` in the kind and shape of the rewards, and what became of the groups.

    ``group_mean``, ``group_std``: [P] float64 over the rewards that count, NaN where there are none; std is 0 where the
    group has zero spread. ``zero_spread``: [P] bool, groups of two or more equal rewards: they teach nothing.
    ``num_singletons``: groups with one reward. ``num_missing``: items that are masked, None or NaN.
    """

    advantages: Any
    group_mean: Array
    group_std: Array
    zero_spread: Array
    num_singletons: int
    num_missing: int

    @property
    def num_zero_spread(self) -> int:
        """Number of groups whose advantages are 0 because their rewards are equal."""
        return int(self.zero_spread.sum())


@overload
def grpo_advantages(
    rewards: torch.Tensor, scale: Scale = ..., ddof: int = ..., eps: float = ..., mask: torch.Tensor | None = ...
) -> torch.Tensor: ...
@overload
def grpo_advantages(
    rewards: Array, scale: Scale = ..., ddof: int = ..., eps: float = ..., mask: Array | None = ...
) -> Array: ...
@overload
def grpo_advantages(
    rewards: Nested, scale: Scale = ..., ddof: int = ..., eps: float = ..., mask: Any = ...
) -> list[list[float]]: ...
def grpo_advantages(rewards: Any, scale: Scale = "std", ddof: int = 1, eps: float = 1e-4, mask: Any = None) -> Any:
    """Advantages [P, G] of rewards [P, G]: P prompts, G answers each.

    ``scale``: "std" (r − mean of the group) / (std of the group + eps), the z-score of GRPO; "none" r − mean of the
    group (Dr. GRPO); "batch" (r − mean of the group) / (std of all rewards + eps).
    ``ddof``: 1 divides squares by n − 1 (torch, TRL, verl), 0 by n (NumPy); for one group [1, 0, 0, 0] and eps 0, "std"
    gives 1.5 and −0.5 with 1, 1.732 and −0.577 with 0. ``eps`` in the units of the reward.
    ``mask``: [P, G] bool, True where the reward counts. None and NaN do not count either, and get 0.

    NumPy gives NumPy and torch gives torch, on the same device, in the dtype of the rewards (integers: float64 and
    float32). Nested lists, which may hold None and be ragged, give nested lists. One group [G] gives [G].
    Raises ValueError for an infinite reward that is not masked: no reward model means it, and dropping it silently
    would hide a broken one.
    """
    return grpo_advantage_report(rewards, scale, ddof, eps, mask).advantages


def grpo_advantage_report(
    rewards: Any, scale: Scale = "std", ddof: int = 1, eps: float = 1e-4, mask: Any = None
) -> AdvantageReport:
    """grpo_advantages, together with the groups' statistics. Arguments as there."""
    if scale not in ("std", "none", "batch"):
        raise ValueError(f'scale: expected "std", "none" or "batch", got {scale!r}')
    if ddof not in (0, 1):
        raise ValueError(f"ddof: expected 0 or 1, got {ddof!r}")
    if not eps >= 0:
        raise ValueError(f"eps: expected a number >= 0, got {eps!r}")
    groups = [_counting(group) for group in _groups(rewards, mask)]
    stats = [_group_stats(values[counts], ddof) for values, counts in groups]
    batch_std = 0.0
    if scale == "batch":
        everything = np.concatenate([values[counts] for values, counts in groups]) if groups else np.zeros(0)
        batch_std = _std(everything, ddof)

    advantages = []
    for (values, counts), group in zip(groups, stats, strict=True):
        out = np.zeros(values.shape)
        if group.num_rewards > 1 and not group.zero_spread:
            divisor = {"std": group.std + eps, "none": 1.0, "batch": batch_std + eps}[scale]
            out[counts] = (values[counts] - group.mean) / divisor
        advantages.append(out)
    return AdvantageReport(
        advantages=_as_given(advantages, rewards),
        group_mean=np.array([group.mean for group in stats]),
        group_std=np.array([group.std for group in stats]),
        zero_spread=np.array([group.zero_spread for group in stats], dtype=bool),
        num_singletons=sum(group.num_rewards == 1 for group in stats),
        num_missing=sum(int((~counts).sum()) for _, counts in groups),
    )


def combine_rewards(
    rewards: Sequence[Any],
    weights: Sequence[float] | None = None,
    order: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize",
    *,
    scale: Scale = "std",
    ddof: int = 1,
    eps: float = 1e-4,
    mask: Any = None,
    normalize_batch: bool = False,
) -> Any:
    """Advantages [P, G] of K rewards, each [P, G] and of one kind (NumPy, torch or nested lists).

    "sum_then_normalize": the weighted sum is one reward; its advantages are taken. A reward with the larger spread
    dominates. "normalize_then_sum": each reward's advantages are taken, and their weighted sum returned, so that the
    weights mean what they say (GDPO); ``normalize_batch`` then standardises the sum over the whole batch, as TRL does.

    ``weights``: K numbers, default all 1. A reward that is missing (None, NaN) for a whole group does not apply there
    and counts nothing. One that is missing for a single item of a group leaves that item out of a sum (its sum could
    not be compared with its neighbours'), and adds 0 to it when normalised first.
    """
    if not rewards:
        raise ValueError("rewards: at least one reward is needed")
    weights = [1.0] * len(rewards) if weights is None else [float(weight) for weight in weights]
    if len(weights) != len(rewards):
        raise ValueError(f"weights: {len(rewards)} rewards need as many weights, got {len(weights)}")
    if order not in ("sum_then_normalize", "normalize_then_sum"):
        raise ValueError(f'order: expected "sum_then_normalize" or "normalize_then_sum", got {order!r}')
    parts = [[_counting(group) for group in _groups(reward, mask)] for reward in rewards]
    shapes = [[len(values) for values, _ in part] for part in parts]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError("rewards: all must have the same number of prompts and answers")

    sums: list[Array] = []
    if order == "sum_then_normalize":
        for p in range(len(shapes[0])):
            total, complete, any_applies = np.zeros(shapes[0][p]), np.ones(shapes[0][p], dtype=bool), False
            for part, weight in zip(parts, weights, strict=True):
                values, counts = part[p]
                if counts.any():
                    total, complete, any_applies = total + weight * np.where(counts, values, 0), complete & counts, True
            sums.append(np.where(complete & any_applies, total, np.nan))
        return _as_given(_as_arrays(grpo_advantages([list(s) for s in sums], scale, ddof, eps)), rewards[0])

    applies = [np.zeros(size, dtype=bool) for size in shapes[0]]
    sums = [np.zeros(size) for size in shapes[0]]
    for part, weight in zip(parts, weights, strict=True):
        given = [list(np.where(counts, values, np.nan)) for values, counts in part]
        for p, advantages in enumerate(_as_arrays(grpo_advantages(given, scale, ddof, eps))):
            sums[p] = sums[p] + weight * advantages
            applies[p] = applies[p] | part[p][1]
    if normalize_batch:
        everything = _group_stats(np.concatenate([s[a] for s, a in zip(sums, applies, strict=True)]), ddof)
        flat = everything.zero_spread or everything.num_rewards < 2
        scaled = [np.zeros(len(s)) if flat else (s - everything.mean) / (everything.std + eps) for s in sums]
        sums = [np.where(a, s, 0.0) for s, a in zip(scaled, applies, strict=True)]
    return _as_given(sums, rewards[0])


@dataclass(frozen=True)
class _GroupStats:
    num_rewards: int
    mean: float
    std: float
    zero_spread: bool


def _group_stats(rewards: Array, ddof: int) -> _GroupStats:
    """Of the rewards that count, [n] float64."""
    n = len(rewards)
    if n == 0:
        return _GroupStats(0, np.nan, np.nan, False)
    size = float(np.abs(rewards).max())
    if n == 1 or float(rewards.max() - rewards.min()) <= ZERO_SPREAD * size:
        return _GroupStats(n, float(rewards.mean()), 0.0, n > 1)
    return _GroupStats(n, float(rewards.mean()), _std(rewards, ddof), False)


def _std(rewards: Array, ddof: int) -> float:
    """Of [n] float64; 0 where n is below 2. Squares neither over- nor underflow, whatever the rewards' size."""
    size = float(np.abs(rewards).max()) if len(rewards) > 1 else 0.0
    return size * float((rewards / size).std(ddof=ddof)) if size > 0 else 0.0


def _groups(rewards: Any, mask: Any) -> list[tuple[Array, Array]]:
    """(values float64 [G], given bool [G]) of each group; None and masked are NaN and False."""
    if is_tensor(rewards):
        rewards = rewards.detach().to("cpu").double().numpy()
    if is_tensor(mask):
        mask = mask.detach().to("cpu").numpy()
    rows = _rows(rewards, "rewards")
    masks = [None] * len(rows) if mask is None else _rows(mask, "mask")
    if len(masks) != len(rows):
        raise ValueError(f"mask: {len(masks)} groups, but rewards has {len(rows)}")
    groups = []
    for p, (row, given) in enumerate(zip(rows, masks, strict=True)):
        values = np.asarray([np.nan if value is None else value for value in row], dtype=np.float64)
        counts = np.ones(values.shape, dtype=bool) if given is None else np.asarray(given, dtype=bool)
        if values.ndim != 1 or counts.shape != values.shape:
            raise ValueError(f"rewards[{p}]: expected one list of numbers, and a mask of the same length")
        groups.append((values, counts))
    return groups


def _counting(group: tuple[Array, Array]) -> tuple[Array, Array]:
    """(values, counts) with NaN not counting; an infinity that counts raises."""
    values, given = group
    if np.isinf(values[given]).any():
        at = int(np.flatnonzero(np.isinf(values) & given)[0])
        raise ValueError(f"a reward is infinite (item {at} of its group: {values[at]}); mask it if that is meant")
    return values, given & ~np.isnan(values)


def _rows(value: Any, name: str) -> list[Any]:
    """The groups of [P, G] or nested lists; [G] is one group."""
    if isinstance(value, np.ndarray):
        if value.ndim not in (1, 2):
            raise ValueError(f"{name}: expected [P, G] or [G], got shape {value.shape}")
        return list(value) if value.ndim == 2 else [value]
    rows = list(value)
    return rows if all(hasattr(row, "__len__") for row in rows) and rows else [rows] if rows else []


def _as_given(advantages: list[Array], rewards: Any) -> Any:
    """Rows of float64 in the kind, shape and dtype of ``rewards``."""
    if is_tensor(rewards):
        import torch

        dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
        stacked = np.concatenate(advantages) if advantages else np.zeros(0)
        return torch.from_numpy(stacked).reshape(rewards.shape).to(device=rewards.device, dtype=dtype)
    if isinstance(rewards, np.ndarray):
        stacked = np.concatenate(advantages) if advantages else np.zeros(0)
        stacked = stacked.reshape(rewards.shape)
        return stacked.astype(rewards.dtype) if np.issubdtype(rewards.dtype, np.floating) else stacked
    one_group = bool(len(rewards)) and not all(hasattr(row, "__len__") for row in rewards)
    lists = [row.tolist() for row in advantages]
    return lists[0] if one_group else lists


def _as_arrays(rows: list[list[float]]) -> list[Array]:
    return [np.asarray(row, dtype=np.float64) for row in rows]
