"""One step of training against the same step written by hand with plain transformers and peft."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from rm_core.model import RewardModel
from rm_train.batching import epoch_order, split_by_tokens
from rm_train.data import read_pairs
from rm_train.encode import EncodedPair, encode_pairs
from rm_train.loop import DivergedError
from tests.train.runs import make_config, metric_lines, text_rows, train_alone, write_rows

LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def pairs_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "pairs.jsonl", text_rows(6))


def build(base: Path, lora: dict[str, Any] | None = LORA, **options: Any) -> RewardModel:
    return RewardModel.for_training(str(base), lora=lora, seed=0, dtype="float32", device="cpu", **options)


def encode(model: RewardModel, file: Path) -> list[EncodedPair]:
    return encode_pairs(list(read_pairs(str(file))), model.renderer, 128)


def run_steps(
    reward_model: RewardModel, base: Path, directory: Path, file: Path, **sections: Any
) -> list[dict[str, Any]]:
    """Train without the rest of ``fit`` and return the metrics."""
    sections = {**sections, "train": {"batch_size": 6, "max_steps": 1, **sections.get("train", {})}}
    config = make_config(base, directory, file, **sections)
    return train_alone(reward_model, encode(reward_model, file), config, directory)


def trainable(model: RewardModel) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.network.named_parameters() if p.requires_grad}


def frozen(model: RewardModel) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.network.named_parameters() if not p.requires_grad}


# ------------------------------------------------------------------ what one step changes


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "gradient_checkpointing"])
def test_one_step_moves_every_lora_b_and_the_head_and_nothing_of_the_base(
    checkpointing: bool, tiny_base: Path, pairs_file: Path, tmp_path: Path
) -> None:
    model = build(tiny_base)
    if checkpointing:
        model.network.use_gradient_checkpointing()
    before, base_before = trainable(model), frozen(model)
    run_steps(model, tiny_base, tmp_path, pairs_file)
    after = trainable(model)
    lora_b = [name for name in after if "lora_B" in name]
    assert len(lora_b) == 2 * 7, "two layers of seven linear layers"
    assert all((after[name] != 0).any() for name in lora_b)
    head = [name for name in after if "score" in name]
    assert len(head) == 1
    assert (after[head[0]] != before[head[0]]).all()
    assert all(torch.equal(value, base_before[name]) for name, value in frozen(model).items())


def test_gradient_checkpointing_changes_no_number(tiny_base: Path, pairs_file: Path, tmp_path: Path) -> None:
    weights = []
    for checkpointing in (False, True):
        model = build(tiny_base)
        if checkpointing:
            model.network.use_gradient_checkpointing()
        run_steps(model, tiny_base, tmp_path / str(checkpointing), pairs_file, train={"max_steps": 3})
        weights.append(trainable(model))
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "gradient_checkpointing"])
def test_full_fine_tuning_moves_every_layer(
    checkpointing: bool, tiny_base: Path, pairs_file: Path, tmp_path: Path
) -> None:
    model = build(tiny_base, lora=None)
    if checkpointing:
        model.network.use_gradient_checkpointing()
    before = trainable(model)
    assert not frozen(model)
    files_before = {path.name: path.read_bytes() for path in tiny_base.iterdir()}
    run_steps(model, tiny_base, tmp_path, pairs_file)
    assert all((value != before[name]).any() for name, value in trainable(model).items())
    assert {path.name: path.read_bytes() for path in tiny_base.iterdir()} == files_before


def test_head_has_its_own_learning_rate(tiny_base: Path, pairs_file: Path, tmp_path: Path) -> None:
    """Adam's first step moves every weight with a gradient by the learning rate, whatever the gradient's size."""
    model = build(tiny_base)
    before = trainable(model)
    run_steps(model, tiny_base, tmp_path, pairs_file, head={"learning_rate": 0.05}, train={"learning_rate": 1e-3})
    moved = {name: float((value - before[name]).abs().max()) for name, value in trainable(model).items()}
    for name, distance in moved.items():
        if "score" in name:
            assert distance == pytest.approx(0.05, rel=1e-3)
        elif "lora_B" in name:
            assert distance == pytest.approx(1e-3, rel=1e-2)


# ------------------------------------------------------------------ the loss


def test_first_loss_is_ln_2(tiny_base: Path, pairs_file: Path, tmp_path: Path) -> None:
    line = run_steps(build(tiny_base), tiny_base, tmp_path, pairs_file)[0]
    assert line["loss"] == pytest.approx(math.log(2), rel=0.01)


def by_hand(base: Path, file: Path, weights: list[float]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of all pairs in one step: plain transformers and peft, each text alone, last position by hand."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    ours = build(base, head_init_scale=3.0)
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    plain = get_peft_model(plain, LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules="all-linear"))
    plain.load_state_dict(ours.network.classifier.state_dict())
    inner = plain.get_base_model()

    def reward(text: str) -> torch.Tensor:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        hidden = inner.model(input_ids=ids).last_hidden_state[0, -1]
        return inner.score(hidden)[0]

    total = torch.zeros(())
    for row, weight in zip(text_rows(6), weights, strict=True):
        # TRL's RewardTrainer: loss = -nn.functional.logsigmoid(rewards_chosen - rewards_rejected).mean()
        difference = reward(row["prompt"] + row["chosen"]) - reward(row["prompt"] + row["rejected"])
        total = total - weight * torch.nn.functional.logsigmoid(difference)
    loss = total / sum(weights)
    loss.backward()
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients


@pytest.mark.parametrize("max_tokens", [16, 120, 4096], ids=["one_pair_a_pass", "some_pairs_a_pass", "one_pass"])
@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
def test_loss_and_gradient_of_a_step_are_those_by_hand_however_it_is_cut(
    max_tokens: int, weighted: bool, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [1.0, 2.0, 0.5, 0.0, 3.0, 0.25] if weighted else [1.0] * 6
    rows = [{**row, "weight": weight} for row, weight in zip(text_rows(6), weights, strict=True)]
    file = write_rows(tmp_path / "pairs.jsonl", rows if weighted else text_rows(6))
    expected_loss, expected = by_hand(tiny_base, file, weights)

    gradients: dict[str, torch.Tensor] = {}
    model = build(tiny_base, head_init_scale=3.0)

    def keep_gradients(optimizer: torch.optim.Optimizer, *args: Any) -> None:
        gradients.update(
            {n: p.grad.clone() for n, p in model.network.classifier.named_parameters() if p.grad is not None}
        )

    monkeypatch.setattr(torch.optim.AdamW, "step", keep_gradients)
    settings = {"max_tokens": max_tokens, "max_grad_norm": None}
    line = run_steps(model, tiny_base, tmp_path / "run", file, model={"max_length": 8}, train=settings)[0]
    assert line["loss"] == pytest.approx(expected_loss, rel=1e-5)
    assert line["pairs"] == 6
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in expected.values()))
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert set(gradients) == set(expected)
    for name, gradient in gradients.items():
        distance = float((gradient - expected[name]).norm())
        assert distance <= 1e-4 * max(float(expected[name].norm()), 1e-3 * norm), name


def test_gradients_are_scaled_down_to_the_configured_norm(tiny_base: Path, pairs_file: Path, tmp_path: Path) -> None:
    """With plain gradient descent in AdamW's place the weights move by rate * norm in all."""
    model = build(tiny_base, head_init_scale=3.0)
    before = trainable(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim, "AdamW", lambda groups, weight_decay: torch.optim.SGD(groups, lr=1.0))
        line = run_steps(model, tiny_base, tmp_path, pairs_file, train={"learning_rate": 1.0, "max_grad_norm": 0.01})[0]
    moved = math.sqrt(sum(float((value - before[name]).square().sum()) for name, value in trainable(model).items()))
    assert line["grad_norm"] > 0.1
    assert moved == pytest.approx(0.01, rel=1e-3)


