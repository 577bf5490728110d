"""Group-relative advantages: golden values derived by hand, degenerate groups, agreement with TRL and verl."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rm_client import combine_rewards, grpo_advantage_report, grpo_advantages

GROUP = np.array([[1.0, 0.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("scale", "ddof", "best", "rest"),
    [("std", 1, 1.5, -0.5), ("std", 0, math.sqrt(3), -1 / math.sqrt(3)), ("none", 1, 0.75, -0.25)],
)
def test_golden_values_of_one_group(scale: Any, ddof: int, best: float, rest: float) -> None:
    """[1, 0, 0, 0]: mean 1/4; differences 3/4, −1/4 ×3; squares sum to 9/16 + 3/16 = 3/4.

    ddof 1: std = sqrt((3/4) / 3) = 1/2, so 3/2 and −1/2. ddof 0: std = sqrt((3/4) / 4) = sqrt(3)/4, so
    (3/4) / (sqrt(3)/4) = sqrt(3) = 1.732 and −1/sqrt(3) = −0.577. Mean only: 3/4 and −1/4.
    """
    for rewards in (GROUP, torch.tensor(GROUP), GROUP.tolist(), GROUP[0], GROUP[0].tolist()):
        got = np.asarray(grpo_advantages(rewards, scale, ddof, eps=0.0)).reshape(-1)
        np.testing.assert_allclose(got, [best, rest, rest, rest], rtol=1e-12)


def test_golden_values_with_eps_and_over_the_batch() -> None:
    """eps: 0.75 / (0.5 + 0.0001) = 1.49970. Batch [[1, 0], [4, 2]]: mean 7/4, differences −3/4, −7/4, 9/4, 1/4, squares
    (9 + 49 + 81 + 1) / 16 = 35/4, /3 = 35/12, std = 1.70783; group means 1/2 and 3: ±0.5 / 1.70783 = ±0.292770 and
    ±1 / 1.70783 = ±0.585540."""
    assert grpo_advantages(GROUP)[0, 0] == pytest.approx(0.75 / 0.5001, rel=1e-12)
    got = grpo_advantages(np.array([[1.0, 0.0], [4.0, 2.0]]), "batch", eps=0.0)
    np.testing.assert_allclose(got, [[0.292770, -0.292770], [0.585540, -0.585540]], atol=1e-6)


@pytest.mark.parametrize("scale", ["std", "none", "batch"])
@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-4])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize(
    "group",
    [
        [0.35] * 7 + [0.35 + 1e-8],
        [0.35] * 8,
        [0.1] * 3,
        [-7.25, -7.25 - 1e-6],
        [1e6, 1e6 + 0.5],
        [0.0] * 4,
        [3.0],
        [1e-300] * 3,
    ],
)
def test_rounding_residue_never_becomes_an_advantage(scale: Any, eps: float, ddof: int, group: list[float]) -> None:
    other = [5.0, 1.0]
    for rewards in ([group], [group, other]):
        got = grpo_advantages(rewards, scale, ddof, eps)
        assert got[0] == [0.0] * len(group)
    fp32 = torch.tensor([group], dtype=torch.float32)
    assert torch.equal(grpo_advantages(fp32, scale, ddof, eps), torch.zeros_like(fp32))


def test_a_real_difference_is_not_taken_for_residue() -> None:
    """[0.35, 0.35001]: difference 1e-5, halves ±5e-6 about the mean, std with ddof 1 is 1e-5 / sqrt(2)."""
    got = grpo_advantages([[0.35, 0.35001]], eps=0.0)[0]
    np.testing.assert_allclose(got, [-math.sqrt(0.5), math.sqrt(0.5)], rtol=1e-9)
    tiny = grpo_advantages([[1e-9, 2e-9]], eps=0.0)[0]  # spread is judged against the rewards' own size
    np.testing.assert_allclose(tiny, got, rtol=1e-9)


def test_missing_rewards_count_nothing_and_get_zero() -> None:
    """Without the missing items the groups are [1, 0, 0, 0], [2] and nothing."""
    rewards = [[1.0, None, 0.0, 0.0, float("nan"), 0.0], [None, 2.0], [None, None], []]
    report = grpo_advantage_report(rewards, eps=0.0)
    assert report.advantages == [[1.5, 0.0, -0.5, -0.5, 0.0, -0.5], [0.0, 0.0], [0.0, 0.0], []]
    assert (report.num_missing, report.num_singletons, report.num_zero_spread) == (5, 1, 0)
    np.testing.assert_array_equal(report.group_mean, [0.25, 2.0, np.nan, np.nan])
    np.testing.assert_array_equal(report.group_std, [0.5, 0.0, np.nan, np.nan])


def test_masked_rewards_count_nothing_whatever_they_are() -> None:
    rewards = np.array([[1.0, np.inf, 0.0, 0.0, np.nan, 0.0]])
    mask = np.array([[1, 0, 1, 1, 0, 1]])
    for given_rewards, given_mask in ((rewards, mask), (torch.tensor(rewards), torch.tensor(mask))):
        got = grpo_advantages(given_rewards, eps=0.0, mask=given_mask)
        np.testing.assert_allclose(np.asarray(got), [[1.5, 0.0, -0.5, -0.5, 0.0, -0.5]])


def test_groups_without_spread_are_reported() -> None:
    report = grpo_advantage_report(np.array([[1.0, 1.0], [1.0, 2.0], [0.35, 0.35 + 1e-9]]))
    assert report.zero_spread.tolist() == [True, False, True]
    assert report.num_zero_spread == 2
    assert report.group_std.tolist()[0] == 0.0


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_an_infinite_reward_is_refused(value: float) -> None:
    for rewards in (np.array([[0.0, value]]), torch.tensor([[0.0, value]]), [[0.0, value]]):
        with pytest.raises(ValueError, match="item 1 of its group"):
            grpo_advantages(rewards)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"scale": "z"}, "scale"),
        ({"ddof": 2}, "ddof"),
        ({"eps": -1.0}, "eps"),
        ({"eps": float("nan")}, "eps"),
        ({"mask": [[True]]}, "mask"),
        ({"mask": [[True, True]] * 2}, "mask"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        grpo_advantages([[1.0, 2.0]], **arguments)
    with pytest.raises(ValueError, match="shape"):
        grpo_advantages(np.zeros((2, 2, 2)))


def test_the_same_kind_comes_out() -> None:
    for dtype in (np.float32, np.float64, np.float16):
        assert grpo_advantages(np.ones((2, 3), dtype)).dtype == dtype
    assert grpo_advantages(np.array([[1, 0]])).dtype == np.float64
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        got = grpo_advantages(torch.tensor([[1.0, 0.0]], dtype=dtype, requires_grad=True))
        assert got.dtype == dtype
        assert not got.requires_grad
    assert grpo_advantages(torch.tensor([[1, 0]])).dtype == torch.float32
    assert grpo_advantages([[1.0, 1.0], [2.0]]) == [[0.0, 0.0], [0.0]]
    assert grpo_advantages([]) == []
    assert grpo_advantages(np.zeros((0, 4))).shape == (0, 4)
    assert grpo_advantages(torch.zeros(3, 0)).shape == (3, 0)


def test_agrees_with_trl_on_random_rewards() -> None:
    """TRL 1.16, GRPOTrainer: nan-aware mean, and Bessel std of the group or the batch, + 1e-4."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        rewards = torch.randn(5, 6, generator=generator, dtype=torch.float64)
        rewards[torch.rand(5, 6, generator=generator) < 0.15] = torch.nan
        mean = torch.nanmean(rewards, dim=1, keepdim=True)
        count = (~torch.isnan(rewards)).sum(1, keepdim=True)
        group_std = (torch.nansum((rewards - mean) ** 2, dim=1, keepdim=True) / (count - 1)).sqrt()
        seen = rewards[~torch.isnan(rewards)]
        for scale, std in (("std", group_std), ("batch", seen.std()), ("none", torch.tensor(1 - 1e-4))):
            wanted = torch.nan_to_num((rewards - mean) / (std + 1e-4), nan=0.0)
            torch.testing.assert_close(grpo_advantages(rewards, scale), wanted, rtol=1e-5, atol=1e-6)  # type: ignore[call-overload]


