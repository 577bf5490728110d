"""What was written is what is loaded; what changed is refused, and the message says which part."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rm_core.checkpoint import CheckpointError, read_record
from rm_core.model import RewardModel
from tests.conftest import CHATML, byte_tokenizer, make_checkpoint, save_base, save_classifier

SEQUENCES = [[1, 2, 3], [256, 40, 50, 257], [7] * 30]


@pytest.fixture
def copy(tiny_checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def edit_tensors(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def load(path: Path) -> RewardModel:
    return RewardModel.load(str(path), dtype="float32", device="cpu")


def test_another_process_under_another_seed_gives_the_same_scores_bit_for_bit(tiny_checkpoint, tiny_model):
    code = (
        "import sys, torch; torch.manual_seed(99)\n"
        "from rm_core.model import RewardModel\n"
        "m = RewardModel.load(sys.argv[1], dtype='float32', device='cpu')\n"
        f"print(m.score_ids({SEQUENCES}).tobytes().hex(), m.reward_id)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_checkpoint)], capture_output=True, text=True, check=True
    )
    scores, reward_id = done.stdout.split()
    assert scores == tiny_model.score_ids(SEQUENCES).tobytes().hex()
    assert reward_id == tiny_model.reward_id == read_record(tiny_checkpoint).reward_id


def test_a_plain_peft_load_gives_the_same_scores(tiny_checkpoint, tiny_base, tiny_model):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(5)
    base = AutoModelForSequenceClassification.from_pretrained(tiny_base, num_labels=1, dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, tiny_checkpoint).eval()
    with torch.no_grad():
        expected = [float(plain(input_ids=torch.tensor([ids])).logits[0, 0]) for ids in SEQUENCES[:1]]
    np.testing.assert_allclose(tiny_model.score_ids(SEQUENCES[:1]), expected, atol=1e-5)


def test_a_deleted_head_is_refused(copy):
    edit_tensors(copy / "adapter_model.safetensors", lambda t: t.pop("base_model.model.score.weight"))
    with pytest.raises(CheckpointError, match="the reward head"):
        load(copy)


def test_one_changed_weight_is_refused_and_named(copy, tiny_base, tmp_path):
    def nudge(tensors):
        name = next(name for name in tensors if "lora_A" in name)
        tensors[name][0, 0] += 1e-3

    edit_tensors(copy / "adapter_model.safetensors", nudge)
    with pytest.raises(CheckpointError, match="the adapter weights changed"):
        load(copy)


def test_a_changed_head_is_refused_and_named(copy):
    edit_tensors(copy / "adapter_model.safetensors", lambda t: t["base_model.model.score.weight"].mul_(1.01))
    with pytest.raises(CheckpointError, match="the reward head changed"):
        load(copy)


def test_another_base_is_refused_and_named(copy, tmp_path):
    other = save_base(tmp_path / "other", seed=1)
    edit_tensors(other / "model.safetensors", lambda t: t["model.norm.weight"].add_(0.01))
    with pytest.raises(CheckpointError, match="the base weights changed"):
        RewardModel.load(str(copy), dtype="float32", device="cpu", base=str(other))


def test_another_template_is_refused_and_named(copy):
    (copy / "chat_template.jinja").write_text(CHATML.replace("helpful", "harmful"))
    with pytest.raises(CheckpointError, match="the chat template is another one"):
        load(copy)


def test_another_tokenizer_is_refused_and_named(copy):
    byte_tokenizer(extra=("<|other|>",)).save_pretrained(copy)
    with pytest.raises(CheckpointError, match="the tokenizer is not the one"):
        load(copy)


@pytest.mark.parametrize(("field", "value"), [("end", "template"), ("text_as", "chat"), ("date", "2030-01-01")])
def test_edited_rules_are_refused(copy, field, value):
    record = json.loads((copy / "reward_model.json").read_text())
    record["rules"][field] = value
    (copy / "reward_model.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="rules or reward_id were edited"):
        load(copy)


def test_a_drifted_forward_pass_is_caught_by_the_golden_scores(copy, monkeypatch):
    from rm_core.network import RewardNetwork

    right = RewardNetwork.project_all
    monkeypatch.setattr(RewardNetwork, "project_all", lambda self, hidden: right(self, hidden) + 0.01)
    with pytest.raises(CheckpointError, match=r"golden conversation 'water' scores .* instead of"):
        load(copy)


def test_a_drifted_renderer_is_caught_by_the_golden_ids(copy, monkeypatch):
    from rm_core.chat import Renderer

    monkeypatch.setattr(Renderer, "render_conversation", lambda self, messages: [1, 2, 3])
    with pytest.raises(CheckpointError, match="other token ids"):
        load(copy)


def test_broken_records_and_files_are_one_line_errors(copy):
    record = json.loads((copy / "reward_model.json").read_text())
    (copy / "reward_model.json").write_text(json.dumps({**record, "schema_version": 9}))
    with pytest.raises(CheckpointError, match="schema_version 9"):
        load(copy)
    (copy / "reward_model.json").write_text("{")
    with pytest.raises(CheckpointError, match="not readable JSON"):
        load(copy)
    (copy / "reward_model.json").write_text(json.dumps({**record, "reward_std": -1}))
    with pytest.raises(CheckpointError, match="reward_std"):
        load(copy)
    (copy / "reward_model.json").write_text(json.dumps(record))
    weights = copy / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        load(copy)


def test_pickle_weights_are_refused(copy):
    (copy / "adapter_model.safetensors").unlink()
    torch.save({}, copy / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="pickle"):
        load(copy)


def test_a_failed_write_leaves_the_old_checkpoint_whole(tiny_checkpoint, tiny_base, tmp_path, monkeypatch):
    directory = make_checkpoint(tmp_path / "checkpoint", tiny_base)
    before = (directory / "reward_model.json").read_text()
    monkeypatch.setattr("rm_core.checkpoint.write_record", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        make_checkpoint(directory, tiny_base, training_length=7)
    monkeypatch.undo()
    assert (directory / "reward_model.json").read_text() == before
    load(directory)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_an_adapter_made_by_plain_peft_needs_its_head(tiny_base, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    base = AutoModelForSequenceClassification.from_pretrained(tiny_base, num_labels=1)
    get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=2)).save_pretrained(tmp_path / "good")
    model = load(tmp_path / "good")
    assert model.record is None
    assert model.renderer.rules.end == "template"
    lm = AutoModelForCausalLM.from_pretrained(tiny_base)
    get_peft_model(lm, LoraConfig(task_type="CAUSAL_LM", r=2)).save_pretrained(tmp_path / "bad")
    with pytest.raises(CheckpointError, match="the reward head is missing"):
        load(tmp_path / "bad")


def test_full_fine_tuning_writes_a_plain_classifier(tiny_base, tmp_path):
    from transformers import AutoModelForSequenceClassification

    from rm_core.checkpoint import write_checkpoint

    model = RewardModel.for_training(str(tiny_base), lora=None, seed=0, dtype="float32", device="cpu")
    record = write_checkpoint(model, tmp_path / "full", training_length=64)
    assert record.kind == "model"
    assert record.hashes.adapter is None
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "full").eval()
    with torch.no_grad():
        expected = float(plain(input_ids=torch.tensor([[1, 2, 3]])).logits[0, 0])
    assert load(tmp_path / "full").score_ids([[1, 2, 3]])[0] == pytest.approx(expected, abs=1e-5)


def test_an_encoder_keeps_every_new_layer(tmp_path):
    from transformers import AutoModel

    from rm_core.checkpoint import write_checkpoint
    from tests.conftest import tiny_config

    config = tiny_config(
        "deberta-v2", pooler_hidden_size=32, type_vocab_size=0, head_dim=None, max_position_embeddings=64
    )
    AutoModel.from_config(config).save_pretrained(tmp_path / "encoder")
    byte_tokenizer(None).save_pretrained(tmp_path / "encoder")
    lora = {"r": 2, "target_modules": ["query_proj", "value_proj"]}
    model = RewardModel.for_training(str(tmp_path / "encoder"), lora=lora, seed=0, device="cpu", dtype="bfloat16")
    assert model.dtype == "float32", "under autocast its head would compute in bfloat16"
    write_checkpoint(model, tmp_path / "checkpoint", training_length=64)
    names = set(load_file(tmp_path / "checkpoint" / "adapter_model.safetensors"))
    assert {"base_model.model.pooler.dense.weight", "base_model.model.classifier.weight"} <= names
    edit_tensors(
        tmp_path / "checkpoint" / "adapter_model.safetensors", lambda t: t.pop("base_model.model.pooler.dense.bias")
    )
    with pytest.raises(CheckpointError, match=r"pooler\.dense\.bias|the reward head"):
        load(tmp_path / "checkpoint")


@pytest.mark.parametrize(("free", "device"), [(None, "cpu"), (4.7e9, "cpu"), (5e9, "auto")])
def test_a_checkpoint_is_measured_where_it_fits(free, device, monkeypatch):
    """A billion weights in fp32 are 4 GB, and a fifth more for what passes through them."""
    from rm_core.checkpoint import device_for_measuring

    monkeypatch.setattr(torch.cuda, "is_available", lambda: free is not None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 8e9))
    assert device_for_measuring(10**9) == device


def test_hash_that_was_begun_early_is_used_once_and_only_for_the_same_file(tmp_path, monkeypatch):
    from rm_core import weights

    directory = save_classifier(tmp_path / "model")
    expected = weights.hash_tensors(directory)
    hashed = []
    real = weights._hash_entry
    monkeypatch.setattr(weights, "_hash_entry", lambda entry: hashed.append(entry.name) or real(entry))
    weights.begin_hashing(directory)
    assert weights.hash_tensors(directory) == expected
    assert len(hashed) == len(set(hashed))
    assert weights.hash_tensors(directory) == expected
    assert len(hashed) == 2 * len(set(hashed)), "the second time everything is read again"
    weights.begin_hashing(directory)
    file = directory / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.unlink()
    file.write_bytes(data)
    assert weights.hash_tensors(directory) != expected
    weights.begin_hashing(tmp_path / "nothing")
