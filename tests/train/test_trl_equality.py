"""Our training steps have the losses of TRL's RewardTrainer, step by step, in fp32 on the same batches.

Both start from the same base, adapter and head. TRL runs in an environment of its own, named by
``BETTERTHAN_TRL_PYTHON``, and these tests skip where there is none. TRL is given the ids that our renderer made, in the
order of our batches; it pads them, we compute them over a token tree.
"""

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from rm_core.model import RewardModel
from rm_train.batching import epoch_order
from rm_train.data import read_pairs
from rm_train.encode import encode_pairs
from tests.train.runs import make_config, text_rows, train_alone, write_rows

LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def trl_python() -> str:
    python = os.environ.get("BETTERTHAN_TRL_PYTHON")
    if not python or not Path(python).is_file():
        pytest.skip("BETTERTHAN_TRL_PYTHON names no python of an environment with TRL")
    return python


class Case(NamedTuple):
    """Settings of ours, and whether the pairs' margins count."""

    train: dict[str, Any]
    centering: float = 0.0
    use_margin: bool = False


CASES = {
    "plain, one forward a step": Case({"schedule": "constant", "max_grad_norm": 1.0}),
    "cut into several forwards, decayed, barely clipped": Case(
        {"schedule": "linear", "max_grad_norm": 100.0, "weight_decay": 0.1, "max_tokens": 256}
    ),
    "margins and centring": Case({"schedule": "cosine", "max_grad_norm": 0.3}, centering=0.05, use_margin=True),
}


def fresh_model(base: Path, init_scale: float) -> RewardModel:
    return RewardModel.for_training(
        str(base), lora=LORA, seed=5, dtype="float32", device="cpu", head_init_scale=init_scale
    )


def trl_losses(python: str, spec: dict[str, Any], folder: Path) -> list[list[float]]:
    spec_file, answer = folder / "spec.json", folder / "answer.json"
    spec_file.write_text(json.dumps({**spec, "answer": str(answer)}))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("PYTHONPATH", None)
    script = Path(__file__).with_name("trl_losses.py")
    done = subprocess.run(
        [python, str(script), str(spec_file)], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[list[float]] = json.loads(answer.read_text())
    return answers


def compare(
    python: str,
    base: Path,
    file: Path,
    cases: Sequence[Case],
    folder: Path,
    *,
    pad_token: str,
    init_scale: float,
    **settings: Any,
) -> list[tuple[list[float], list[float]]]:
    """(our losses, TRL's losses) of each case."""
    spec: dict[str, Any] = {"base": str(base), "adapter": str(folder / "adapter"), "pad_token": pad_token, "runs": []}
    fresh_model(base, init_scale).save_weights(folder / "adapter")
    ours = []
    for number, case in enumerate(cases):
        config = make_config(
            base, folder, file, train={**settings, **case.train},
            loss={"use_margin": case.use_margin, "centering": case.centering},
        )  # fmt: skip
        model = fresh_model(base, init_scale)
        assert model.shares_prefixes
        encoded = encode_pairs(list(read_pairs(str(file))), model.renderer, 1024)
        pad = model.tokenizer.convert_tokens_to_ids(pad_token)
        rows = []
        for index in epoch_order(len(encoded), config.run.seed, 0):
            pair = encoded[index]
            assert pad not in {*pair.chosen, *pair.rejected}  # TRL finds a text's end by it
            rows.append({"chosen_ids": pair.chosen, "rejected_ids": pair.rejected})
            if case.use_margin:
                rows[-1]["margin"] = pair.pair.margin
        spec["runs"].append(
            {
                "rows": rows,
                "batch_size": config.train.batch_size,
                "learning_rate": config.train.learning_rate,
                "schedule": config.train.schedule,
                "weight_decay": config.train.weight_decay,
                "max_grad_norm": config.train.max_grad_norm,
                "centering": case.centering or None,
            }
        )
        ours.append([line["loss"] for line in train_alone(model, encoded, config, folder / f"ours-{number}")])
    return list(zip(ours, trl_losses(python, spec, folder), strict=True))


def test_losses_equal_those_of_trl_step_by_step(trl_python: str, tiny_base: Path, tmp_path: Path) -> None:
    """Six steps of six pairs and a last one of two; some prompts have several pairs, which then share a tree."""
    rows = text_rows(38, seed=7)
    for index, row in enumerate(rows):
        row["margin"] = round(0.1 * (index % 9), 1)
        if index % 3:
            row["prompt"] = rows[index - 1]["prompt"]
    file = write_rows(tmp_path / "pairs.jsonl", rows)
    found = compare(
        trl_python, tiny_base, file, list(CASES.values()), tmp_path, pad_token="ÿ", init_scale=1.0,
        batch_size=6, learning_rate=2e-3,
    )  # fmt: skip
    for name, (ours, theirs) in zip(CASES, found, strict=True):
        assert len(ours) == 7, name
        assert abs(ours[-1] - ours[0]) > 1e-3, name  # they move
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, err_msg=name)
    assert not np.allclose(found[0][0], found[1][0], rtol=1e-3)
    assert not np.allclose(found[0][0], found[2][0], rtol=1e-3)


@pytest.mark.slow
def test_losses_equal_those_of_trl_on_real_pairs(
    trl_python: str, smollm2: Path, shared_data: Callable[[str], Path], tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in shared_data("truthfulqa.jsonl").read_text(encoding="utf-8").splitlines()]
    file = write_rows(tmp_path / "pairs.jsonl", rows[:12])
    (pair,) = compare(
        trl_python, smollm2, file, [Case({"schedule": "constant"})], tmp_path, pad_token="<|endoftext|>",
        init_scale=0.01, batch_size=4, learning_rate=1e-4,
    )  # fmt: skip
    ours, theirs = pair
    assert len(ours) == 3
    assert abs(ours[0] - np.log(2)) < 0.05
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
