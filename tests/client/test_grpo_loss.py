"""k3 and the GRPO loss: golden values derived by hand, masks, gradients, agreement with TRL's and verl's formulas."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rm_client import grpo_advantages, grpo_loss, k3_kl

F64 = torch.float64


def random_batch(*shape: int, seed: int = 0, spread: float = 0.3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(*shape, generator=generator, dtype=F64) * 3
    new = old + spread * torch.randn(*shape, generator=generator, dtype=F64)
    ref = old + spread * torch.randn(*shape, generator=generator, dtype=F64)
    return new, old, ref


def test_k3_golden_values() -> None:
    """d = ref − new. d = log 2: 2 − log 2 − 1 = 0.306853. d = −log 2: 1/2 + log 2 − 1 = 0.193147. d = 0: 0."""
    new, ref = np.array([0.0, math.log(2), 0.7]), np.array([math.log(2), 0.0, 0.7])
    wanted = [1 - math.log(2), math.log(2) - 0.5, 0.0]
    np.testing.assert_allclose(k3_kl(new, ref), wanted, atol=1e-15)
    np.testing.assert_allclose(k3_kl(torch.tensor(new), torch.tensor(ref)).numpy(), wanted, atol=1e-15)


def test_the_mean_of_k3_over_the_new_policys_samples_is_kl_of_new_from_reference() -> None:
    """p = (0.7, 0.2, 0.1), q = (0.5, 0.25, 0.25): KL(p‖q) = 0.7 log 1.4 + 0.2 log 0.8 + 0.1 log 0.4 = 0.099275.

    Σ p (q/p − log(q/p) − 1) = 1 + KL − 1 exactly; with the direction turned round it would be another number."""
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.25, 0.25])
    kl = 0.7 * math.log(1.4) + 0.2 * math.log(0.8) + 0.1 * math.log(0.4)
    assert (p * k3_kl(np.log(p), np.log(q))).sum() == pytest.approx(kl)
    assert (p * k3_kl(np.log(q), np.log(p))).sum() != pytest.approx(kl, rel=0.05)


@given(st.floats(-1e4, 1e4), st.floats(-1e4, 1e4))
def test_k3_is_finite_and_never_negative(new: float, ref: float) -> None:
    for value in (
        k3_kl(np.array(new), np.array(ref)),
        k3_kl(torch.tensor(new), torch.tensor(ref)),
        k3_kl(torch.tensor(new, dtype=F64), torch.tensor(ref, dtype=F64)),
    ):
        assert math.isfinite(value)
        assert value >= 0


def test_k3_is_exact_for_small_differences() -> None:
    """exp(d) − d − 1 = d²/2 + d³/6 + …; for d = 1e-4 that is 5.00016667e-9, below fp32's resolution of 1."""
    got = k3_kl(torch.zeros(1), torch.tensor([1e-4]))
    assert got.item() == pytest.approx(5.00016667e-9, rel=1e-3)


