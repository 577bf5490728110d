"""Small runs for the tests of training: pairs, configs, a quiet reporter, and everything deterministic in fp32."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rm_train.config import FitConfig
from tests.conftest import byte_tokenizer, tiny_config

if TYPE_CHECKING:
    from rm_core.model import RewardModel
    from rm_train.encode import EncodedPair

WORDS = [
    "river",
    "stone",
    "seven",
    "lamp",
    "under",
    "quiet",
    "maple",
    "orbit",
    "copper",
    "violet",
    "thunder",
    "basket",
    "winter",
    "sugar",
]

RUN_FILES = ["check.json", "checkpoint", "config.json", "evaluation.jsonl", "metrics.jsonl"]
"""What a run without saved states leaves."""


class Quiet:
    """A reporter that remembers what was said; ``at_progress`` may interrupt the training bar."""

    def __init__(self, at_progress: Callable[..., None] = lambda *args: None) -> None:
        self.said: list[str] = []
        self.at_progress = at_progress

    def say(self, text: str) -> None:
        self.said.append(text)

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Callable[..., None]]:
        yield self.at_progress if title == "training" else lambda *args: None


class Killed(BaseException):
    """Stands for a kill: nothing in the trainer may catch it."""


def kill_at(step: int) -> Quiet:
    """A reporter that kills the run when it hears of a step."""

    def progress(fraction: float, text: str) -> None:
        if text.startswith(f"step {step}/"):
            raise Killed

    return Quiet(progress)


def text_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Pairs of different lengths with distinct prompts."""
    draw = random.Random(seed)

    def words(low: int, high: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(low, high)))

    return [
        {"prompt": f"Q{index} {words(1, 4)}? ", "chosen": words(1, 6), "rejected": words(1, 6)}
        for index in range(count)
    ]


def chat_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """The same as conversations."""
    return [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "chosen": [{"role": "assistant", "content": row["chosen"]}],
            "rejected": [{"role": "assistant", "content": row["rejected"]}],
        }
        for row in text_rows(count, seed)
    ]


def learnable_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """The better answer is the one that contains a z, and nothing else tells the two apart."""
    draw = random.Random(seed)
    rows = []
    for index in range(count):
        letters = ["".join(draw.choices("abcdefgh ", k=8)) for _ in range(2)]
        place = draw.randrange(8)
        rows.append(
            {
                "prompt": f"{index}: ",
                "chosen": letters[0][:place] + "z" + letters[0][place:],
                "rejected": letters[1][:place] + "y" + letters[1][place:],
            }
        )
    return rows


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make_config(base: Path, directory: Path, pairs: Path, held_out: Path | None = None, **sections: Any) -> FitConfig:
    """A short fp32 run. ``sections`` are laid over the defaults here, such as ``train={"max_steps": 3}``."""
    values: dict[str, Any] = {
        "run": {"name": "run", "output_dir": str(directory / "runs")},
        "model": {"base": str(base), "dtype": "float32", "max_length": 128},
        "lora": {"r": 4, "alpha": 8},
        "data": {"train": [str(pairs)], "eval": [str(held_out)] if held_out else None},
        "train": {"batch_size": 4, "max_tokens": 4096, "learning_rate": 1e-3, "warmup_ratio": 0.0},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return FitConfig.model_validate(values)


MODERNBERT = {"cls_token_id": 256, "sep_token_id": 257, "global_attn_every_n_layers": 2, "local_attention": 16}
ENCODERS = {
    "modernbert": MODERNBERT,
    "deberta-v2": {"type_vocab_size": 0, "pooler_hidden_size": 32},
    "bert": {},
    "roberta": {},
    "distilbert": {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 64, "hidden_size": None,
                   "num_hidden_layers": None, "num_attention_heads": None},
}  # fmt: skip
"""Changes of the tiny configuration by family."""


def save_encoder(directory: Path, family: str, **changes: Any) -> Path:
    """A random encoder without a classification head, the way a base comes from a hub."""
    import torch
    from transformers import AutoModel

    config = tiny_config(family, num_key_value_heads=None, head_dim=None, **changes)
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(directory)
    byte_tokenizer(None).save_pretrained(directory)
    return directory


def metric_lines(run: Path, *, wall_clock: bool = False) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if not wall_clock:
        for line in lines:
            line.pop("seconds", None)
    return lines


def weights_of(checkpoint: Path) -> dict[str, Any]:
    """All tensors of a written checkpoint."""
    from safetensors.torch import load_file

    return {
        name: tensor for file in sorted(checkpoint.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def assert_same_run(run: Path, expected: Path) -> None:
    """The same metrics, wall-clock fields aside, and the same weights to the bit."""
    import torch

    assert metric_lines(run) == metric_lines(expected)
    weights, wanted = weights_of(run / "checkpoint"), weights_of(expected / "checkpoint")
    assert set(weights) == set(wanted)
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def assert_same_training(run: Path, expected: Path) -> None:
    """Losses and weights within rounding; how many tokens are computed depends on how a step is cut."""
    import pytest
    import torch

    lines, wanted = metric_lines(run), metric_lines(expected)
    assert [line["step"] for line in lines] == [line["step"] for line in wanted]
    for line, other in zip(lines, wanted, strict=True):
        line.pop("computed_tokens", None), other.pop("computed_tokens", None)
        assert line == pytest.approx(other, abs=1e-5, rel=1e-4)
    weights = weights_of(run / "checkpoint")
    for name, tensor in weights_of(expected / "checkpoint").items():
        torch.testing.assert_close(weights[name], tensor, atol=2e-5, rtol=1e-3)


def train_alone(
    model: "RewardModel", pairs: "Sequence[EncodedPair]", config: FitConfig, directory: Path
) -> list[dict[str, Any]]:
    """Train without the rest of ``fit`` and return the metrics."""
    from accelerate import Accelerator

    from rm_train.loop import train

    directory.mkdir(exist_ok=True)
    train(
        model,
        pairs,
        config,
        directory,
        Accelerator(cpu=True),
        identity={},
        state=None,
        evaluate=lambda: {"loss": 0.0},
        on_step=lambda *args: None,
    )
    return metric_lines(directory)
