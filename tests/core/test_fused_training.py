"""The fused training pass gives LoRA the gradients of plain transformers, at least as close to fp32 as bf16 autocast."""

import numpy as np
import pytest
import torch

from rm_core.model import RewardModel
from tests.conftest import randomise_adapter, save_base
from tests.core.test_attention import nested_sequences
from tests.core.test_fused import SIZES, has_kernels, long_sequences  # noqa: F401

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
PART = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def for_training(tmp_path, family, dtype, lora, **changes):
    directory = tmp_path / f"{family}-base"
    sizes = SIZES | ({"head_dim": None, "hidden_size": 128} if family == "qwen2" else {})
    if not directory.exists():
        save_base(directory, family, **{**sizes, **changes})
    model = RewardModel.for_training(str(directory), lora=lora, seed=1, dtype=dtype, device="cpu")
    randomise_adapter(model)
    return model


def gradients(model, sequences, forward):
    weights = torch.linspace(-1, 1, len(sequences))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=model.dtype == "bfloat16"):
        rewards = forward(sequences)
        (rewards * weights).sum().backward()
    found = {name: p.grad.clone() for name, p in model.network.named_parameters() if p.grad is not None}
    model.network.zero_grad()
    return rewards.detach(), found


def relative_errors(found, expected):
    assert found.keys() == expected.keys()
    return np.array([float((found[name] - g).norm() / g.norm()) for name, g in expected.items()])


@pytest.mark.parametrize("lora", [LORA, PART], ids=["all-linear", "some"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_gradients_are_as_close_to_fp32_as_those_of_plain_transformers(family, lora, tmp_path, has_kernels):  # noqa: F811
    changes = {"sliding_window": 600} if family == "mistral" else {}
    fused = for_training(tmp_path, family, "bfloat16", lora, **changes)
    assert fused.network.fused_off is None
    exact = for_training(tmp_path, family, "float32", lora)
    ours, plain = [], []
    for seed in range(3):
        sequences = long_sequences(seed)
        expected_rewards, expected = gradients(exact, sequences, exact.network.forward_padded)
        rewards, found = gradients(fused, sequences, fused.network)
        _, autocast = gradients(fused, sequences, fused.network.forward_padded)
        assert float((rewards - expected_rewards).std() / expected_rewards.std()) < 0.05
        ours.append(relative_errors(found, expected))
        plain.append(relative_errors(autocast, expected))
    assert np.mean(ours) <= 1.1 * np.mean(plain)
    assert np.max(ours) <= 1.5 * np.max(plain)


def test_a_budget_does_not_change_the_gradient(tmp_path, has_kernels):  # noqa: F811
    model = for_training(tmp_path, "llama", "bfloat16", LORA)
    sequences = long_sequences(5)
    _, whole = gradients(model, sequences, model.network)
    half = len(sequences) // 2
    weights = torch.linspace(-1, 1, len(sequences))
    for part in (slice(0, half), slice(half, None)):
        (model.network(sequences[part]) * weights[part]).sum().backward()
    parts = {name: p.grad for name, p in model.network.named_parameters() if p.grad is not None}
    assert relative_errors(parts, whole).max() < 0.02


@pytest.mark.parametrize(
    ("family", "lora", "changes", "reason"),
    [
        ("llama", None, {}, "more is trained of it than LoRA"),
        ("llama", {**LORA, "lora_dropout": 0.1}, {}, "dropout"),
        ("llama", {**LORA, "use_dora": True}, {}, "not plain LoRA"),
        ("qwen3", LORA, {}, "normalises its heads"),
    ],
)
def test_what_it_cannot_do_goes_through_transformers(family, lora, changes, reason, tmp_path, has_kernels):  # noqa: F811
    model = for_training(tmp_path, family, "bfloat16", lora, **changes)
    assert reason in model.network.fused_off
    _, found = gradients(model, nested_sequences(0), model.network)
    assert all(torch.isfinite(g).all() for g in found.values())


def test_a_text_longer_than_a_sliding_window_goes_through_transformers(tmp_path, has_kernels):  # noqa: F811
    model = for_training(tmp_path, "mistral", "bfloat16", LORA, sliding_window=16)
    exact = for_training(tmp_path, "mistral", "float32", LORA, sliding_window=16)
    assert model.network.fused_off is None
    sequences = long_sequences(2)
    _, expected = gradients(exact, sequences, exact.network.forward_padded)
    _, found = gradients(model, sequences, model.network)
    assert relative_errors(found, expected).max() < 0.1


def test_gradient_checkpointing_goes_through_transformers_with_the_same_gradient(tmp_path, has_kernels):  # noqa: F811
    model = for_training(tmp_path, "llama", "bfloat16", LORA)
    sequences = nested_sequences(3)
    _, expected = gradients(model, sequences, model.network)
    model.network.train()
    model.network.use_gradient_checkpointing()
    _, found = gradients(model, sequences, model.network)
    assert relative_errors(found, expected).max() < 0.15