def test_golden_loss_of_one_group() -> None:
    """Ratios 1.5, 0.9, 0.5, 1.1 with advantages 1.5, −0.5, −0.5, −0.5 and clip 0.2:

    min(2.25, 1.2·1.5 = 1.8) = 1.8 (clipped); min(−0.45, −0.45) = −0.45; min(−0.25, 0.8·−0.5 = −0.4) = −0.4 (clipped);
    min(−0.55, −0.55) = −0.55. Sum 0.4, so the policy loss is −0.1. The reference is the new policy times 2 for the
    first answer and equal for the others: KL mean (1 − log 2) / 4 = 0.0767132; loss −0.1 + 0.05 · 0.0767132."""
    ratios = torch.tensor([[1.5, 0.9, 0.5, 1.1]], dtype=F64)
    old = torch.tensor([[-40.0, -3.0, -7.0, -1.0]], dtype=F64)
    new = (old + ratios.log()).requires_grad_()
    ref = new.detach() + torch.tensor([[math.log(2), 0.0, 0.0, 0.0]], dtype=F64)
    kl = (1 - math.log(2)) / 4
    loss, stats = grpo_loss(new, old, ref, rewards=[[1.0, 0.0, 0.0, 0.0]], eps=0.0)
    assert loss.item() == pytest.approx(-0.1 + 0.05 * kl)
    assert stats.loss == pytest.approx(loss.item())
    assert stats.policy_loss == pytest.approx(-0.1)
    assert stats.kl == pytest.approx(kl)
    assert stats.ratio == pytest.approx(1.0)
    assert stats.clip_fraction == 0.5
    assert stats.clamp_fraction == 0.0
    assert stats.advantages is not None
    assert stats.advantages.num_zero_spread == 0
    loss.backward()
    # Where the clip holds only the KL pulls: −0.05/4 · (e^d − 1) = −0.0125 for d = log 2. Elsewhere −ρ A / 4.
    assert new.grad is not None
    np.testing.assert_allclose(new.grad.numpy(), [[-0.0125, 0.9 * 0.5 / 4, 0.0, 1.1 * 0.5 / 4]], atol=1e-15)


def test_the_reference_pulls_the_policy_back() -> None:
    """One step downhill on the KL alone moves every log-probability towards the reference's."""
    new, old, ref = random_batch(3, 4)
    new.requires_grad_()
    loss, _ = grpo_loss(new, old, ref, advantages=torch.zeros(3, 4), kl_coeff=1.0)
    loss.backward()
    assert new.grad is not None
    assert ((-new.grad * (ref - new.detach())) > 0).all()


def test_no_gradient_reaches_anything_but_the_policy() -> None:
    new, old, ref = (x.requires_grad_() for x in random_batch(2, 4))
    rewards = torch.randn(2, 4, requires_grad=True)
    loss, _ = grpo_loss(new, old, ref, rewards)
    loss.backward()
    assert new.grad is not None
    assert (old.grad, ref.grad, rewards.grad) == (None, None, None)
    advantages = torch.randn(2, 4, requires_grad=True)
    loss, _ = grpo_loss(new, old, ref, advantages=advantages)
    loss.backward()
    assert advantages.grad is None


@pytest.mark.parametrize("aggregation", ["sequence", "grpo", "dr_grpo", "dapo"])
def test_gradients_by_finite_differences(aggregation: Any) -> None:
    new, old, ref = random_batch(2, 3, 5, spread=0.15)
    mask = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(3)) < 0.7
    advantages = torch.randn(2, 3, generator=torch.Generator().manual_seed(4), dtype=F64)

    def loss(log_probs: torch.Tensor) -> torch.Tensor:
        return grpo_loss(log_probs, old, ref, advantages=advantages, aggregation=aggregation, mask=mask)[0]

    assert torch.autograd.gradcheck(loss, (new.requires_grad_(),))


@pytest.mark.parametrize("aggregation", ["grpo", "dr_grpo", "dapo"])
def test_token_level_agrees_with_trl_and_verl(aggregation: Any) -> None:
    """TRL 1.16 compute_loss (loss_type grpo, dr_grpo, dapo) and verl 0.9.1 agg_loss (seq-mean-token-mean,
    seq-mean-token-sum-norm, token-mean) over −min(ρA, clip(ρ)A) + β·k3."""
    new, old, ref = random_batch(4, 3, 7)
    lengths = torch.tensor([[7, 1, 3], [2, 5, 7], [4, 4, 6], [1, 2, 3]])
    mask = (torch.arange(7) < lengths[..., None]).to(F64)
    advantages = torch.randn(4, 3, generator=torch.Generator().manual_seed(5), dtype=F64)
    ratio = torch.exp(new - old)
    a = advantages[..., None]
    each = -torch.min(ratio * a, torch.clamp(ratio, 0.8, 1.28) * a)
    each = each + 0.04 * (torch.exp(ref - new) - (ref - new) - 1)
    wanted = {
        "grpo": ((each * mask).sum(-1) / mask.sum(-1)).mean(),
        "dr_grpo": (each * mask).sum() / (12 * 16),
        "dapo": (each * mask).sum() / mask.sum(),
    }[aggregation]
    loss, stats = grpo_loss(
        new,
        old,
        ref,
        advantages=advantages,
        clip_eps=0.2,
        clip_eps_high=0.28,
        kl_coeff=0.04,
        aggregation=aggregation,
        mask=mask,
        max_length=16,
    )
    torch.testing.assert_close(loss, wanted)
    is_low, is_high = (ratio < 0.8) & (a < 0), (ratio > 1.28) & (a > 0)
    assert stats.clip_fraction == pytest.approx((((is_low | is_high) * mask).sum() / mask.sum()).item())
    assert stats.kl == pytest.approx(
        (((torch.exp(ref - new) - (ref - new) - 1) * mask).sum() / mask.sum()).item(), rel=1e-9
    )


