"""Rewards against plain transformers: same ids, last position picked by hand."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rm_core.checkpoint import CheckpointError
from rm_core.model import RewardModel
from tests.conftest import byte_tokenizer, save_base, save_classifier


def random_sequences(count, seed=0, longest=60):
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, size=generator.integers(1, longest)).tolist() for _ in range(count)]


def plain_scores(directory, sequences):
    """Each sequence alone through plain transformers, the reward read at its last position."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    scores = []
    with torch.no_grad():
        for ids in sequences:
            hidden = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state
            scores.append(float(model.score(hidden)[0, -1, 0]))
    return np.array(scores)


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt_neox", "gpt2"]
)
def test_scores_equal_plain_transformers_alone_and_in_a_batch(family, tmp_path):
    directory = save_classifier(tmp_path / family, family)
    sequences = random_sequences(12)
    expected = plain_scores(directory, sequences)
    model = RewardModel.load(str(directory), dtype="float32", device="cpu")
    bound = 1e-4 * max(expected.std(), 1.0)
    assert expected.std() > 0.05
    np.testing.assert_allclose(model.score_ids(sequences), expected, atol=bound)
    np.testing.assert_allclose([model.score_ids([ids])[0] for ids in sequences], expected, atol=bound)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_side_does_not_matter(side, tmp_path):
    directory = save_classifier(tmp_path / "llama")
    sequences = random_sequences(8)
    model = RewardModel.load(str(directory), dtype="float32", device="cpu")
    with torch.inference_mode():
        scores = model.network.forward_padded(sequences, padding_side=side).numpy()
    np.testing.assert_allclose(scores, plain_scores(directory, sequences), atol=1e-4)


def test_the_last_token_is_found_by_length_not_by_token_id(tmp_path):
    # pad == eos == 257: [u, eos, a, b, eos] must be read at its last eos, and each token before it must matter
    directory = save_classifier(tmp_path / "llama")
    sequences = [[5, 257, 7, 8, 257], [5, 257, 7, 9, 257], [5, 257, 7, 8, 257, 257], [5]]
    model = RewardModel.load(str(directory), dtype="float32", device="cpu")
    scores = model.score_ids(sequences)
    np.testing.assert_allclose(scores, plain_scores(directory, sequences), atol=1e-4)
    assert len({round(float(score), 4) for score in scores}) == 4


def test_a_tokenizer_without_a_pad_token_scores_batches(tmp_path):
    tokenizer = byte_tokenizer(pad=None)
    assert tokenizer.pad_token is None
    directory = save_classifier(tmp_path / "gpt2", "gpt2", tokenizer=tokenizer)
    model = RewardModel.load(str(directory), dtype="float32", device="cpu")
    sequences = random_sequences(3)
    np.testing.assert_allclose(model.score_ids(sequences), plain_scores(directory, sequences), atol=1e-4)


def test_an_encoder_gives_what_transformers_gives(tmp_path):
    directory = save_classifier(
        tmp_path / "deberta",
        "deberta-v2",
        pooler_hidden_size=32,
        type_vocab_size=0,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        head_dim=None,
    )
    sequences = random_sequences(5)
    plain = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = [float(plain(input_ids=torch.tensor([ids])).logits[0, 0]) for ids in sequences]
    model = RewardModel.load(str(directory), device="cpu")
    assert model.dtype == "float32"
    np.testing.assert_allclose(model.score_ids(sequences), expected, atol=1e-4)


def test_bf16_keeps_the_head_in_fp32(tmp_path):
    directory = save_classifier(tmp_path / "llama")
    model = RewardModel.load(str(directory), dtype="bfloat16", device="cpu")
    stored = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).score.weight
    assert model.network.head.weight.dtype == torch.float32
    assert torch.equal(model.network.head.weight, stored)
    assert next(model.network.backbone.parameters()).dtype == torch.bfloat16


def test_more_labels_a_missing_head_and_a_language_model_are_refused_in_words(tmp_path):
    with pytest.raises(CheckpointError, match="has 3 labels; a reward model has exactly one"):
        RewardModel.load(str(save_classifier(tmp_path / "three", num_labels=3)))
    with pytest.raises(CheckpointError, match="LlamaForCausalLM, which has no reward head; train one"):
        RewardModel.load(str(save_base(tmp_path / "base")))
    with pytest.raises(CheckpointError, match="no such folder"):
        RewardModel.load(str(tmp_path / "absent"))
    with pytest.raises(CheckpointError, match=r"neither config\.json nor adapter_config\.json"):
        RewardModel.load(str(tmp_path))


def test_an_empty_sequence_is_an_error_and_no_sequences_are_none(tiny_model):
    assert tiny_model.score_ids([]).shape == (0,)
    with pytest.raises(ValueError, match="an empty sequence"):
        tiny_model.score_ids([[1], []])


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_dropout": 0.5}),
        ("seed_oss", {"attention_dropout": 0.5, "residual_dropout": 0.5}),
        ("gpt2", {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}),
        ("bert", {"head_dim": None, "num_key_value_heads": None, "hidden_dropout_prob": 0.5}),
    ],
)
@pytest.mark.parametrize("lora", [{"r": 4, "lora_dropout": 0.25, "target_modules": "all-linear"}, None])
def test_the_bases_own_dropout_is_off_in_training_and_loras_is_as_asked(tmp_path, family, changes, lora):
    directory = save_classifier(tmp_path / family, family, **changes)
    model = RewardModel.for_training(str(directory), lora=lora, seed=1, dtype="float32", device="cpu")
    network = model.network.train()
    assert model.sharing_off is None or family == "bert"
    dropouts = {m.p for name, m in network.named_modules() if isinstance(m, torch.nn.Dropout) and "lora" in name}
    assert dropouts == (set() if lora is None else {0.25})
    for module in network.modules():
        if lora is not None and hasattr(module, "lora_dropout"):
            module.lora_dropout = torch.nn.ModuleDict({name: torch.nn.Identity() for name in module.lora_dropout})
    sequences = random_sequences(6)
    with torch.no_grad():
        first, again, scored = network(sequences), network(sequences), network.eval()(sequences)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    torch.testing.assert_close(first, scored, rtol=1e-5, atol=1e-5)
