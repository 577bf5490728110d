"""``fit`` from config to checkpoint, in one process: what it writes, measures, keeps and learns."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState

from rm_core.checkpoint import read_record, write_checkpoint
from rm_core.model import RewardModel
from rm_train import build as build_module
from rm_train import fit as fit_module
from rm_train.build import build_model
from rm_train.config_file import ConfigError
from rm_train.data import read_pairs
from rm_train.encode import encode_pairs
from rm_train.evaluation import Rewards
from rm_train.fit import fit
from rm_train.loop import DivergedError
from rm_train.rows import DataError
from tests.conftest import CHATML, byte_tokenizer, save_base
from tests.train.runs import (
    ENCODERS,
    RUN_FILES,
    Quiet,
    chat_rows,
    learnable_rows,
    make_config,
    metric_lines,
    save_encoder,
    text_rows,
    weights_of,
    write_rows,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("data")
    rows = [*text_rows(12), *chat_rows(8, seed=1)]
    held_out = [*text_rows(5, seed=2), *chat_rows(4, seed=3)]
    return write_rows(directory / "train.jsonl", rows), write_rows(directory / "eval.jsonl", held_out)


def rewards_by_server(checkpoint: Path, file: Path, dtype: str = "float32") -> Rewards:
    """What the written checkpoint gives, loaded again and each sequence alone."""
    model = RewardModel.load(str(checkpoint), dtype=dtype, device="cpu")  # type: ignore[arg-type]
    encoded = encode_pairs(list(read_pairs(str(file))), model.renderer, 128)
    sides = [
        [model.score_ids([ids])[0] for ids in side]
        for side in zip(*((i.chosen, i.rejected) for i in encoded), strict=True)
    ]
    return Rewards(*(np.array(side, dtype=np.float64) for side in sides))


# ------------------------------------------------------------------ what is written


@pytest.mark.parametrize("lora", [{"r": 4, "alpha": 8}, None], ids=["lora", "full"])
def test_recorded_numbers_are_those_of_the_loaded_checkpoint(
    lora: Any, data: tuple[Path, Path], tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training, in the record, and loaded again: the same rewards, pair by pair and as mean and std."""
    in_training: list[Rewards] = []
    original = fit_module._score_on_all_processes

    def keep(*args: Any) -> Rewards:
        in_training.append(original(*args))
        return in_training[-1]

    monkeypatch.setattr(fit_module, "_score_on_all_processes", keep)
    settings = {"max_steps": 6, "learning_rate": 3e-3, "eval_every": 3}
    config = make_config(tiny_base, tmp_path, *data, lora=lora, train=settings)
    result = fit(config, Quiet())
    checkpoint = result.directory / "checkpoint"
    loaded = rewards_by_server(checkpoint, data[1])
    record = read_record(checkpoint)
    assert record is not None
    assert result.record == record
    everything = np.concatenate([loaded.chosen, loaded.rejected])
    bound = 1e-4 * max(float(everything.std()), 1.0)
    assert len(in_training) == 2
    np.testing.assert_allclose(in_training[-1].chosen, loaded.chosen, atol=bound)
    np.testing.assert_allclose(in_training[-1].rejected, loaded.rejected, atol=bound)
    assert record.reward_mean == pytest.approx(everything.mean(), abs=bound)
    assert record.reward_std == pytest.approx(everything.std(), abs=bound)
    assert record.num_eval == 18
    assert record.training_length == 128
    right = (loaded.chosen > loaded.rejected) + 0.5 * (loaded.chosen == loaded.rejected)
    assert record.metrics["accuracy"]["value"] == pytest.approx(right.mean())
    assert record.metrics["log_loss"] == pytest.approx(
        np.logaddexp(0, loaded.rejected - loaded.chosen).mean(), abs=1e-4
    )
    assert record.data["train_pairs"] == 20
    assert record.data["steps"] == 6
    assert record.kind == ("adapter" if lora else "model")


def test_run_directory_holds_config_metrics_and_checkpoint(
    data: tuple[Path, Path], tiny_base: Path, tmp_path: Path
) -> None:
    config = make_config(tiny_base, tmp_path, *data, train={"max_steps": 2})
    result = fit(config, Quiet())
    assert sorted(path.name for path in result.directory.iterdir()) == RUN_FILES
    assert json.loads((result.directory / "config.json").read_text()) == config.model_dump(mode="json")
    lines = metric_lines(result.directory, wall_clock=True)
    assert [line["step"] for line in lines] == [1, 2]
    assert {"loss", "accuracy", "margin", "grad_norm", "learning_rate", "tokens", "seconds"} <= set(lines[0])
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert not [path for path in (result.directory / "checkpoint").iterdir() if path.suffix in (".bin", ".pt", ".pkl")]