def test_dr_grpo_divides_by_the_longest_length_where_none_is_given() -> None:
    new, old, ref = random_batch(2, 2, 5)
    common = {"advantages": torch.ones(2, 2), "aggregation": "dr_grpo"}
    assert grpo_loss(new, old, ref, **common)[0] == grpo_loss(new, old, ref, **common, max_length=5)[0]  # type: ignore[arg-type]


def test_tokens_are_summed_for_the_sequence_level() -> None:
    new, old, ref = random_batch(2, 3, 5, spread=0.1)
    mask = torch.arange(5) < torch.tensor([[5, 1, 3], [2, 5, 4]])[..., None]
    rewards = torch.randn(2, 3, generator=torch.Generator().manual_seed(6))
    summed = [(x * mask).sum(-1) for x in (new, old, ref)]
    loss, stats = grpo_loss(new, old, ref, rewards, mask=mask)
    wanted, other = grpo_loss(*summed, rewards)
    torch.testing.assert_close(loss, wanted)
    assert stats.kl == pytest.approx(other.kl)


@pytest.mark.parametrize("aggregation", ["sequence", "grpo", "dr_grpo", "dapo"])
def test_what_is_masked_may_hold_anything(aggregation: Any) -> None:
    new, old, ref = random_batch(2, 3, 5)
    mask = torch.arange(5) < torch.tensor([[5, 1, 3], [2, 5, 0]])[..., None]
    advantages = torch.randn(2, 3, dtype=F64, generator=torch.Generator().manual_seed(7))
    results = []
    for junk in (0.0, float("nan"), float("inf")):
        dirty = [torch.where(mask, x, torch.tensor(junk, dtype=F64)) for x in (new, old, ref)]
        log_probs = dirty[0].clone().requires_grad_()
        loss, stats = grpo_loss(
            log_probs, *dirty[1:], advantages=advantages, aggregation=aggregation, mask=mask, max_length=5
        )
        loss.backward()
        assert log_probs.grad is not None
        assert not log_probs.grad[~mask].any()
        results.append((loss.item(), log_probs.grad.tolist(), stats))
    assert results[0] == results[1] == results[2]
    assert math.isfinite(results[0][0])


def test_masked_answers_leave_the_group_and_the_mean() -> None:
    new, old, ref = random_batch(1, 5)
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0, float("inf")]])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    loss, _ = grpo_loss(new, old, ref, rewards, mask=mask)
    wanted, _ = grpo_loss(new[:, :4], old[:, :4], ref[:, :4], rewards[:, :4])
    torch.testing.assert_close(loss, wanted)


@pytest.mark.parametrize("aggregation", ["sequence", "grpo", "dr_grpo", "dapo"])
def test_nothing_to_average_is_zero_not_nan(aggregation: Any) -> None:
    new, old, ref = random_batch(2, 3, 4)
    new.requires_grad_()
    loss, stats = grpo_loss(new, old, ref, rewards=torch.ones(2, 3), aggregation=aggregation, mask=torch.zeros(2, 3, 4))
    loss.backward()
    assert loss.item() == 0.0
    assert new.grad is not None
    assert not new.grad.any()
    assert (stats.kl, stats.ratio) == (0.0, 0.0)