def test_agrees_with_verl_on_random_rewards() -> None:
    """verl 0.9.1, compute_grpo_outcome_advantage: (r − mean) / (torch.std + 1e-6) per group of two or more."""
    rewards = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    wanted = torch.stack([(row - row.mean()) / (row.std() + 1e-6) for row in rewards])
    torch.testing.assert_close(grpo_advantages(rewards, eps=1e-6), wanted, rtol=1e-4, atol=1e-5)


finite = st.floats(-1e4, 1e4, allow_nan=False, width=32)
groups = st.lists(st.lists(st.one_of(finite, st.none()), min_size=1, max_size=64), min_size=1, max_size=6)


@given(groups, st.sampled_from(["std", "none", "batch"]), st.sampled_from([0, 1]))
def test_advantages_are_finite_centred_and_ordered_as_the_rewards(rewards: Any, scale: Any, ddof: int) -> None:
    got = grpo_advantages(rewards, scale, ddof)
    for row, advantages in zip(rewards, got, strict=True):
        assert len(row) == len(advantages)
        assert all(math.isfinite(a) for a in advantages)
        assert all(a == 0.0 for r, a in zip(row, advantages, strict=True) if r is None)
        assert abs(sum(advantages)) <= 1e-6 * max(1.0, max(map(abs, advantages)) * len(advantages))
        known = sorted((r, a) for r, a in zip(row, advantages, strict=True) if r is not None)
        assert all(a <= b for (_, a), (_, b) in itertools.pairwise(known))
        if scale == "std":
            assert all(abs(a) <= math.sqrt(len(row)) + 1e-6 for a in advantages)


