"""The fused forward pass gives what transformers gives in bf16, at least as close to fp32, and steps aside where it must."""

import shutil

import numpy as np
import pytest
import torch

from rm_core import kernels
from rm_core.kernels import NoKernelsError
from rm_core.model import RewardModel
from rm_core.prefix_cache import PrefixCache
from tests.conftest import save_classifier
from tests.core.test_attention import nested_sequences

FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]
SIZES = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}


@pytest.fixture(autouse=True)
def fresh_kernels():
    kernels.load.cache_clear()
    yield
    kernels.load.cache_clear()


@pytest.fixture
def has_kernels():
    try:
        kernels.load()
    except NoKernelsError as error:
        pytest.skip(f"no compiled kernels here: {error}")


def load(tmp_path, family, dtype, **changes):
    sizes = dict(SIZES)
    if family == "qwen2":  # its head size is hidden size / heads
        sizes |= {"head_dim": None, "hidden_size": 128}
    directory = tmp_path / f"{family}-{len(list(tmp_path.iterdir()))}"
    save_classifier(directory, family, **{**sizes, **changes})
    return RewardModel.load(str(directory), dtype=dtype, device="cpu")


def long_sequences(seed):
    """Beyond the nested ones: more than a block of keys and rows, sizes around the kernel's 32 and 128."""
    generator = np.random.default_rng(seed)
    prompt = generator.integers(0, 256, 161).tolist()
    answers = [[*prompt, *generator.integers(0, 256, length).tolist()] for length in (1, 31, 32, 33, 128, 129)]
    return [*nested_sequences(seed), *answers, generator.integers(0, 256, 300).tolist()]


def root_mean_square(errors):
    return float(np.sqrt(np.mean(np.square(errors))))


@pytest.mark.parametrize("family", FAMILIES)
def test_its_error_against_fp32_is_not_above_that_of_plain_transformers_in_bf16(family, tmp_path, has_kernels):
    model, exact = load(tmp_path, family, "bfloat16"), load(tmp_path, family, "float32")
    assert model.network.fused_off is None
    ours, plain, budgeted = [], [], []
    for seed in range(3):
        sequences = long_sequences(seed)
        with torch.inference_mode():
            expected = torch.cat([exact.network.forward_padded([ids]) for ids in sequences]).numpy()
            transformers = torch.cat([model.network.forward_padded([ids]) for ids in sequences]).numpy()
        assert expected.std() > 0.05
        ours.append(model.score_ids(sequences) - expected)
        plain.append(transformers - expected)
        budgeted.append(model.score_batch(sequences, max_tokens=70, cache=PrefixCache(10**8)).rewards - expected)
    assert root_mean_square(ours) <= 1.1 * root_mean_square(plain)
    assert root_mean_square(budgeted) <= 1.1 * root_mean_square(plain)


@pytest.mark.parametrize("window", [1, 16, 100, 161])
def test_a_sliding_window_hides_what_it_hides_in_transformers(window, tmp_path, has_kernels):
    # one layer: with more, errors of bf16 add up and a window that is off by one could hide among them
    model = load(tmp_path, "mistral", "bfloat16", sliding_window=window, num_hidden_layers=1)
    exact = load(tmp_path, "mistral", "float32", sliding_window=window, num_hidden_layers=1)
    assert model.network.fused_off is None
    sequences = long_sequences(4)
    with torch.inference_mode():
        expected = torch.cat([exact.network.forward_padded([ids]) for ids in sequences]).numpy()
        transformers = torch.cat([model.network.forward_padded([ids]) for ids in sequences]).numpy()
    limit = 1.1 * root_mean_square(transformers - expected)
    assert root_mean_square(model.score_ids(sequences) - expected) <= limit
    cache = PrefixCache(10**8)
    again = [model.score_batch([ids], max_tokens=64, cache=cache).rewards[0] for ids in sequences]
    assert root_mean_square(np.array(again) - expected) <= limit


def test_nan_stays_with_its_own_sequence(tmp_path, has_kernels):
    model = load(tmp_path, "llama", "bfloat16")
    assert model.network.fused_off is None
    with torch.no_grad():
        model.network.backbone.embed_tokens.weight[7] = float("nan")
    shared = list(range(100, 140))
    rewards = model.score_ids([[*shared, 1, 2], [*shared, 7, 2], [*shared, 3], [*range(20, 60), 7]])
    assert np.isnan(rewards).tolist() == [False, True, False, True]


def test_weights_are_whole_again_when_they_are_saved_or_put_into_another_dtype(tmp_path, has_kernels):
    model = load(tmp_path, "llama", "bfloat16")
    sequences = nested_sequences(1)
    fused = model.score_ids(sequences)
    model.save_weights(tmp_path / "saved")
    again = RewardModel.load(str(tmp_path / "saved"), dtype="bfloat16", device="cpu")
    np.testing.assert_array_equal(again.score_ids(sequences), fused)
    again.to_dtype("float32")
    assert again.network.fused_off is not None
    with torch.inference_mode():
        expected = torch.cat([again.network.forward_padded([ids]) for ids in sequences]).numpy()
    np.testing.assert_allclose(again.score_ids(sequences), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma2", {}, "not a family"),
        ("olmo2", {}, "not a family"),
        ("llama", {"hidden_act": "gelu"}, "activation is not SiLU"),
        ("llama", {"head_dim": 24}, "multiples of 32"),
    ],
)
def test_models_of_another_build_go_through_transformers(family, changes, reason, tmp_path, has_kernels):
    model = load(tmp_path, family, "bfloat16", **changes)
    assert reason in model.network.fused_off
    assert model.sharing_off is None
    assert np.isfinite(model.score_ids(nested_sequences(0))).all()


def test_a_layer_that_looks_like_llamas_and_is_not_is_caught_by_the_self_check(tmp_path, has_kernels, monkeypatch):
    from transformers.models.llama import modeling_llama

    def forward(norm, hidden):  # as Gemma's: 1 + weight
        states = hidden.float()
        states = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return ((1 + norm.weight.float()) * states).to(hidden.dtype)

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", forward)
    model = load(tmp_path, "llama", "bfloat16")
    assert "self-check" in model.network.fused_off
    assert model.sharing_off is None


def test_without_a_compiler_the_reason_is_given_and_scores_stay_right(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    model = load(tmp_path, "llama", "bfloat16")
    assert "no C compiler" in model.network.fused_off
    assert np.isfinite(model.score_ids(nested_sequences(0))).all()


def test_a_compiler_that_fails_is_named_with_what_it_said(tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'unknown argument: -mamx-tile' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("BETTERTHAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    with pytest.raises(NoKernelsError, match="unknown argument: -mamx-tile"):
        kernels.load()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_library_that_another_user_could_have_written_is_not_loaded(tmp_path, has_kernels, monkeypatch):
    monkeypatch.setenv("BETTERTHAN_CACHE", str(tmp_path))
    kernels.load.cache_clear()
    kernels.load()
    (library,) = tmp_path.glob("kernels-*.so")
    library.chmod(0o777)
    kernels.load.cache_clear()
    with pytest.raises(NoKernelsError, match="another user"):
        kernels.load()
