"""Gradients over a token tree are those of plain peft, each sequence alone: in fp32, and in bf16 as close to fp32."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rm_core.model import RewardModel
from tests.conftest import randomise_adapter, save_base
from tests.core.exactness import FAMILIES, FUSED, Ids, corpus, plain_classifier, rms


def trainable_gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


class Trainable(NamedTuple):
    model: RewardModel
    sequences: list[Ids]
    weights: torch.Tensor
    expected: dict[str, torch.Tensor]

    def check(self, cuts: Sequence[int] = ()) -> None:
        """The gradient of Σ weight · reward, computed over one tree for each part, is the reference's."""
        self.model.network.zero_grad()
        for part in np.split(np.arange(len(self.sequences)), cuts):
            rewards = self.model.network([self.sequences[index] for index in part])
            (rewards * self.weights[torch.from_numpy(part)].to(rewards.device)).sum().backward()
        found = trainable_gradients(self.model.network.classifier)
        self.model.network.zero_grad()
        assert found.keys() == self.expected.keys()
        off = {
            name: float((found[name] - gradient).norm() / gradient.norm()) for name, gradient in self.expected.items()
        }
        worst = max(off, key=lambda name: off[name])
        assert off[worst] <= 1e-4, f"{worst} and {sum(x > 1e-4 for x in off.values()) - 1} others: {off[worst]:.2g}"


def trainable_of(family: str, folder: Path, changes: dict[str, Any], device: str = "cpu") -> Trainable:
    """LoRA on all linear layers, with B matrices that matter, and what plain peft gives its gradient."""
    from peft import PeftModel

    base = save_base(folder / family, family, **changes)
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    model = RewardModel.for_training(str(base), lora=options, seed=1, dtype="float32", device=device)
    assert model.sharing_off is None
    generator = randomise_adapter(model)
    model.save_weights(folder / "adapter")
    plain = PeftModel.from_pretrained(plain_classifier(base), folder / "adapter", is_trainable=True).eval()
    sequences = [item.ids for item in corpus(45, seed=9)]
    weights = torch.randn(len(sequences), generator=generator)
    for ids, weight in zip(sequences, weights, strict=True):
        (plain(input_ids=torch.tensor([ids])).logits[0, 0] * weight).backward()
    expected = trainable_gradients(plain)
    assert all(gradient.norm() > 0 for gradient in expected.values())
    assert sum("lora_A" in name for name in expected) == sum("lora_B" in name for name in expected) >= 8
    assert sum("score" in name for name in expected) == 1
    return Trainable(model, sequences, weights, expected)


@pytest.fixture(scope="module", params=list(FAMILIES))
def trainable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trainable:
    return trainable_of(request.param, tmp_path_factory.mktemp("trainable"), FAMILIES[request.param])


def test_gradients_over_one_tree_are_those_of_plain_peft(trainable: Trainable) -> None:
    trainable.check()


def test_gradients_do_not_depend_on_how_a_step_is_cut(trainable: Trainable) -> None:
    trainable.check(cuts=[1, 7, 8, 30])


def test_gradients_with_recomputed_activations_are_the_same(trainable: Trainable) -> None:
    network = trainable.model.network
    network.train().use_gradient_checkpointing()
    try:
        trainable.check()
    finally:
        network.base.activation_checkpointing_disable()
        network.eval()


# ------------------------------------------------------------------ bf16


def check_bfloat16_gradients(family: str, changes: dict[str, Any], folder: Path, device: str) -> None:
    """LoRA's and the head's gradients, computed as the trainer does, are as close to fp32 as those of plain peft.

    What is compared is the relative error of each tensor, as a root mean square over the tensors of three adapters on
    texts of their own: of a single one the two errors differ by up to 12 % either way.
    """
    errors = [_bfloat16_errors(family, changes, folder / str(seed), device, seed) for seed in (1, 2, 3)]
    ours, plain = (rms(np.array(column)) for column in zip(*errors, strict=True))
    assert ours <= 1.1 * plain


def _bfloat16_errors(family: str, changes: dict[str, Any], folder: Path, device: str, seed: int) -> tuple[float, float]:
    """Of ours, and of plain peft in bf16."""
    from peft import PeftModel
    from peft.helpers import disable_input_dtype_casting

    base = save_base(folder / "base", family, **changes)
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    model = RewardModel.for_training(str(base), lora=options, seed=seed, dtype="bfloat16", device=device)
    assert model.sharing_off is None
    generator = randomise_adapter(model)
    model.save_weights(folder / "adapter")
    sequences = [item.ids for item in corpus(60, seed=seed)]
    weights = torch.randn(len(sequences), generator=generator)

    def plain(dtype: torch.dtype, place: str) -> dict[str, torch.Tensor]:
        tuned = PeftModel.from_pretrained(plain_classifier(base, dtype), folder / "adapter", is_trainable=True)
        tuned.to(place).eval()
        classifier = tuned.get_base_model()
        for ids, weight in zip(sequences, weights.tolist(), strict=True):
            with torch.autocast(place, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                states = classifier.base_model(input_ids=torch.tensor([ids], device=place)).last_hidden_state
            head = classifier.score.modules_to_save["default"].weight.float()
            ((states[0, -1].float() @ head[0]) * weight).backward()
        return {name: gradient.double().cpu() for name, gradient in trainable_gradients(tuned).items()}

    exact = plain(torch.float32, "cpu")

    def error(gradients: dict[str, torch.Tensor]) -> float:
        assert gradients.keys() == exact.keys()
        return rms(np.array([float((gradients[name] - g).norm() / g.norm()) for name, g in exact.items()]))

    model.network.train()
    with torch.autocast(device, dtype=torch.bfloat16), disable_input_dtype_casting(model.network.classifier):
        rewards = model.network(sequences)
        (rewards * weights.to(device)).sum().backward()
    found = {name: g.double().cpu() for name, g in trainable_gradients(model.network.classifier).items()}
    return error(found), error(plain(torch.bfloat16, device))


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen2",
        "mistral",
        *(
            pytest.param(name, marks=[pytest.mark.slow, pytest.mark.long])
            for name in ("llama with biases", "qwen3", "smollm3", "seed_oss")
        ),
    ],
)
def test_bfloat16_gradients_are_as_close_to_fp32_as_those_of_plain_peft(name: str, tmp_path: Path) -> None:
    check_bfloat16_gradients(*FUSED[name], tmp_path, "cpu")