def test_missing_rewards_pull_only_by_the_kl() -> None:
    new, old, ref = random_batch(1, 3, spread=0.01)
    new.requires_grad_()
    loss, stats = grpo_loss(new, old, ref, rewards=[[1.0, None, 0.0]], kl_coeff=0.0)
    loss.backward()
    assert new.grad is not None
    assert new.grad[0, 1] == 0.0
    assert new.grad[0, 0] != 0.0
    assert stats.advantages is not None
    assert stats.advantages.num_missing == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_sums_do_not_overflow_and_are_counted(dtype: torch.dtype) -> None:
    """Log-ratios of +500 and −500 for new to old; the reference is 500 above new in the third answer."""
    old = torch.tensor([[-1000.0, -1000.0, -1000.0, -1000.0]], dtype=dtype)
    new = torch.tensor([[-500.0, -1504.0, -1000.0, -1000.0]], dtype=dtype, requires_grad=True)
    ref = torch.tensor([[-500.0, -1504.0, -500.0, -1000.0]], dtype=dtype)
    for advantages in ([[1.0, 1.0, 1.0, 1.0]], [[-1.0, -1.0, -1.0, -1.0]]):
        new.grad = None
        loss, stats = grpo_loss(new, old, ref, advantages=torch.tensor(advantages))
        loss.backward()
        assert loss.dtype == torch.float32
        assert math.isfinite(loss.item())
        assert new.grad is not None
        assert torch.isfinite(new.grad).all()
        assert stats.clamp_fraction == 0.5  # the first by its ratio, the third by its reference


def test_a_policy_far_above_its_reference_is_still_pulled_back() -> None:
    new = torch.tensor([[-10.0]], requires_grad=True)
    loss, stats = grpo_loss(new, new.detach(), torch.tensor([[-510.0]]), advantages=torch.zeros(1, 1), kl_coeff=1.0)
    loss.backward()
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(1.0)  # k3 ≈ new − ref − 1 there
    assert stats.kl == pytest.approx(499.0)
    assert stats.clamp_fraction == 0.0


def test_a_policy_far_below_its_reference_is_still_pulled_back() -> None:
    """limit = 2, d = 5: e² − 2 − 1 at the limit, and from there 3 steps with the slope e² − 1 of k3 at 2.

    The slope against new is its negative: a step down the gradient raises the policy. Below the limit, d = 1: e − 2,
    with the slope e − 1."""
    beyond = math.exp(2) - 3 + 3 * (math.exp(2) - 1)
    for new in (torch.tensor([-7.0, -3.0], requires_grad=True), torch.tensor([-7.0, -3.0], dtype=F64).requires_grad_()):
        value = k3_kl(new, torch.tensor([-2.0, -2.0]), limit=2.0)
        assert value.tolist() == pytest.approx([beyond, math.e - 2])
        value.sum().backward()
        assert new.grad is not None
        assert new.grad.tolist() == pytest.approx([1 - math.exp(2), 1 - math.e])
    array = k3_kl(np.array([-7.0, -3.0]), np.array([-2.0, -2.0]), limit=2.0)
    assert array.tolist() == pytest.approx([beyond, math.e - 2])


