"""What margin, weight, soft label, label smoothing and centring do to the loss, each against a value derived by hand."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from rm_core.model import RewardModel
from rm_train.config import LossConfig
from rm_train.data import read_pairs
from rm_train.encode import EncodedPair, encode_pairs
from rm_train.loop import train
from rm_train.losses import pair_losses
from rm_train.pairs import Pair
from tests.train.runs import make_config, metric_lines, text_rows, write_rows

WON_BY_3 = math.log1p(math.exp(-3))
"""-log sigma(3): rewards of 2 and -1."""


def losses(pairs: list[dict[str, Any]], **settings: Any) -> list[float]:
    """Losses of pairs that are all rewarded 2 and -1."""
    encoded = [EncodedPair([1], [2], False, Pair(None, "a", "b", **fields)) for fields in pairs]
    rewards = torch.tensor([2.0] * len(pairs)), torch.tensor([-1.0] * len(pairs))
    found: list[float] = pair_losses(*rewards, encoded, LossConfig(**settings)).tolist()
    return found


def test_plain_loss_is_minus_log_sigmoid_of_the_difference() -> None:
    assert losses([{}]) == pytest.approx([WON_BY_3])


def test_margin_is_subtracted_and_missing_margins_stay_with_their_pairs() -> None:
    """Margins 1, none, 2.5, none: differences 2, 3, 0.5, 3."""
    expected = [math.log1p(math.exp(-2)), WON_BY_3, math.log1p(math.exp(-0.5)), WON_BY_3]
    pairs: list[dict[str, Any]] = [{"margin": 1.0}, {}, {"margin": 2.5}, {"margin": None}]
    assert losses(pairs, use_margin=True) == pytest.approx(expected)
    assert losses(pairs, use_margin=False) == pytest.approx([WON_BY_3] * 4)


def test_weight_multiplies_the_loss() -> None:
    assert losses([{"weight": 0.5}, {"weight": 0.0}, {}]) == pytest.approx([0.5 * WON_BY_3, 0.0, WON_BY_3])


def test_soft_label_mixes_both_outcomes() -> None:
    """A quarter says chosen, three quarters say rejected, whose loss is -log sigma(-3) = 3 - log sigma(3)."""
    assert losses([{"label": 0.25}, {"label": 1.0}]) == pytest.approx(
        [0.25 * WON_BY_3 + 0.75 * (3 + WON_BY_3), WON_BY_3]
    )


def test_label_smoothing_moves_a_share_to_the_opposite_label() -> None:
    """1 becomes 0.9; 0.25 becomes 0.25 * 0.9 + 0.75 * 0.1 = 0.3; 0.5 stays."""
    expected = [(1 - share) * 3 + WON_BY_3 for share in (0.9, 0.3, 0.5)]
    assert losses([{}, {"label": 0.25}, {"label": 0.5}], label_smoothing=0.1) == pytest.approx(expected)


def test_centring_adds_the_squared_sum_of_both_rewards() -> None:
    """(2 - 1)² = 1."""
    assert losses([{}], centering=0.01) == pytest.approx([WON_BY_3 + 0.01])


def test_loss_of_extreme_rewards_is_finite() -> None:
    encoded = [EncodedPair([1], [2], False, Pair(None, "a", "b"))] * 2
    chosen = torch.tensor([1e4, -1e4], requires_grad=True)
    found = pair_losses(chosen, -chosen.detach(), encoded, LossConfig())
    found.sum().backward()
    assert found.tolist() == [0.0, 2e4]
    assert chosen.grad is not None
    assert chosen.grad.isfinite().all()


# ------------------------------------------------------------------ through the loop


@pytest.fixture(scope="module")
def rewarded(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Any]:
    """Four rows with extras of their own, and the rewards that the untrained model gives them."""
    extras: list[dict[str, Any]] = [{"margin": 2.0}, {}, {"weight": 3.0}, {"label": 0.75, "weight": 0.5}]
    rows = [{**row, **extra} for row, extra in zip(text_rows(4), extras, strict=True)]
    file = write_rows(tmp_path_factory.mktemp("data") / "pairs.jsonl", rows)
    model = build(tiny_base)
    encoded = encode_pairs(list(read_pairs(str(file))), model.renderer, 128)
    model.network.eval()
    rewards = model.score_ids([ids for item in encoded for ids in (item.chosen, item.rejected)])
    return rows, list(zip(rewards[0::2].tolist(), rewards[1::2].tolist(), strict=True))


def build(base: Path) -> RewardModel:
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    return RewardModel.for_training(str(base), lora=options, seed=0, head_init_scale=3.0, dtype="float32", device="cpu")


@pytest.mark.parametrize(
    "settings",
    [{}, {"use_margin": True}, {"label_smoothing": 0.2}, {"centering": 0.5}],
    ids=["weights_and_labels", "margin", "label_smoothing", "centering"],
)
def test_each_setting_of_the_loss_reaches_the_logged_loss(
    settings: dict[str, Any], rewarded: Any, tiny_base: Path, tmp_path: Path
) -> None:
    """The step's loss is sum(weight * loss) / sum(weight), each loss from the rewards by the formula."""
    rows, rewards = rewarded
    total = 0.0
    for row, (chosen, rejected) in zip(rows, rewards, strict=True):
        difference = chosen - rejected - (row.get("margin", 0.0) if settings.get("use_margin") else 0.0)
        share, smoothing = row.get("label", 1.0), settings.get("label_smoothing", 0.0)
        share = share * (1 - smoothing) + (1 - share) * smoothing
        loss = share * math.log1p(math.exp(-difference)) + (1 - share) * math.log1p(math.exp(difference))
        total += row.get("weight", 1.0) * (loss + settings.get("centering", 0.0) * (chosen + rejected) ** 2)
    expected = total / sum(row.get("weight", 1.0) for row in rows)

    file = write_rows(tmp_path / "pairs.jsonl", rows)
    config = make_config(tiny_base, tmp_path, file, loss=settings, train={"max_steps": 1})
    model = build(tiny_base)
    train(
        model,
        encode_pairs(list(read_pairs(str(file))), model.renderer, 128),
        config,
        tmp_path,
        Accelerator(cpu=True),
        identity={},
        state=None,
        evaluate=dict,
        on_step=lambda *args: None,
    )
    assert metric_lines(tmp_path)[0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_rows_of_several_answers_weigh_one_each(tiny_base: Path, tmp_path: Path) -> None:
    """Three ranked answers are three pairs of weight 1/3: the group's mean counts as much as the one plain pair."""
    rows: list[dict[str, Any]] = [
        {"prompt": "q ", "completions": ["one", "two or so", "three"], "ranks": [1, 2, 3]},
        {"prompt": "r ", "chosen": "four", "rejected": "five and more"},
    ]
    file = write_rows(tmp_path / "pairs.jsonl", rows)
    model = build(tiny_base)
    encoded = encode_pairs(list(read_pairs(str(file))), model.renderer, 128)
    model.network.eval()
    rewards = model.score_ids([ids for item in encoded for ids in (item.chosen, item.rejected)])
    each = [math.log1p(math.exp(-(a - b))) for a, b in zip(rewards[0::2].tolist(), rewards[1::2].tolist(), strict=True)]
    assert len(each) == 4
    expected = (sum(each[:3]) / 3 + each[3]) / 2

    train(
        model,
        encoded,
        make_config(tiny_base, tmp_path, file, train={"max_steps": 1}),
        tmp_path,
        Accelerator(cpu=True),
        identity={},
        state=None,
        evaluate=dict,
        on_step=lambda *args: None,
    )
    assert metric_lines(tmp_path)[0]["loss"] == pytest.approx(expected, rel=1e-5)
