"""In bf16 a reward is as close to fp32 as plain transformers in bf16, by its layers and by our compiled kernels."""

from pathlib import Path

import pytest
import torch

from rm_core.model import RewardModel
from tests.core.exactness import (
    FUSED,
    Subject,
    check_bfloat16,
    hidden_of,
    plain_classifier,
    plain_scores,
    rms,
    subject_of,
)

FEW = ["llama", "qwen2 with one windowed layer", "qwen3", "mistral with a long window", "ministral3"]


def test_bfloat16_is_as_close_to_fp32_as_plain_transformers_in_bfloat16(subject: Subject) -> None:
    model = RewardModel.load(str(subject.directory), dtype="bfloat16", device="cpu")
    plain = plain_classifier(subject.directory, torch.bfloat16)
    check_bfloat16(model, plain, subject.sequences, subject.hidden)


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=[pytest.mark.slow, pytest.mark.long]) for name in FUSED]
)
def test_bfloat16_by_compiled_kernels_is_as_close_to_fp32(name: str, tmp_path: Path) -> None:
    """Two threads too: rows are divided among them."""
    family, changes = FUSED[name]
    subject = subject_of(family, 130, tmp_path / "model", **changes)
    model = RewardModel.load(str(subject.directory), dtype="bfloat16", device="cpu")
    if family in ("llama", "qwen2", "qwen3", "mistral", "seed_oss") and kernels_are_there():
        assert model.network.fused_off is None
    plain = plain_classifier(subject.directory, torch.bfloat16)
    check_bfloat16(model, plain, subject.sequences, subject.hidden)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        _, found = hidden_of(model, subject.sequences, max_tokens=700)
    finally:
        torch.set_num_threads(threads)
    assert rms(found - subject.hidden) <= 1.1 * rms(plain_scores(plain, subject.sequences)[1] - subject.hidden)


def kernels_are_there() -> bool:
    from rm_core import kernels

    try:
        kernels.load()
    except kernels.NoKernelsError:
        return False
    return True


def test_bfloat16_rounds_weights_and_not_rotary_frequencies(subject: Subject) -> None:
    """Frequencies in bf16 are off by up to 0.2 %, which turns the 500th token by half a radian."""
    model = RewardModel.load(str(subject.directory), dtype="bfloat16", device="cpu")
    plain = dict(plain_classifier(subject.directory, torch.bfloat16).base_model.named_buffers())
    ours = dict(model.network.backbone.named_buffers())
    frequencies = [name for name in plain if "inv_freq" in name]
    assert frequencies
    for name in frequencies:
        assert torch.equal(ours[name], plain[name]), name
    model.to_dtype("float32")
    assert model.network.fused_off is not None
    assert all(torch.equal(buffer, plain[name]) for name, buffer in model.network.backbone.named_buffers())