@given(groups, st.floats(0.015625, 64), st.integers(-512, 512))
def test_advantages_ignore_shift_and_scale_of_the_rewards(rewards: Any, factor: float, shift: int) -> None:
    rounded = [[None if r is None else round(r) for r in row] for row in rewards]
    moved = [[None if r is None else r * factor + shift for r in row] for row in rounded]
    apart = [[None if r is None else 1.0 * r for r in row] for row in rounded]
    for a, b in zip(grpo_advantages(apart, eps=0.0), grpo_advantages(moved, eps=0.0), strict=True):
        if any(a) and any(b):  # a large shift can bring a spread below the rounding of the shifted rewards
            np.testing.assert_allclose(a, b, atol=1e-5)


@given(groups)
def test_all_kinds_agree(rewards: Any) -> None:
    width = max(map(len, rewards))
    full = np.array([[np.nan if r is None else r for r in row] + [np.nan] * (width - len(row)) for row in rewards])
    lists = grpo_advantages(rewards)
    array = grpo_advantages(full)
    np.testing.assert_array_equal(array, grpo_advantages(torch.tensor(full)).numpy())
    for row, got in zip(lists, array, strict=True):
        np.testing.assert_array_equal(row, got[: len(row)])
        assert not got[len(row) :].any()


def test_two_rewards_summed_first_or_normalised_first() -> None:
    """A = [4, 0], B = [0, 1], weights 1 and 1.

    Sum first: [4, 1], mean 2.5, std 3/sqrt(2), so ±1.5 / 2.12132 = ±0.707107: B is drowned.
    Normalise first: A gives ±0.707107, B the opposite; they cancel. With weights 1 and 3: ±0.707107 · (1 − 3)."""
    both = [np.array([[4.0, 0.0]]), np.array([[0.0, 1.0]])]
    half = math.sqrt(0.5)
    np.testing.assert_allclose(combine_rewards(both, eps=0.0), [[half, -half]])
    np.testing.assert_allclose(combine_rewards(both, order="normalize_then_sum", eps=0.0), [[0, 0]], atol=1e-12)
    got = combine_rewards(both, [1, 3], "normalize_then_sum", eps=0.0)
    np.testing.assert_allclose(got, [[-2 * half, 2 * half]])
    assert isinstance(combine_rewards([torch.ones(1, 2)] * 2), torch.Tensor)
    assert combine_rewards([[[1.0, 2.0], [3.0]]], eps=0.0)[1] == [0.0]
    assert combine_rewards([[1.0, 0.0, 0.0, 0.0]], eps=0.0) == [1.5, -0.5, -0.5, -0.5]


def test_a_reward_that_does_not_apply_counts_nothing() -> None:
    """B is missing for the whole first group, so A alone decides there; in the second group one item lacks B, and is
    left out of the sums [5, ., 1]: mean 3, std sqrt(8), ±2 / sqrt(8)."""
    a = [[1.0, 0.0, 0.0, 0.0], [4.0, 9.0, 1.0]]
    b = [[None] * 4, [1.0, None, 0.0]]
    got = combine_rewards([a, b], eps=0.0)
    assert got[0] == [1.5, -0.5, -0.5, -0.5]
    np.testing.assert_allclose(got[1], [math.sqrt(0.5), 0, -math.sqrt(0.5)])
    assert combine_rewards([b, b])[0] == [0.0] * 4


@pytest.mark.parametrize("order", ["sum_then_normalize", "normalize_then_sum"])
def test_several_rewards_agree_with_trl(order: Any) -> None:
    """TRL 1.16: weighted sum, then grouped z-score; or grouped z-scores, weighted sum, then z-score over the batch."""
    generator = torch.Generator().manual_seed(2)
    rewards = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
    weights = torch.tensor([1.0, 0.3], dtype=torch.float64)
    if order == "sum_then_normalize":
        total = (rewards * weights[:, None, None]).sum(0)
        wanted = (total - total.mean(1, keepdim=True)) / (total.std(1, keepdim=True) + 1e-4)
    else:
        each = (rewards - rewards.mean(2, keepdim=True)) / (rewards.std(2, keepdim=True) + 1e-4)
        total = (each * weights[:, None, None]).sum(0)
        wanted = (total - total.mean()) / (total.std() + 1e-4)
    got = combine_rewards(list(rewards), weights.tolist(), order, normalize_batch=True)
    torch.testing.assert_close(got, wanted)


def test_combining_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        combine_rewards([])
    with pytest.raises(ValueError, match="weights"):
        combine_rewards([[[1.0]]], [1, 2])
    with pytest.raises(ValueError, match="order"):
        combine_rewards([[[1.0]]], order="none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="same number"):
        combine_rewards([[[1.0, 2.0]], [[1.0]]])
