"""How a training model is built: going on from another reward model, quantised bases, and what is refused."""

import datetime
import importlib.util
import json
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rm_core import loading
from rm_core.chat import Renderer
from rm_core.checkpoint import CheckpointError, read_record, write_checkpoint
from rm_core.loading import LoadError, build_for_training, locate
from rm_core.model import RewardModel
from rm_train import check
from rm_train.check import CheckInput
from rm_train.config_file import ConfigError, load_config
from rm_train.fit import fit
from tests.conftest import CHATML, byte_tokenizer, save_classifier
from tests.train.runs import (
    ENCODERS,
    MODERNBERT,
    Quiet,
    make_config,
    metric_lines,
    save_encoder,
    text_rows,
    write_rows,
)

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


# ------------------------------------------------------------------ rules of the old record


@pytest.fixture(scope="module")
def chat_checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    """The checkpoint of a run that rendered text as a chat, with the template's whole output, on another day."""
    directory = tmp_path_factory.mktemp("chat")
    model = RewardModel.for_training(
        str(tiny_base), lora=SAME, seed=1, dtype="float32", device="cpu", text_as="chat", end="template"
    )
    rules = model.renderer.rules.model_copy(update={"date": datetime.date(2030, 1, 2)})
    model.renderer = Renderer(model.tokenizer, rules)
    write_checkpoint(model, directory / "checkpoint", training_length=64)
    return directory / "checkpoint"


def test_going_on_keeps_the_rules_and_check_renders_by_them(chat_checkpoint: Path, tmp_path: Path) -> None:
    old = read_record(chat_checkpoint)
    assert old is not None
    assert (old.rules.text_as, old.rules.end, old.rules.date.year) == ("chat", "template", 2030)
    rows = text_rows(4)
    pairs = write_rows(tmp_path / "pairs.jsonl", rows)
    config = make_config(chat_checkpoint, tmp_path, pairs, pairs, train={"max_steps": 1})
    record = fit(config, Quiet()).record
    assert record is not None
    assert record.rules == old.rules
    renderer = check._renderer(CheckInput([], model=str(chat_checkpoint)))[0]
    assert renderer.rules == old.rules
    same = make_config(chat_checkpoint, tmp_path, pairs, pairs, model={"text_as": "chat"}, train={"max_steps": 1})
    again = fit(same, Quiet()).record
    assert again is not None
    assert again.rules == old.rules


def test_going_on_by_other_rules_is_refused_by_fit_and_check_alike(chat_checkpoint: Path, tmp_path: Path) -> None:
    said = f"{chat_checkpoint}: was trained with text_as chat, not raw; going on keeps it: leave text_as out"
    pairs = write_rows(tmp_path / "pairs.jsonl", text_rows(4))
    with pytest.raises(CheckpointError) as caught:
        fit(make_config(chat_checkpoint, tmp_path, pairs, pairs, model={"text_as": "raw"}), Quiet())
    assert str(caught.value) == said
    with pytest.raises(CheckpointError) as caught:
        check._renderer(CheckInput([], model=str(chat_checkpoint), text_as="raw"))
    assert str(caught.value) == said
    with pytest.raises(CheckpointError, match="was trained with end template, not token"):
        RewardModel.for_training(str(chat_checkpoint), lora=SAME, seed=0, device="cpu", end="token")


def test_going_on_with_another_template_is_refused(chat_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(chat_checkpoint, folder)
    byte_tokenizer(CHATML.replace("helpful", "brief")).save_pretrained(folder)
    with pytest.raises(CheckpointError, match="changed: a rendering rule changed: chat_template"):
        for_training(folder)


# ------------------------------------------------------------------ new layers of an encoder


SAME_ON_ENCODERS = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


@pytest.mark.parametrize("family", ENCODERS)
def test_fresh_norms_of_an_encoder_scale_by_one_and_only_its_last_layer_starts_small(
    family: str, tmp_path: Path
) -> None:
    """A zero scale would make the reward one constant, without a gradient for what lies before it."""
    base = save_encoder(tmp_path / family, family, **ENCODERS[family])
    built = [
        build_for_training(locate(str(base)), lora=None, dtype=torch.float32, seed=seed, head_init_scale=0.01)
        for seed in (3, 3, 4)
    ]
    one, same, other = (network.eval() for network in built)
    stored = set(load_file(base / "model.safetensors"))
    backbone = f"{one.base.base_model_prefix}."
    fresh = {name: weight for name, weight in one.base.named_parameters() if name.removeprefix(backbone) not in stored}
    assert any(weight.shape[0] == 1 for weight in fresh.values())
    for name, weight in fresh.items():
        assert torch.equal(weight, same.base.get_parameter(name))
        if name.endswith("bias"):
            assert not weight.any(), name
        elif weight.dim() == 1:
            assert bool((weight == 1).all()), name
        else:
            expected = 0.01 / weight.shape[1] ** 0.5 if weight.shape[0] == 1 else one.base.config.initializer_range
            assert float(weight.detach().std()) == pytest.approx(expected, rel=0.7), name  # some scale it by depth
            assert not torch.equal(weight, other.base.get_parameter(name))
    rewards = one([[5, 6, 7, 257], [9, 9, 257], [30, 2, 80, 257]])
    assert len(set(rewards.tolist())) == 3
    rewards.sum().backward()
    assert all(bool(weight.grad.any()) for weight in one.parameters() if weight.grad is not None and weight.dim() == 2)


@pytest.mark.parametrize("lora", [SAME_ON_ENCODERS, None], ids=["adapter", "whole"])
def test_encoder_starts_at_ln_2_and_scores_the_same_when_loaded(lora: dict[str, Any] | None, tmp_path: Path) -> None:
    base = save_encoder(tmp_path / "base", "modernbert", **MODERNBERT)
    pairs = write_rows(tmp_path / "pairs.jsonl", text_rows(8))
    section = None if lora is None else {"r": 4, "alpha": 8}
    config = make_config(base, tmp_path, pairs, pairs, lora=section, train={"max_steps": 3, "learning_rate": 1e-2})
    result = fit(config, Quiet())
    assert metric_lines(result.directory)[0]["loss"] == pytest.approx(np.log(2), rel=0.01)
    loaded = RewardModel.load(str(result.directory / "checkpoint"), dtype="float32", device="cpu")
    assert result.record is not None
    assert result.record.reward_std > 1e-4
    model = for_training(base, lora)
    with tempfile.TemporaryDirectory() as folder:
        before = rewards(model_in_eval(model))
        write_checkpoint(model, Path(folder) / "checkpoint", training_length=64)
        after = rewards(RewardModel.load(str(Path(folder) / "checkpoint"), dtype="float32", device="cpu"))
    np.testing.assert_allclose(after, before, atol=1e-5)
    found = [float(item) for item in rewards(loaded)]
    assert found[0] != found[1]


def model_in_eval(model: RewardModel) -> RewardModel:
    model.network.eval()
    return model


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