def test_weight_decay_shrinks_weights_without_a_gradient(tiny_base: Path, pairs_file: Path, tmp_path: Path) -> None:
    """AdamW multiplies by 1 - rate * decay; lora_A has no gradient in the first step, because lora_B is zero."""
    model = build(tiny_base)
    before = trainable(model)
    run_steps(model, tiny_base, tmp_path, pairs_file, train={"learning_rate": 0.1, "weight_decay": 0.5})
    after = trainable(model)
    name = next(name for name in before if "lora_A" in name)
    torch.testing.assert_close(after[name], before[name] * (1 - 0.1 * 0.5))


def test_tied_rewards_count_one_half(tiny_base: Path, tmp_path: Path) -> None:
    """Two pairs of equal answers and none else: one half right, a loss of ln 2, no gradient of the preference."""
    rows = [{"prompt": "q ", "chosen": "same", "rejected": "same"}, {"prompt": "r ", "chosen": "b", "rejected": "b"}]
    line = run_steps(build(tiny_base), tiny_base, tmp_path / "run", write_rows(tmp_path / "ties.jsonl", rows))[0]
    assert line["accuracy"] == 0.5
    assert line["margin"] == 0.0
    assert line["loss"] == pytest.approx(math.log(2), rel=1e-6)


def test_loss_that_is_no_number_stops_and_names_the_step(tiny_base: Path, pairs_file: Path, tmp_path: Path) -> None:
    model = build(tiny_base)
    with pytest.raises(DivergedError) as caught:
        run_steps(model, tiny_base, tmp_path, pairs_file, train={"learning_rate": 1e30, "max_steps": 9})
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"step {len(metric_lines(tmp_path)) + 1}: ")
    assert "train.learning_rate" in message


