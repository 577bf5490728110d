"""How a training model is built: going on from another reward model, quantised bases, and what is refused."""

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rm_core import loading
from rm_core.checkpoint import CheckpointError, read_record
from rm_core.loading import LoadError, build_for_training, locate
from rm_core.model import RewardModel
from rm_train.config_file import ConfigError, load_config
from rm_train.fit import fit
from tests.conftest import save_classifier
from tests.train.runs import Quiet, make_config, metric_lines, text_rows, write_rows

SAME = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
"""The adapter of ``tiny_checkpoint``."""


def for_training(base: Path, lora: dict[str, Any] | None = SAME) -> RewardModel:
    return RewardModel.for_training(str(base), lora=lora, seed=0, dtype="float32", device="cpu")


def rewards(model: RewardModel) -> np.ndarray:
    return model.score_ids([model.renderer.render("a question? ", answer) for answer in ("yes", "no, never")])


# ------------------------------------------------------------------ going on from a reward model


@pytest.mark.parametrize("lora", [SAME, None], ids=["adapter", "merged"])
def test_adapter_checkpoint_goes_on_from_its_own_rewards(
    lora: dict[str, Any] | None, tiny_checkpoint: Path, tiny_base: Path
) -> None:
    loaded = RewardModel.load(str(tiny_checkpoint), dtype="float32", device="cpu")
    model = for_training(tiny_checkpoint, lora)
    model.network.eval()
    np.testing.assert_allclose(rewards(model), rewards(loaded), atol=1e-4)
    assert str(model.base.directory) == str(tiny_base)
    trained = [name for name, parameter in model.network.named_parameters() if parameter.requires_grad]
    assert all("lora_" in name or "score" in name for name in trained) == (lora is not None)


def test_whole_reward_model_keeps_its_head(tmp_path: Path) -> None:
    path = save_classifier(tmp_path / "classifier")
    loaded = RewardModel.load(str(path), dtype="float32", device="cpu", verify=False)
    model = for_training(path)
    model.network.eval()
    ids = [[5, 6, 7, 257], [9, 9, 257]]
    np.testing.assert_allclose(model.score_ids(ids), loaded.score_ids(ids), atol=1e-4)


def test_run_that_goes_on_gives_a_checkpoint_on_the_same_base(
    tiny_checkpoint: Path, tiny_base: Path, tmp_path: Path
) -> None:
    pairs = write_rows(tmp_path / "pairs.jsonl", text_rows(8))
    result = fit(make_config(tiny_checkpoint, tmp_path, pairs, pairs, train={"max_steps": 1}), Quiet())
    before, after = read_record(tiny_checkpoint), result.record
    assert before is not None
    assert after is not None
    assert after.hashes.base == before.hashes.base
    assert after.base_model.name == before.base_model.name == str(tiny_base)
    assert after.reward_id != before.reward_id
    assert abs(metric_lines(result.directory)[0]["loss"] - np.log(2)) > 0.01, "it starts with the preferences it had"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"r": 8}, "was trained with r 4, the lora section says 8"),
        ({"lora_alpha": 16}, "was trained with lora_alpha 8, the lora section says 16"),
        ({"target_modules": ["q_proj"]}, "the lora section does not ask for 'base_model.model"),
    ],
)
def test_going_on_with_another_adapter_is_refused(changes: dict[str, Any], named: str, tiny_checkpoint: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        for_training(tiny_checkpoint, {**SAME, **changes})
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------ quantised bases


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_quantised_base_without_a_gpu_is_refused(bits: Any, tiny_base: Path) -> None:
    with pytest.raises(LoadError, match=rf"^model\.quantize: {bits} needs a CUDA device"):
        build_for_training(
            locate(str(tiny_base)), lora=SAME, dtype=torch.float32, seed=0, head_init_scale=0.01, quantize=bits,
            device=torch.device("cpu"),
        )  # fmt: skip


def test_missing_bitsandbytes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LoadError, match="pip install bitsandbytes"):
        loading._quantization("4bit", torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_quantised_base_leaves_the_head_out(bits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of one row in few bits gives 0.0 for every text."""

    class Config:
        def __init__(self, **options: Any) -> None:
            self.options = options

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: types.SimpleNamespace())
    monkeypatch.setattr("transformers.BitsAndBytesConfig", Config)
    device = torch.device("cuda", 0)
    options = loading._quantization(bits, torch.bfloat16, device)
    assert options["device_map"] == {"": device}
    found = options["quantization_config"].options
    assert found[f"load_in_{bits}"] is True
    assert {"score", "classifier"} <= set(found["llm_int8_skip_modules"])
    assert bits == "8bit" or (found["bnb_4bit_quant_type"], found["bnb_4bit_compute_dtype"]) == ("nf4", torch.bfloat16)


def test_quantised_weights_cannot_be_trained_themselves(tiny_base: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    values = {"run": {"name": "a"}, "model": {"base": str(tiny_base), "quantize": "4bit"}, "data": {"train": ["x"]}}
    config.write_text(json.dumps({**values, "lora": None}))
    with pytest.raises(ConfigError, match=r"model\.quantize: needs lora"):
        load_config(config)


def test_missing_gpu_is_one_line_of_the_command(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    from tests.train.test_cli import run

    config = tmp_path / "run.yaml"
    pairs = write_rows(tmp_path / "pairs.jsonl", text_rows(8))
    values = {"run": {"name": "a", "output_dir": str(tmp_path)}, "data": {"train": [str(pairs)]}}
    config.write_text(json.dumps({**values, "model": {"base": str(tiny_base), "quantize": "4bit"}}))
    code, _, err = run(capsys, "fit", config)
    assert code == 2
    assert err.splitlines()[-1].startswith("rm-train: error: model.quantize: 4bit needs a CUDA device")
    assert not (tmp_path / "a").exists()
    assert "bitsandbytes" not in sys.modules