def test_same_config_gives_the_same_reward_id_and_another_seed_another(
    data: tuple[Path, Path], tiny_base: Path, tmp_path: Path
) -> None:
    ids = []
    for number, seed in enumerate((0, 0, 1)):
        config = make_config(
            tiny_base, tmp_path / str(number), *data, run={"seed": seed}, lora={"dropout": 0.2}, train={"max_steps": 2}
        )
        record = fit(config, Quiet()).record
        assert record is not None
        ids.append(record.reward_id)
    assert ids[0] == ids[1] != ids[2]


def test_base_stays_as_it_was(data: tuple[Path, Path], tiny_base: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in tiny_base.iterdir()}
    fit(make_config(tiny_base, tmp_path, *data, lora=None, train={"max_steps": 1}), Quiet())
    assert {path.name: path.read_bytes() for path in tiny_base.iterdir()} == before


@pytest.mark.parametrize("ranks", [False, True], ids=["pairs", "K-wise ranks"])
def test_margins_that_are_asked_for_and_absent_are_refused(ranks: bool, tiny_base: Path, tmp_path: Path) -> None:
    rows = text_rows(4)
    if ranks:
        rows = [{"prompt": row["prompt"], "completions": ["a", "b", "c"], "ranks": [1, 2, 3]} for row in rows]
    file = write_rows(tmp_path / "pairs.jsonl", rows)
    config = make_config(tiny_base, tmp_path, file, file, loss={"use_margin": True}, train={"max_steps": 1})
    with pytest.raises(DataError, match=r"pairs\.jsonl: loss\.use_margin is true, but no training pair has a margin"):
        fit(config, Quiet())
    assert not (tmp_path / "runs" / "run").exists()


def test_margins_that_are_not_used_are_said_once(tiny_base: Path, tmp_path: Path) -> None:
    rows = text_rows(4)
    file = write_rows(tmp_path / "pairs.jsonl", [{**rows[0], "margin": 2.0}, *rows[1:]])
    for used in (False, True):
        reporter = Quiet()
        fit(make_config(tiny_base, tmp_path, file, file, loss={"use_margin": used}, train={"max_steps": 1}), reporter)
        said = [text for text in reporter.said if text.startswith("margins: ")]
        assert said == (
            [] if used else ["margins: 1 of 4 training pairs have one, and loss.use_margin is false: not used"]
        )


def test_second_run_of_a_name_replaces_the_first(data: tuple[Path, Path], tiny_base: Path, tmp_path: Path) -> None:
    """Metrics start anew, and the first one's saved state can no longer be resumed by mistake."""
    fit(make_config(tiny_base, tmp_path, *data, train={"max_steps": 4, "save_every": 2}), Quiet())
    result = fit(make_config(tiny_base, tmp_path, *data, train={"max_steps": 2}), Quiet())
    assert [line["step"] for line in metric_lines(result.directory)] == [1, 2]
    assert not (result.directory / "resume.pt").exists()


def test_over_long_pairs_are_trained_on_cut_and_counted(tiny_base: Path, tmp_path: Path) -> None:
    rows = [*text_rows(4), {"prompt": "x" * 300, "chosen": "good", "rejected": "bad"}]
    file = write_rows(tmp_path / "pairs.jsonl", rows)
    reporter = Quiet()
    result = fit(make_config(tiny_base, tmp_path, file, file, train={"max_steps": 1}), reporter)
    assert result.record is not None
    assert result.record.data["truncated"] == {"train": 1, "eval": 1}
    assert any("1 of 5 pairs are over 128 tokens" in text for text in reporter.said)
    assert any("5 evaluation pairs have a prompt that is trained on" in text for text in reporter.said)


# ------------------------------------------------------------------ evaluation during training


def test_evaluations_are_logged_every_so_many_steps_and_at_the_end(
    data: tuple[Path, Path], tiny_base: Path, tmp_path: Path
) -> None:
    result = fit(make_config(tiny_base, tmp_path, *data, train={"max_steps": 5, "eval_every": 2}), Quiet())
    lines = metric_lines(result.directory)
    evaluated = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in evaluated] == [2, 4, 5]
    assert set(evaluated[0]) == {"step", "eval_loss", "eval_accuracy", "eval_margin"}
    assert result.record is not None
    assert evaluated[-1]["eval_loss"] == pytest.approx(result.record.metrics["log_loss"], abs=1e-4)
    assert evaluated[-1]["eval_accuracy"] == pytest.approx(result.record.metrics["accuracy"]["value"])