def test_gradient_that_is_no_number_stops_before_it_spoils_the_weights(
    tiny_base: Path, pairs_file: Path, tmp_path: Path
) -> None:
    model = build(tiny_base)
    head = model.network.head.weight
    head.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(DivergedError, match="step 1: the gradient"):
        run_steps(model, tiny_base, tmp_path, pairs_file)
    assert all(value.isfinite().all() for value in trainable(model).values())


# ------------------------------------------------------------------ steps, order, learning rate


def test_order_of_pairs_depends_on_seed_and_epoch_alone() -> None:
    assert sorted(epoch_order(50, 3, 1)) == list(range(50))
    assert epoch_order(50, 3, 1) == epoch_order(50, 3, 1)
    assert epoch_order(50, 3, 1) != epoch_order(50, 3, 2)
    assert epoch_order(50, 3, 1) != epoch_order(50, 4, 1)


def test_pairs_of_one_prompt_stand_together_where_that_is_asked_for() -> None:
    prompts = ["a", "b", "c", "a", "b", "a"]
    for epoch in range(5):
        order = epoch_order(6, 0, epoch, prompts)
        assert sorted(order) == list(range(6))
        assert len([1 for one, two in pairwise(order) if prompts[one] != prompts[two]]) == 2
    assert len({tuple(epoch_order(6, 0, epoch, prompts)) for epoch in range(5)}) > 1


def test_pairs_of_one_prompt_share_a_micro_batch_though_their_lengths_differ() -> None:
    items = [("a", 9), ("b", 8), ("a", 1), ("b", 7), ("c", 5)]
    batches = split_by_tokens(items, cost=len, size=lambda item: item[1], prompt=lambda item: item[0], max_tokens=2)
    assert batches == [[("a", 9), ("a", 1)], [("b", 8), ("b", 7)], [("c", 5)]]


def test_epochs_and_max_steps_count_the_steps(tiny_base: Path, pairs_file: Path, tmp_path: Path) -> None:
    """Six pairs in steps of four: each epoch has a step of four and a step of two."""
    sections = {"train": {"batch_size": 4, "max_steps": None, "epochs": 2}}
    lines = run_steps(build(tiny_base), tiny_base, tmp_path / "a", pairs_file, **sections)
    assert [(line["step"], line["epoch"], line["pairs"]) for line in lines] == [
        (1, 0, 4),
        (2, 0, 2),
        (3, 1, 4),
        (4, 1, 2),
    ]
    sections = {"train": {"batch_size": 4, "max_steps": 3, "epochs": 1}}
    lines = run_steps(build(tiny_base), tiny_base, tmp_path / "b", pairs_file, **sections)
    assert [(line["step"], line["epoch"], line["pairs"]) for line in lines] == [(1, 0, 4), (2, 0, 2), (3, 1, 4)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # two steps of warm-up on the way to the whole rate, then 1 - k/8 of it, a half cosine, or all of it
        ("linear", [1 / 3, 2 / 3, *(1 - k / 8 for k in range(8))]),
        ("cosine", [1 / 3, 2 / 3, *(0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(8))]),
        ("constant", [1 / 3, 2 / 3, *[1.0] * 8]),
    ],
)
def test_schedules_warm_up_and_fall(
    schedule: str, expected: list[float], tiny_base: Path, pairs_file: Path, tmp_path: Path
) -> None:
    settings = {"schedule": schedule, "warmup_ratio": 0.2, "max_steps": 10, "learning_rate": 1e-3}
    lines = run_steps(build(tiny_base), tiny_base, tmp_path, pairs_file, train=settings)
    assert [line["learning_rate"] / 1e-3 for line in lines] == pytest.approx(expected)


def test_a_run_of_one_step_learns_in_spite_of_warm_up(tiny_base: Path, pairs_file: Path, tmp_path: Path) -> None:
    line = run_steps(build(tiny_base), tiny_base, tmp_path, pairs_file, train={"max_steps": 1, "warmup_ratio": 0.1})[0]
    assert line["learning_rate"] > 0


def test_logged_tokens_are_those_of_the_pairs_and_computed_ones_no_more(
    tiny_base: Path, pairs_file: Path, tmp_path: Path
) -> None:
    model = build(tiny_base)
    line = run_steps(model, tiny_base, tmp_path, pairs_file)[0]
    encoded = encode(model, pairs_file)
    assert line["tokens"] == sum(len(item.chosen) + len(item.rejected) for item in encoded)
    assert line["computed_tokens"] > 0
