"""Tree scores and gradients equal the padded path's."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rm_core.attention import TreePlan, tree_mask_rule
from rm_core.network import RewardNetwork
from rm_core.tree import build_tree
from tests.conftest import save_classifier, tiny_config

FAMILIES = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt_neox",
    "gpt2",
    "olmo2",
    "smollm3",
]


def network_of(family, tmp_path, **changes) -> RewardNetwork:
    directory = save_classifier(tmp_path / family, family, **changes)
    classifier = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    return RewardNetwork(classifier.eval())


def nested_sequences(seed=0):
    """Groups, pairs, nested prefixes, siblings that are prefixes of each other, duplicates, one token."""
    generator = np.random.default_rng(seed)

    def some(low, high):
        return generator.integers(0, 256, generator.integers(low, high)).tolist()

    system = some(20, 30)
    sequences = [[int(generator.integers(0, 256))], some(2, 40)]
    for _ in range(3):
        prompt = [*system, *some(18, 40)]
        opening = [*prompt, *some(17, 25)]
        sequences += [[*prompt, *some(1, 30)] for _ in range(3)]
        sequences += [[*opening, *some(1, 20)], [*opening, *some(1, 20)], opening, prompt]
    return [*sequences, sequences[3]]


@pytest.mark.parametrize("family", FAMILIES)
def test_tree_scores_equal_padded_scores(family, tmp_path):
    network = network_of(family, tmp_path)
    assert network.tree_off is None
    network.check_tree()
    assert network.tree_off is None
    for seed in range(3):
        sequences = nested_sequences(seed)
        with torch.inference_mode():
            expected = torch.cat([network.forward_padded([ids]) for ids in sequences]).numpy()
            found = network(sequences).numpy()
        assert expected.std() > 0.05
        np.testing.assert_allclose(found, expected, atol=1e-4 * max(1.0, float(expected.std())))


@pytest.mark.parametrize("family", FAMILIES)
def test_tree_gradients_equal_padded_gradients(family, tmp_path):
    network = network_of(family, tmp_path, **({"attn_pdrop": 0.0} if family == "gpt2" else {}))
    sequences = nested_sequences(5)
    weights = torch.linspace(-1, 1, len(sequences))

    def gradients(rewards):
        network.zero_grad()
        (rewards * weights).sum().backward()
        return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}

    expected = gradients(network.forward_padded(sequences))
    found = gradients(network(sequences))
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_gradient_checkpointing_gives_the_same_gradients(family, tmp_path):
    network = network_of(family, tmp_path)
    sequences = nested_sequences(6)
    network(sequences).sum().backward()
    expected = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
    network.zero_grad()
    network.train().use_gradient_checkpointing()
    network(sequences).sum().backward()
    for name, gradient in expected.items():
        torch.testing.assert_close(dict(network.named_parameters())[name].grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("window", [None, 5])
def test_the_flex_mask_lets_a_token_see_its_own_sequence_and_nothing_else(window):
    sequences = nested_sequences(1)
    tree = build_tree(sequences)
    rule = tree_mask_rule(TreePlan.of(tree), torch.device("cpu"), window)
    rows = torch.arange(tree.num_tokens)
    allowed = rule(None, None, rows[:, None], rows[None, :])
    expected = torch.zeros_like(allowed)
    for index in range(len(sequences)):
        path = torch.cat([torch.arange(segment.start, segment.end) for segment in tree.path(index)])
        position = torch.arange(len(path))
        distance = position[:, None] - position[None, :]
        visible = (distance >= 0) & (distance < (window or 10**9))
        expected[path[:, None], path[None, :]] |= visible
    assert torch.equal(allowed, expected)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("bloom", {"head_dim": None, "num_key_value_heads": None}, "ALiBi"),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}, "sinks"),
        ("qwen3_next", {"num_experts": 2, "layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "longest sequence"),
    ],
)
def test_models_that_look_eligible_and_are_not_say_why(family, changes, reason):
    network = RewardNetwork(AutoModelForSequenceClassification.from_config(tiny_config(family, **changes)).eval())
    network.check_tree()
    assert network.tree_off is not None
    assert reason in network.tree_off


def test_a_long_batch_mate_does_not_change_a_short_score_under_dynamic_rope():
    config = tiny_config(
        "llama", max_position_embeddings=32, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    )
    torch.manual_seed(0)
    network = RewardNetwork(AutoModelForSequenceClassification.from_config(config).eval())
    generator = np.random.default_rng(0)
    short, long, longer = (generator.integers(0, 256, length).tolist() for length in (20, 50, 70))
    with torch.inference_mode():
        alone = [float(network([ids])[0]) for ids in (short, long, longer)]
        together = network([long, short, longer, short]).tolist()
    np.testing.assert_allclose(together, [alone[1], alone[0], alone[2], alone[0]], atol=1e-5)
