"""The Bradley–Terry loss: golden values, stability, gradients, options."""

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rm_client import bradley_terry_loss


def both(chosen: Any, rejected: Any, **options: Any) -> np.ndarray:
    """The NumPy form's result, after checking that the torch form in fp64 gives the same."""
    array = bradley_terry_loss(np.asarray(chosen), np.asarray(rejected), **options)
    tensors = {k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    tensor = bradley_terry_loss(
        torch.tensor(chosen, dtype=torch.float64), torch.tensor(rejected, dtype=torch.float64), **tensors
    )
    np.testing.assert_allclose(tensor.numpy(), array, rtol=1e-12, atol=1e-300)
    return array


def test_golden_values() -> None:
    """σ(0) = 1/2, so −log σ = log 2 = 0.693147. d = log 3: σ = 3/4, −log = log(4/3) = 0.287682; d = −log 3: log 4."""
    d = math.log(3)
    got = both([0.0, d, 0.0], [0.0, 0.0, d])
    np.testing.assert_allclose(got, [math.log(2), math.log(4 / 3), math.log(4)], rtol=1e-14)


def test_stable_at_ten_thousand() -> None:
    """−log σ(1e4) = log(1 + e^−1e4) = 0 to any precision; −log σ(−1e4) = 1e4."""
    np.testing.assert_array_equal(both([1e4, -1e4], [-1e4, 1e4]), [0.0, 2e4])
    r = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = bradley_terry_loss(r, -r.detach())
    loss.sum().backward()
    assert loss.tolist() == [0.0, 2e4]
    assert r.grad is not None
    assert r.grad.tolist() == [0.0, -1.0]


def test_unreduced_unless_asked() -> None:
    chosen, rejected, weight = np.array([[0.0, 2.0]]), np.array([[0.0, 0.0]]), np.array([[3.0, 1.0]])
    each = both(chosen, rejected)
    assert each.shape == (1, 2)
    assert both(chosen, rejected, reduction="sum") == pytest.approx(each.sum())
    assert both(chosen, rejected, reduction="mean") == pytest.approx(each.mean())
    np.testing.assert_allclose(both(chosen, rejected, weight=weight), each * weight)
    weighted = both(chosen, rejected, weight=weight, reduction="mean")
    assert weighted == pytest.approx((3 * each[0, 0] + each[0, 1]) / 4)


def test_margin_target_and_smoothing() -> None:
    """margin m: −log σ(d − m). target p: −p log σ(d) − (1 − p) log σ(−d); with d = log 3 and p = 1/2:
    (log(4/3) + log 4) / 2 = 0.836988. Smoothing 0.1 is target 0.9."""
    d = math.log(3)
    np.testing.assert_allclose(both([d + 0.5], [0.0], margin=0.5), [math.log(4 / 3)])
    np.testing.assert_allclose(both([d + 0.5], [0.0], margin=np.array([0.5])), [math.log(4 / 3)])
    np.testing.assert_allclose(both([d], [0.0], target=0.5), [(math.log(4 / 3) + math.log(4)) / 2])
    np.testing.assert_allclose(both([d], [0.0], target=np.array([0.0])), [math.log(4)])
    np.testing.assert_array_equal(both([d], [0.0], label_smoothing=0.1), both([d], [0.0], target=0.9))


def test_centring_is_trls() -> None:
    """TRL: loss + coefficient · mean((r_w + r_l)²); for (2, 1) and (0, −1) with 0.01: 0.01 · (9 + 1) / 2 = 0.05."""
    chosen, rejected = [2.0, 0.0], [1.0, -1.0]
    plain = both(chosen, rejected, reduction="mean")
    assert both(chosen, rejected, center_coefficient=0.01, reduction="mean") == pytest.approx(plain + 0.05)


def test_agrees_with_trl_on_random_rewards() -> None:
    """TRL 1.16, RewardTrainer: −logsigmoid(chosen − rejected − margin).mean()."""
    generator = torch.Generator().manual_seed(0)
    chosen, rejected, margin = (torch.randn(64, generator=generator) for _ in range(3))
    wanted = -torch.nn.functional.logsigmoid(chosen - rejected - margin).mean()
    torch.testing.assert_close(bradley_terry_loss(chosen, rejected, margin=margin, reduction="mean"), wanted)


def test_gradients_by_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    chosen, rejected, margin = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(3))
    target, weight = (torch.rand(5, generator=generator, dtype=torch.float64) for _ in range(2))

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return bradley_terry_loss(a, b, margin=margin, target=target, weight=weight, center_coefficient=0.1)

    assert torch.autograd.gradcheck(loss, (chosen.requires_grad_(), rejected.requires_grad_()))


def test_half_precision_is_computed_in_fp32() -> None:
    chosen, rejected = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([0.5], dtype=torch.bfloat16)
    got = bradley_terry_loss(chosen, rejected)
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(math.log1p(math.exp(-0.5)), rel=1e-6)


rewards = st.floats(-1e4, 1e4)


@given(rewards, rewards, st.floats(0, 1))
def test_finite_non_negative_and_symmetric(a: float, b: float, p: float) -> None:
    loss = both([a, b], [b, a])
    assert np.isfinite(loss).all()
    assert (loss >= 0).all()
    # −log σ(d) + log σ(−d) = −d
    np.testing.assert_allclose(loss[0] - loss[1], b - a, rtol=1e-9, atol=1e-9)
    swapped = both([a], [b], target=p), both([b], [a], target=1 - p)
    np.testing.assert_allclose(*swapped, rtol=1e-9, atol=1e-9)


@given(rewards, rewards, st.floats(-100, 100))
def test_a_common_shift_changes_nothing(a: float, b: float, shift: float) -> None:
    np.testing.assert_allclose(both([a + shift], [b + shift]), both([a], [b]), rtol=1e-6, atol=1e-9)


def test_what_would_be_broadcast_is_refused() -> None:
    one, many = torch.zeros(3, 1), torch.zeros(3)
    with pytest.raises(ValueError, match="r_rejected"):
        bradley_terry_loss(one, many)
    for name in ("margin", "weight", "target"):
        with pytest.raises(ValueError, match=name):
            bradley_terry_loss(many, many, **{name: one})
    with pytest.raises(TypeError, match="torch"):
        bradley_terry_loss(many, np.zeros(3))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"label_smoothing": 0.5}, "label_smoothing"),
        ({"label_smoothing": 0.1, "target": 0.5}, "give one"),
        ({"center_coefficient": -1.0}, "center_coefficient"),
        ({"reduction": "avg"}, "reduction"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        bradley_terry_loss(np.zeros(2), np.zeros(2), **options)


def test_numpy_form_works_without_torch() -> None:
    code = (
        "import sys, numpy as np, rm_client as c; c.bradley_terry_loss(np.ones(2), np.zeros(2));"
        "c.grpo_advantages([[1, 0]]); c.k3_kl(np.ones(1), np.zeros(1)); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