def test_evaluation_does_not_disturb_training(data: tuple[Path, Path], tiny_base: Path, tmp_path: Path) -> None:
    """Dropout draws the same numbers, and gradient checkpointing still works behind an evaluation."""
    weights = []
    for name, settings in (("with", {"eval_every": 1}), ("without", {})):
        config = make_config(
            tiny_base,
            tmp_path / name,
            *data,
            model={"gradient_checkpointing": True},
            lora={"dropout": 0.3},
            train={"max_steps": 3, **settings},
        )
        weights.append(weights_of(fit(config, Quiet()).directory / "checkpoint"))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_early_stopping_ends_the_run_and_keeps_the_best_weights(
    data: tuple[Path, Path], tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses 3, 1, 2, 2 after every step with patience 2: stop behind step 4 with the weights of step 2."""
    losses = iter([3.0, 1.0, 2.0, 2.0])
    monkeypatch.setattr(
        fit_module, "quick_metrics", lambda rewards, pairs: {"loss": next(losses), "accuracy": 0.5, "margin": 0.0}
    )
    settings = {"max_steps": 50, "eval_every": 1, "early_stopping_patience": 2, "schedule": "constant"}
    stopped = fit(make_config(tiny_base, tmp_path / "stopped", *data, train=settings), Quiet())
    assert stopped.steps == 4
    two = fit(make_config(tiny_base, tmp_path / "two", *data, train={"max_steps": 2, "schedule": "constant"}), Quiet())
    expected = weights_of(two.directory / "checkpoint")
    found = weights_of(stopped.directory / "checkpoint")
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_evaluation_without_a_number_stops_the_run(
    data: tuple[Path, Path], tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fit_module, "score_pairs", lambda model, encoded, **options: Rewards(*[np.full(len(encoded), np.nan)] * 2)
    )
    with pytest.raises(DivergedError, match=r"^evaluation: 18 rewards are NaN or infinite; lower train\.learning_rate"):
        fit(make_config(tiny_base, tmp_path, *data, train={"max_steps": 1}), Quiet())
    assert not (tmp_path / "runs" / "run" / "checkpoint").exists()


def test_final_evaluation_may_be_that_of_the_training_model(
    data: tuple[Path, Path], tiny_base: Path, tmp_path: Path
) -> None:
    config = make_config(tiny_base, tmp_path, *data, train={"max_steps": 1, "final_eval_dtype": "compute"})
    record = fit(config, Quiet()).record
    assert record is not None
    assert record.metrics["dtype"] == "compute"
    loaded = rewards_by_server(tmp_path / "runs" / "run" / "checkpoint", data[1])
    assert record.reward_mean == pytest.approx(np.concatenate([loaded.chosen, loaded.rejected]).mean(), abs=1e-4)


@pytest.mark.parametrize("lora", [{"r": 4, "alpha": 8, "dropout": 0.1}, None], ids=["lora", "full"])
def test_training_in_bfloat16_gives_a_checkpoint_that_loads(
    lora: Any, data: tuple[Path, Path], tiny_base: Path, tmp_path: Path
) -> None:
    settings = {"max_steps": 2, "eval_every": 1}
    result = fit(
        make_config(tiny_base, tmp_path, *data, model={"dtype": "bfloat16"}, lora=lora, train=settings), Quiet()
    )
    first = metric_lines(result.directory)[0]
    assert first["loss"] == pytest.approx(math.log(2), rel=0.01)
    assert result.record is not None
    assert result.record.numerics["dtype"] == "bfloat16"
    loaded = rewards_by_server(result.directory / "checkpoint", data[1])
    assert result.record.reward_mean == pytest.approx(np.concatenate([loaded.chosen, loaded.rejected]).mean(), abs=1e-4)


# ------------------------------------------------------------------ options, trackers, learning


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"lora": {"options": {"use_rslorra": True}}}, "lora.options: .*'use_rslorra'; did you mean use_rslora"),
        ({"lora": {"target_modules": ["q_projj"]}}, "lora .target_modules: .*q_projj"),
        ({"lora": {"target_modules": ["q_proj", "v_porj"]}}, "lora.target_modules: no layer is called 'v_porj'"),
        ({"lora": {"options": {"target_parameters": ["x"]}}}, "lora .*options: target_parameters.*no parameter was"),
        ({"lora": {"options": {"use_bdlora": True}}}, "lora .*options: use_bdlora.*: `BdLoraConfig` must be"),
        ({"train": {"report_to": ["tensorbord"]}}, "train.report_to: 'tensorbord' is no tracker"),
    ],
)
def test_options_that_others_refuse_are_named(
    sections: dict[str, Any], named: str, data: tuple[Path, Path], tiny_base: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        fit(make_config(tiny_base, tmp_path, *data, **sections), Quiet())
    assert "\n" not in str(caught.value)


def test_options_of_peft_are_passed_on(data: tuple[Path, Path], tiny_base: Path, tmp_path: Path) -> None:
    lora = {
        "r": 2,
        "alpha": 6,
        "target_modules": ["q_proj"],
        "options": {"use_rslora": True, "layers_to_transform": [1]},
    }
    result = fit(make_config(tiny_base, tmp_path, *data, lora=lora, train={"max_steps": 1}), Quiet())
    stored = json.loads((result.directory / "checkpoint" / "adapter_config.json").read_text())
    assert (stored["r"], stored["lora_alpha"], stored["use_rslora"]) == (2, 6, True)
    names = {name for name in weights_of(result.directory / "checkpoint") if "lora" in name}
    assert len(names) == 2
    assert all("layers.1." in name and "q_proj" in name for name in names)


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal", "pissa", "olora"])
def test_every_start_of_the_adapter_is_what_the_checkpoint_loads(start: Any, tiny_base: Path, tmp_path: Path) -> None:
    """Some of them change the base's weights, which are not in the checkpoint: loading must do the same again."""
    lora = {"r": 2, "alpha": 4, "options": {"init_lora_weights": start}}
    model = build_model(make_config(tiny_base, tmp_path, tmp_path / "none", lora=lora), "cpu")
    with torch.no_grad():
        for parameter in model.network.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    model.network.eval()
    trained = model.score_ids([[1, 2, 3], [4, 5]])
    write_checkpoint(model, tmp_path / "checkpoint", training_length=64)
    loaded = RewardModel.load(str(tmp_path / "checkpoint"), dtype="float32")
    np.testing.assert_allclose(loaded.score_ids([[1, 2, 3], [4, 5]]), trained, atol=1e-4)


def test_accelerates_own_mixed_precision_is_left_alone(
    data: tuple[Path, Path], tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accelerate config` leaves such a default for every later launch; fp16 is refused by accelerate on a CPU."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        result = fit(make_config(tiny_base, tmp_path, *data, train={"max_steps": 1}), Quiet())
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert result.steps == 1


def test_length_beyond_the_model_is_cut_and_said(data: tuple[Path, Path], tiny_base: Path, tmp_path: Path) -> None:
    model, reporter = {"max_length": 1000}, Quiet()
    config = make_config(tiny_base, tmp_path, *data, model=model, train={"max_steps": 1})
    record = fit(config, reporter).record
    assert record is not None
    assert record.training_length == 512
    assert "model.max_length: 1000 is more than the model reads; it is cut to 512 tokens" in reporter.said


def test_tracker_whose_package_is_missing_is_named(
    data: tuple[Path, Path], tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "get_available_trackers", list)
    with pytest.raises(ConfigError, match="package of 'tensorboard' is not installed"):
        fit(make_config(tiny_base, tmp_path, *data, train={"report_to": ["tensorboard"]}), Quiet())


def test_tensorboard_gets_the_metrics(data: tuple[Path, Path], tiny_base: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    config = make_config(
        tiny_base, tmp_path, *data, train={"report_to": ["tensorboard"], "max_steps": 2, "eval_every": 2}
    )
    result = fit(config, Quiet())
    assert list(result.directory.rglob("events.out.tfevents*"))


def test_a_rule_that_can_be_learnt_is_learnt(tiny_base: Path, tmp_path: Path) -> None:
    """The better answer holds a z; prompts are new in the held-out pairs. All weights are trained: it is a tiny model."""
    train = write_rows(tmp_path / "train.jsonl", learnable_rows(300))
    held_out = write_rows(tmp_path / "eval.jsonl", learnable_rows(60, seed=1))
    settings = {"batch_size": 32, "epochs": 4, "learning_rate": 3e-3, "warmup_ratio": 0.1}
    record = fit(make_config(tiny_base, tmp_path, train, held_out, lora=None, train=settings), Quiet()).record
    assert record is not None
    assert record.metrics["accuracy"]["value"] >= 0.9
    assert record.metrics["log_loss"] < 0.4
    assert record.metrics["longer_wins"] == 0.5


@pytest.mark.parametrize("lora", [{"r": 4, "alpha": 8}, None], ids=["lora", "full"])
@pytest.mark.parametrize("family", ["bert", "deberta-v2", "modernbert"])
def test_an_encoder_trains_and_plain_transformers_reads_the_same_rewards_from_its_checkpoint(
    family: str, lora: Any, tmp_path: Path
) -> None:
    """Its pooler and other new layers are trained and saved with the head."""
    from peft import AutoPeftModelForSequenceClassification
    from transformers import AutoModelForSequenceClassification

    base = save_encoder(tmp_path / family, family, **ENCODERS[family])
    train = write_rows(tmp_path / "train.jsonl", text_rows(12))
    held_out = write_rows(tmp_path / "eval.jsonl", text_rows(5, seed=2))
    config = make_config(base, tmp_path, train, held_out, lora=lora, train={"max_steps": 6, "learning_rate": 3e-3})
    result = fit(config, Quiet())
    checkpoint = result.directory / "checkpoint"
    rewards = rewards_by_server(checkpoint, held_out)
    assert np.concatenate([rewards.chosen, rewards.rejected]).std() > 0
    kind = AutoModelForSequenceClassification if lora is None else AutoPeftModelForSequenceClassification
    plain = kind.from_pretrained(checkpoint, num_labels=1, dtype=torch.float32).eval()
    encoded = encode_pairs(list(read_pairs(str(held_out))), RewardModel.load(str(checkpoint)).renderer, 128)
    with torch.no_grad():
        expected = [float(plain(input_ids=torch.tensor([item.chosen])).logits[0, 0]) for item in encoded]
    np.testing.assert_allclose(rewards.chosen, expected, atol=1e-5)


def test_reward_changes_when_only_the_last_answer_does_though_pad_is_eos(tmp_path: Path) -> None:
    """The tokenizer pads with its end token, so a search for the first or last pad would read a wrong position."""
    base = save_base(tmp_path / "base", tokenizer=byte_tokenizer(eos="<|im_end|>", pad="<|im_end|>"))
    file = write_rows(tmp_path / "pairs.jsonl", chat_rows(8))
    result = fit(make_config(base, tmp_path, file, file, train={"max_steps": 2, "learning_rate": 1e-2}), Quiet())
    model = RewardModel.load(str(result.directory / "checkpoint"), dtype="float32", device="cpu")
    talk = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "And?"},
    ]
    ids = [
        model.renderer.render_conversation([*talk, {"role": "assistant", "content": answer}])
        for answer in ("yes", "yet", "something longer", "y")
    ]
    together = model.score_ids(ids)
    np.testing.assert_allclose(together, [model.score_ids([one])[0] for one in ids], atol=1e-4)
    assert len({round(float(reward), 5) for reward in together}) == 4


# ------------------------------------------------------------------ what is said of ties and of memory


def test_answers_that_render_to_the_same_tokens_are_counted(tiny_base: Path, tmp_path: Path) -> None:
    """A template that trims the answers makes a tie of two that differ."""
    base = save_base(tmp_path / "base", tokenizer=byte_tokenizer(CHATML.replace("['content']", "['content'] | trim")))
    rows = [*chat_rows(3), {**chat_rows(1)[0], "prompt": [{"role": "user", "content": "again?"}]}]
    rows[3]["rejected"] = [{"role": "assistant", "content": rows[3]["chosen"][0]["content"] + " "}]
    pairs = write_rows(tmp_path / "pairs.jsonl", rows)
    reporter = Quiet()
    fit(make_config(base, tmp_path, pairs, pairs, train={"max_steps": 1}), reporter)
    assert f"training: 1 of 4 pairs are the same tokens on both sides; first {pairs}:4" in reporter.said


@pytest.mark.parametrize("checkpointing", [False, True])
def test_out_of_memory_is_one_line_that_says_what_to_lower(
    checkpointing: bool,
    data: tuple[Path, Path],
    tiny_base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tests.train.test_cli import run

    def fail(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore lines")

    monkeypatch.setattr(fit_module, "train", fail)
    config = make_config(tiny_base, tmp_path, *data, model={"gradient_checkpointing": checkpointing})
    file = tmp_path / "run.yaml"
    file.write_text(config.model_dump_json())
    code, _, err = run(capsys, "fit", file)
    last = err.splitlines()[-1]
    assert code == 2
    assert "Traceback" not in err
    assert last.startswith("rm-train: error: out of memory: CUDA out of memory. Tried to allocate 2 GiB.; lower ")
    assert "train.max_tokens (now 4096)" in last
    assert ("model.gradient_checkpointing: true" in last) == (not checkpointing)
