"""Every key of the config does something: the run with another value differs from the plain one where it should.

A key that is new and not listed here fails the first test.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rm_core.config_docs import describe_settings
from rm_train import fit as fit_module
from rm_train.config import FitConfig
from rm_train.config_file import ConfigError
from rm_train.fit import fit
from tests.conftest import save_base
from tests.train.runs import Quiet, chat_rows, make_config, metric_lines, text_rows, weights_of, write_rows

Seen = dict[str, Any]
"""What can be seen of a run: weights, metric lines, record, files, what was said."""

ROWS = [
    {**row, "margin": 0.5 + index, "label": 0.9, "question": f"other {index}? "}
    for index, row in enumerate([*text_rows(7), *chat_rows(1, seed=1)])
]
ROWS[4]["prompt"] = ROWS[0]["prompt"]
LONG = {"prompt": "p" * 80, "chosen": "fine", "rejected": "poor"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> tuple[Path, Seen]:
    """The directory of data and base, and what is seen of the plain run."""
    directory = tmp_path_factory.mktemp("effects")
    write_rows(directory / "train.jsonl", [*ROWS, LONG])
    write_rows(directory / "eval.jsonl", text_rows(5, seed=2))
    write_rows(directory / "other.jsonl", text_rows(6, seed=7))
    return directory, see(directory / "plain", tiny_base, directory, {})


def see(place: Path, base: Path, data: Path, sections: dict[str, Any]) -> Seen:
    """Run with ``sections`` laid over a plain config."""
    sections = json.loads(json.dumps(sections).replace("DATA", str(data)).replace("PLACE", str(place)))
    train = {"max_steps": 4, "batch_size": 4, **sections.pop("train", {})}
    lora: Any = {"r": 2, "alpha": 4}
    given = sections.pop("lora", {})
    lora = None if given is None else {**lora, **given}
    place.mkdir(exist_ok=True)
    config = make_config(
        base, place, data / "train.jsonl", data / "eval.jsonl", train=train, lora=lora, head={"init_scale": 1.0},
        **{name: section for name, section in sections.items() if name != "head"},
    )  # fmt: skip
    if "head" in sections:
        config = config.model_copy(update={"head": config.head.model_copy(update=sections["head"])})
    reporter = Quiet()
    result = fit(config, reporter)
    lines = metric_lines(result.directory)
    assert result.record is not None
    return {
        "directory": str(result.directory.relative_to(place)),
        "files": sorted(path.name for path in result.directory.iterdir()),
        "weights": weights_of(result.directory / "checkpoint"),
        "names": sorted(weights_of(result.directory / "checkpoint")),
        "losses": [line["loss"] for line in lines if "loss" in line],
        "evaluations": [line["step"] for line in lines if "eval_loss" in line],
        "rates": [line["learning_rate"] for line in lines if "loss" in line],
        "sizes": [line["pairs"] for line in lines if "loss" in line],
        "tokens": [line["tokens"] for line in lines if "loss" in line],
        "metrics": result.record.metrics,
        "rules": result.record.rules.model_dump(mode="json"),
        "numerics": result.record.numerics,
        "length": result.record.training_length,
        "data": {name: result.record.data[name] for name in ("train_pairs", "eval_pairs", "truncated", "fingerprint")},
        "adapter": json.loads((result.directory / "checkpoint" / "adapter_config.json").read_text())
        if lora is not None
        else None,
    }


def differs(first: Any, second: Any) -> bool:
    if (
        isinstance(first, dict)
        and isinstance(second, dict)
        and any(isinstance(v, torch.Tensor) for v in first.values())
    ):
        return set(first) != set(second) or any(not torch.equal(first[name], second[name]) for name in first)
    return bool(first != second)


# key: (what is set, where it must show)
EFFECTS: dict[str, tuple[dict[str, Any], str]] = {
    "run.name": ({"run": {"name": "other"}}, "directory"),
    "run.output_dir": ({"run": {"output_dir": "PLACE/elsewhere"}}, "directory"),
    "run.seed": ({"run": {"seed": 3}}, "losses"),
    "model.base": ({"model": {"base": "DATA/base"}}, "losses"),
    "model.dtype": ({"model": {"dtype": "bfloat16"}}, "numerics"),
    "model.max_length": ({"model": {"max_length": 64}}, "data"),
    "model.text_as": ({"model": {"text_as": "chat"}}, "rules"),
    "lora.r": ({"lora": {"r": 3}}, "adapter"),
    "lora.alpha": ({"lora": {"alpha": 40.0}}, "losses"),
    "lora.dropout": ({"lora": {"dropout": 0.5}}, "losses"),
    "lora.target_modules": ({"lora": {"target_modules": ["q_proj"]}}, "names"),
    "lora.options": ({"lora": {"options": {"use_rslora": True}}}, "losses"),
    "lora": ({"lora": None}, "names"),
    "head.learning_rate": ({"head": {"learning_rate": 0.5}}, "losses"),
    "head.count": ({"head": {"count": 4}}, "losses"),
    "head.init_scale": ({"head": {"init_scale": 3.0}}, "losses"),
    "data.train": ({"data": {"train": ["DATA/other.jsonl"], "eval": ["DATA/eval.jsonl"]}}, "losses"),
    "data.eval": ({"data": {"train": ["DATA/train.jsonl"], "eval": ["DATA/other.jsonl"]}}, "metrics"),
    "data.eval_fraction": ({"data": {"train": ["DATA/train.jsonl"], "eval": None, "eval_fraction": 0.4}}, "data"),
    "data.columns": ({"data": {"train": ["DATA/train.jsonl"], "columns": {"margin": None, "label": None}}}, "losses"),
    "data.limit": ({"data": {"train": ["DATA/train.jsonl"], "limit": 5}}, "data"),
    "data.eval_limit": (
        {"data": {"train": ["DATA/train.jsonl"], "eval": ["DATA/eval.jsonl"], "eval_limit": 2}},
        "data",
    ),
    "data.train[].path": ({"data": {"train": [{"path": "DATA/other.jsonl"}]}}, "losses"),
    "data.train[].columns": ({"data": {"train": [{"path": "DATA/train.jsonl", "columns": {"label": None}}]}}, "losses"),
    "data.train[].mix_weight": ({"data": {"train": [{"path": "DATA/train.jsonl", "mix_weight": 2.0}]}}, "data"),
    "loss.label_smoothing": ({"loss": {"label_smoothing": 0.3}}, "losses"),
    "loss.use_margin": ({"loss": {"use_margin": True}}, "losses"),
    "loss.centering": ({"loss": {"centering": 1.0}}, "losses"),
    "train.group_by_prompt": ({"train": {"group_by_prompt": True}}, "losses"),
    "train.epochs": ({"train": {"max_steps": None, "epochs": 2}}, "losses"),
    "train.max_steps": ({"train": {"max_steps": 2}}, "losses"),
    "train.batch_size": ({"train": {"batch_size": 3}}, "sizes"),
    "train.learning_rate": ({"train": {"learning_rate": 3e-2}}, "losses"),
    "train.weight_decay": ({"train": {"weight_decay": 10.0}}, "weights"),
    "train.warmup_ratio": ({"train": {"warmup_ratio": 0.9}}, "rates"),
    "train.schedule": ({"train": {"schedule": "constant"}}, "rates"),
    "train.max_grad_norm": ({"train": {"max_grad_norm": 1e-6}}, "weights"),
    "train.eval_every": ({"train": {"eval_every": 2}}, "evaluations"),
    "train.save_every": ({"train": {"save_every": 2}}, "files"),
    "train.final_eval_dtype": ({"train": {"final_eval_dtype": "compute"}}, "metrics"),
}
ELSEWHERE = {
    # what no short run on a CPU can show; the named test does
    "model.revision": "tests/train/test_config_effects.py::test_revision_goes_to_the_hub",
    "model.gradient_checkpointing": "tests/train/test_config_effects.py::test_gradient_checkpointing_is_switched_on",
    "model.quantize": "tests/train/test_build.py::test_quantised_base_without_a_gpu_is_refused",
    "data.train[].split": "tests/train/test_sources.py::test_a_hub_set_is_loaded_by_id_split_and_revision",
    "data.train[].subset": "tests/train/test_sources.py::test_a_hub_set_is_loaded_by_id_split_and_revision",
    "data.train[].revision": "tests/train/test_sources.py::test_a_hub_set_is_loaded_by_id_split_and_revision",
    "train.max_tokens": "tests/train/test_config_effects.py::test_max_tokens_cuts_a_step_into_passes",
    "train.early_stopping_patience": "tests/train/test_fit.py::test_early_stopping_ends_the_run_and_keeps_the_best_weights",
    "train.keep_best": "tests/train/test_config_effects.py::test_best_weights_are_kept_without_stopping",
    "train.shard": "tests/train/test_sharding.py::test_two_processes_that_divide_the_model_equal_one",
    "train.report_to": "tests/train/test_config_effects.py::test_trackers_are_started",
}


def test_every_key_is_covered_and_nothing_else() -> None:
    keys = {setting.key for section in describe_settings(FitConfig) for setting in section.settings}
    covered = set(EFFECTS) - {"lora"} | set(ELSEWHERE)
    assert covered == keys
    root = Path(__file__).resolve().parents[2]
    for test in ELSEWHERE.values():
        file, name = test.split("::")
        assert f"def {name}(" in (root / file).read_text(encoding="utf-8"), test


@pytest.mark.parametrize("key", EFFECTS)
def test_key_has_an_effect(key: str, plain: tuple[Path, Seen], tiny_base: Path, tmp_path: Path) -> None:
    data, expected = plain
    if key == "model.base" and not (data / "base").exists():
        save_base(data / "base", num_hidden_layers=3)
    changes, where = EFFECTS[key]
    found = see(tmp_path, tiny_base, data, changes)
    assert differs(found[where], expected[where]), f"{key} changed nothing in {where}"


def test_the_same_config_gives_the_same_run(plain: tuple[Path, Seen], tiny_base: Path, tmp_path: Path) -> None:
    """Else a difference would prove nothing."""
    data, expected = plain
    found = see(tmp_path, tiny_base, data, {})
    assert not [name for name in expected if differs(found[name], expected[name])]


# ------------------------------------------------------------------ what a run does not show


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    calls: list[Any] = []
    real: Callable[..., Any] = getattr(owner, name)

    def counted(*args: Any, **options: Any) -> Any:
        calls.append((args, options))
        return real(*args, **options)

    monkeypatch.setattr(owner, name, counted)
    return calls


def short(base: Path, directory: Path, **sections: Any) -> FitConfig:
    pairs = write_rows(directory / "pairs.jsonl", text_rows(6))
    return make_config(base, directory, pairs, pairs, **sections)


def test_max_tokens_cuts_a_step_into_passes(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rm_core.network import RewardNetwork

    calls = count_calls(monkeypatch, RewardNetwork, "forward")
    passes = []
    for tokens in (4096, 128):
        calls.clear()
        train = {"max_steps": 1, "batch_size": 6, "max_tokens": tokens}
        fit(short(tiny_base, tmp_path, model={"max_length": 64}, train=train), Quiet())
        passes.append(len(calls))
    assert passes[0] == 1 < passes[1]


def test_gradient_checkpointing_is_switched_on(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step in one pass: the backward pass goes through the two layers once more."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    calls = count_calls(monkeypatch, LlamaMLP, "forward")
    counts = []
    for value in (False, True):
        calls.clear()
        fit(short(tiny_base, tmp_path, model={"gradient_checkpointing": value}, train={"max_steps": 1}), Quiet())
        counts.append(len(calls))
    assert counts[1] == counts[0] + 2


def test_revision_goes_to_the_hub(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        return str(tiny_base)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    fit(short(tiny_base, tmp_path, model={"base": "owner/base", "revision": "v2"}, train={"max_steps": 1}), Quiet())
    assert asked[0] == ("owner/base", "v2")


def test_best_weights_are_kept_without_stopping(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses 3, 1, 2, 2 after every step: all four are done, and the weights of step 2 are written."""
    losses = iter([3.0, 1.0, 2.0, 2.0])
    monkeypatch.setattr(
        fit_module, "quick_metrics", lambda rewards, pairs: {"loss": next(losses), "accuracy": 0.5, "margin": 0.0}
    )
    train = {"max_steps": 4, "eval_every": 1, "schedule": "constant"}
    kept = fit(short(tiny_base, tmp_path, train={**train, "keep_best": True}), Quiet())
    assert kept.steps == 4
    two = fit(short(tiny_base, tmp_path, run={"name": "two"}, train={"max_steps": 2, "schedule": "constant"}), Quiet())
    found, expected = weights_of(kept.directory / "checkpoint"), weights_of(two.directory / "checkpoint")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(ValueError, match=r"train\.keep_best: needs train\.eval_every"):
        short(tiny_base, tmp_path, train={"keep_best": True})


def test_trackers_are_started(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"train\.report_to: 'nothing' is no tracker"):
        fit(short(tiny_base, tmp_path, train={"max_steps": 1, "report_to": ["nothing"]}), Quiet())
    from accelerate import Accelerator

    from rm_train import build as build_module

    monkeypatch.setattr(build_module, "get_available_trackers", lambda: ["tensorboard"])
    started: list[Any] = []
    monkeypatch.setattr(Accelerator, "init_trackers", lambda self, name, config: started.append((name, config)))
    asked: list[Any] = []

    class Recording(Accelerator):
        """The trackers that were asked for, though their packages are absent."""

        def __init__(self, log_with: Any = None, **options: Any) -> None:
            asked.append(log_with)
            super().__init__(**options)

    monkeypatch.setattr(fit_module, "Accelerator", Recording)
    fit(short(tiny_base, tmp_path, train={"max_steps": 1, "report_to": ["tensorboard"]}), Quiet())
    assert started[0][0] == "betterthan"
    assert started[0][1]["train.max_steps"] == 1
    assert asked == [["tensorboard"]]