@pytest.mark.parametrize("aggregation", ["sequence", "grpo", "dr_grpo", "dapo"])
def test_numpy_gives_the_number_that_torch_gives(aggregation: Any) -> None:
    new, old, ref = random_batch(2, 4, 3)
    mask = torch.ones(2, 4, 3, dtype=torch.bool)
    mask[0, 1, 1:] = False
    rewards = torch.arange(8, dtype=F64).reshape(2, 4)
    wanted, stats = grpo_loss(new, old, ref, rewards, aggregation=aggregation, mask=mask)
    arrays = [x.numpy() for x in (new, old, ref)]
    for array in arrays:
        array.flags.writeable = False
    loss, its_stats = grpo_loss(*arrays, rewards.numpy(), aggregation=aggregation, mask=mask.numpy())
    assert isinstance(loss, np.floating)
    assert float(loss) == wanted.item()
    assert its_stats.loss == stats.loss
    assert stats.advantages is not None
    assert its_stats.advantages is not None
    np.testing.assert_array_equal(its_stats.advantages.advantages, stats.advantages.advantages.numpy())
    assert isinstance(its_stats.advantages.advantages, np.ndarray)
    given = grpo_advantages(rewards.numpy())
    loss, _ = grpo_loss(
        *(x[..., ::-1] for x in arrays), advantages=given, aggregation=aggregation, mask=mask.numpy()[..., ::-1]
    )
    assert float(loss) == pytest.approx(wanted.item(), rel=1e-6)
    mixed, _ = grpo_loss(new, *arrays[1:], rewards, aggregation=aggregation, mask=mask.numpy())
    assert mixed.item() == wanted.item()
    with pytest.raises(ValueError, match="old_log_probs"):
        grpo_loss(arrays[0], arrays[1][0], None, rewards, kl_coeff=0.0)


@given(st.integers(1, 64), st.sampled_from([1, 3]), st.integers(0, 1000), st.floats(0, 300))
def test_any_group_size_gives_a_finite_loss_and_gradient(size: int, prompts: int, seed: int, spread: float) -> None:
    new, old, ref = (x.float() for x in random_batch(prompts, size, seed=seed, spread=spread))
    rewards = torch.randn(prompts, size, generator=torch.Generator().manual_seed(seed))
    new.requires_grad_()
    loss, stats = grpo_loss(new, old, ref, rewards)
    loss.backward()
    assert math.isfinite(loss.item())
    assert new.grad is not None
    assert torch.isfinite(new.grad).all()
    assert stats.kl >= 0
    if size == 1:
        assert stats.policy_loss == 0.0


def test_rewards_and_their_advantages_give_the_same_loss() -> None:
    new, old, ref = random_batch(3, 4)
    rewards = torch.randn(3, 4, dtype=F64, generator=torch.Generator().manual_seed(8))
    for scale in ("std", "none", "batch"):
        by_rewards, _ = grpo_loss(new, old, ref, rewards, scale=scale, ddof=0)  # type: ignore[arg-type]
        by_advantages, _ = grpo_loss(new, old, ref, advantages=grpo_advantages(rewards, scale, 0))  # type: ignore[call-overload]
        torch.testing.assert_close(by_rewards, by_advantages)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": None}, "rewards or advantages"),
        ({"advantages": torch.zeros(2, 3)}, "rewards or advantages"),
        ({"aggregation": "mean"}, "aggregation"),
        ({"aggregation": "dapo"}, r"\[B, G, T\]"),
        ({"ref_log_probs": None}, "ref_log_probs"),
        ({"old_log_probs": torch.zeros(2, 1)}, "old_log_probs"),
        ({"ref_log_probs": torch.zeros(3)}, "ref_log_probs"),
        ({"mask": torch.zeros(2)}, "mask"),
        ({"rewards": torch.zeros(3, 2)}, "rewards"),
        ({"rewards": [0.0, 1.0]}, "rewards"),
        ({"rewards": None, "advantages": torch.zeros(2, 1)}, "advantages"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    new, old, ref = random_batch(2, 3)
    given_arguments: dict[str, Any] = {
        "log_probs": new,
        "old_log_probs": old,
        "ref_log_probs": ref,
        "rewards": torch.zeros(2, 3),
    }
    with pytest.raises(ValueError, match=message):
        grpo_loss(**{**given_arguments, **change})


def test_without_kl_no_reference_is_needed() -> None:
    new, old, _ = random_batch(2, 3)
    loss, stats = grpo_loss(new, old, None, torch.rand(2, 3), kl_coeff=0.0)
    assert math.isfinite(loss.item())
    assert stats.kl == 0.0
