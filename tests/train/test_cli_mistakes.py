"""What a user can get wrong at the command line: exit code 2 and one line on stderr that says where and what."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rm_train.cli import main
from tests.conftest import byte_tokenizer, save_base, save_classifier
from tests.train.runs import chat_rows, text_rows, write_rows

Refused = Callable[..., str]


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Refused:
    """Run a command that must be refused; gives its one line. Reads the descriptors, past any Python redirection."""

    def command(*arguments: object, progress: bool = False) -> str:
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert caught.value.code == 2, err
        assert out == ""
        lines = err.splitlines()
        assert "Traceback" not in err
        errors = [line for line in lines if line.startswith("rm-train: error: ")]
        assert len(errors) == 1
        assert lines[-1] == errors[0]
        assert progress or len(lines) == 1, err
        return errors[0].removeprefix("rm-train: error: ")

    return command


@pytest.fixture
def config(tmp_path: Path, tiny_base: Path) -> Callable[..., Path]:
    """Write a config; ``values`` replace whole sections."""

    def write(rows: list[dict[str, Any]] | None = None, **values: Any) -> Path:
        pairs = write_rows(tmp_path / "pairs.jsonl", rows or text_rows(8))
        sections: dict[str, Any] = {
            "run": {"name": "r", "output_dir": str(tmp_path / "runs")},
            "model": {"base": str(tiny_base), "dtype": "float32", "max_length": 128},
            "lora": {"r": 2},
            "data": {"train": [str(pairs)]},
            "train": {"max_steps": 1},
            **values,
        }
        path = tmp_path / "config.yaml"
        path.write_text(json.dumps(sections))
        return path

    return write


# ------------------------------------------------------------------ usage


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["fit"], "Missing argument"),
        (["fitt", "a.yaml"], "No such command 'fitt'"),
        (["eval", "a", "b", "--dtpe", "float32"], "--dtpe"),
        (["eval", "CHECKPOINT", "b", "--dtype", "float16"], "--dtype: must be auto, float32 or bfloat16"),
        (["score", "CHECKPOINT", "FILE", "--dtype", "int8"], "--dtype: must be auto, float32 or bfloat16"),
        (["merge", "CHECKPOINT", "out", "--dtype", "auto"], "--dtype: must be float32 or bfloat16"),
        (["calibrate", "CHECKPOINT", "b", "--end", "never"], "--end: must be token or template"),
        (["calibrate", "CHECKPOINT", "b", "--text-as", "poem"], "--text-as: must be raw or chat"),
        (["eval", "CHECKPOINT", "b", "--limit", "0"], "--limit"),
        (["check", "FILE", "--max-length", "64"], "--max-length: has no effect without --model"),
        (["check", "FILE", "--text-as", "chat"], "--text-as: has no effect without --model"),
        (["eval", "CHECKPOINT", "b", "--max-tokens", "many"], "--max-tokens"),
    ],
)
def test_wrong_usage(arguments: list[str], named: str, refused: Refused, tiny_checkpoint: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"text": "a"}])
    places = {"CHECKPOINT": str(tiny_checkpoint), "FILE": str(file)}
    assert named in refused(*[places.get(argument, argument) for argument in arguments])


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    out, err = capsys.readouterr()
    assert "calibrate" in out
    assert err == ""


# ------------------------------------------------------------------ config


def test_config_that_is_not_there(refused: Refused, tmp_path: Path) -> None:
    message = refused("fit", tmp_path / "none.yaml")
    assert message == f"{tmp_path / 'none.yaml'}: cannot be read: No such file or directory"


def test_config_of_broken_yaml_names_the_line(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("run: {name: a}\nmodel: {base: b\ndata: [\n")
    assert refused("fit", path).startswith(f"{path}:3: is not valid YAML")


def test_unknown_key_names_the_nearest_known_one(refused: Refused, config: Callable[..., Path]) -> None:
    path = config(train={"max_stepps": 1})
    assert refused("fit", path) == f"{path}: train.max_stepps: unknown key; did you mean train.max_steps?"
    message = refused("fit", config(), "--set", "train.learning_rat=1")
    assert message.startswith("--set train.learning_rat=1: train.learning_rat: unknown key; did you mean")


def test_wrong_value_names_key_and_bound(refused: Refused, config: Callable[..., Path]) -> None:
    message = refused("fit", config(), "--set", "train.batch_size=0")
    assert message.startswith("--set train.batch_size=0: train.batch_size: must be greater than or equal to 1")


def test_empty_training_file_is_named(refused: Refused, config: Callable[..., Path], tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert refused("fit", config(), "--set", f"data.train=[{empty}]") == f"{empty}: no pairs to train on"


def test_output_directory_that_cannot_be_made(refused: Refused, config: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("a file")
    message = refused("fit", config(), "--set", f"run.output_dir={tmp_path / 'occupied'}", progress=True)
    assert str(tmp_path / "occupied") in message
    assert "Not a directory" in message or "File exists" in message


def test_layer_that_the_model_has_not(refused: Refused, config: Callable[..., Path]) -> None:
    message = refused("fit", config(), "--set", "lora.target_modules=[q_porj]", progress=True)
    assert message.startswith("lora (target_modules: ['q_porj']): ")


def test_tracker_that_does_not_exist(refused: Refused, config: Callable[..., Path]) -> None:
    message = refused("fit", config(), "--set", "train.report_to=[wandbb]", progress=True)
    assert message.startswith("train.report_to: 'wandbb' is no tracker; known: ")


def test_resume_without_a_state(refused: Refused, config: Callable[..., Path]) -> None:
    assert "there is no state to resume from" in refused("fit", config(), "--resume", progress=True)


def test_diverging_run(refused: Refused, config: Callable[..., Path], tmp_path: Path) -> None:
    message = refused("fit", config(train={"max_steps": 5, "learning_rate": 1e30, "warmup_ratio": 0}), progress=True)
    assert message.startswith("step ")
    assert "lower train.learning_rate (now 1e+30)" in message
    assert not (tmp_path / "runs" / "r" / "checkpoint").exists()


# ------------------------------------------------------------------ data


@pytest.mark.parametrize("command", ["fit", "eval", "calibrate"])
def test_data_file_that_is_not_there(
    command: str, refused: Refused, config: Callable[..., Path], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    missing = tmp_path / "none.jsonl"
    if command == "fit":
        message = refused("fit", config(data={"train": [str(missing)]}), progress=True)
    else:
        source = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
        message = refused(command, source, missing, progress=True)
    assert message.startswith(str(missing))


@pytest.mark.parametrize("command", ["fit", "eval", "calibrate"])
@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"prompt": "a", "chosen": "b"}', "rejected"),
        ('{"prompt": "a", "chosen": "b", "rejected": 5}', "rejected: must be text"),
        ('{"prompt": "a", ', "JSON"),
        ('{"prompt": "a", "chosen": [{"role": "user"}], "rejected": "c"}', "chosen[0].content"),
    ],
)
def test_broken_row_names_file_and_line(
    command: str,
    line: str,
    named: str,
    refused: Refused,
    config: Callable[..., Path],
    tiny_checkpoint: Path,
    tmp_path: Path,
) -> None:
    path = write_rows(tmp_path / "broken.jsonl", text_rows(3))
    path.write_text(path.read_text() + line + "\n")
    if command == "fit":
        message = refused("fit", config(data={"train": [str(path)]}), progress=True)
    else:
        source = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
        message = refused(command, source, path, progress=True)
    assert message.startswith(f"{path}:4: ")
    assert named in message


def test_file_without_a_pair(refused: Refused, tiny_checkpoint: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert str(empty) in refused("eval", tiny_checkpoint, empty, progress=True)


def test_truncated_compressed_file(refused: Refused, tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n".join(json.dumps(row).encode() for row in text_rows(50)))[:-20])
    assert refused("eval", tiny_checkpoint, path, progress=True).startswith(str(path))


def strict_template() -> str:
    """A template that refuses any role but user and assistant, as Mistral's and Gemma's do."""
    return (
        "{% for message in messages %}{% if message['role'] not in ['user', 'assistant'] %}"
        "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    )


def test_role_that_the_template_refuses_names_the_row(
    refused: Refused, config: Callable[..., Path], tmp_path: Path
) -> None:
    base = save_base(tmp_path / "base", tokenizer=byte_tokenizer(strict_template()))
    rows = chat_rows(6)
    rows[3]["prompt"].insert(0, {"role": "wizard", "content": "Abracadabra"})
    path = config(rows, model={"base": str(base), "dtype": "float32", "max_length": 128})
    message = refused("fit", path, progress=True)
    assert message.startswith(f"{tmp_path / 'pairs.jsonl'}:4: ")
    assert "wizard" in message
    assert "Only user and assistant roles are supported!" in message


def test_conversations_for_a_model_without_a_template(
    refused: Refused, config: Callable[..., Path], tmp_path: Path
) -> None:
    base = save_base(tmp_path / "base", tokenizer=byte_tokenizer(None))
    model = {"base": str(base), "dtype": "float32", "max_length": 128}
    message = refused("fit", config(chat_rows(6), model=model), progress=True)
    assert message.startswith(f"{tmp_path / 'pairs.jsonl'}:1: ")
    assert "no chat template" in message
    message = refused("fit", config(text_rows(6), model={**model, "text_as": "chat"}), progress=True)
    assert message.startswith("text_as: 'chat' needs a chat template")


def test_file_to_score_that_cannot_be_read(refused: Refused, tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.mkdir()
    assert refused("score", tiny_checkpoint, path).startswith(str(path))
    assert "cannot be read" in refused("score", tiny_checkpoint, tmp_path / "none.jsonl")


# ------------------------------------------------------------------ models


@pytest.mark.parametrize("command", ["fit", "eval", "score", "merge", "calibrate"])
@pytest.mark.parametrize("name", ["./nowhere", "nobody/nothing-at-all", "smollm-typo"])
def test_model_that_does_not_exist(
    command: str, name: str, refused: Refused, config: Callable[..., Path], tmp_path: Path
) -> None:
    pairs = write_rows(tmp_path / "p.jsonl", text_rows(3))
    arguments: dict[str, list[object]] = {
        "fit": [config(model={"base": name, "dtype": "float32", "max_length": 128})],
        "eval": [name, pairs],
        "score": [name, write_rows(tmp_path / "rows.jsonl", [{"text": "a"}])],
        "merge": [name, tmp_path / "out"],
        "calibrate": [name, pairs],
    }
    message = refused(command, *arguments[command], progress=True)
    assert message.startswith(f"{name}: no such folder")


@pytest.mark.parametrize("command", ["eval", "score", "merge", "calibrate"])
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("headless", "head"),
        ("language_model", "has no reward head"),
        ("two_labels", "has 2 labels"),
        ("empty", "holds no model"),
    ],
)
def test_model_that_is_no_reward_model(
    command: str, fault: str, named: str, refused: Refused, tiny_checkpoint: Path, tiny_base: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    if fault == "headless":
        shutil.copytree(tiny_checkpoint, directory)
        (directory / "reward_model.json").unlink()
        remove_head(directory)
    elif fault == "language_model":
        shutil.copytree(tiny_base, directory)
    elif fault == "two_labels":
        save_classifier(directory, num_labels=2)
    else:
        directory.mkdir()
    pairs = write_rows(tmp_path / "p.jsonl", text_rows(3))
    arguments: dict[str, list[object]] = {
        "eval": [directory, pairs],
        "score": [directory, write_rows(tmp_path / "rows.jsonl", [{"text": "a"}])],
        "merge": [directory, tmp_path / "out"],
        "calibrate": [directory, pairs],
    }
    message = refused(command, *arguments[command], progress=True)
    assert str(directory) in message
    assert named in message
    assert not (tmp_path / "out").exists()


def test_checkpoint_without_its_head(refused: Refused, tiny_checkpoint: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    remove_head(directory)
    pairs = write_rows(tmp_path / "p.jsonl", text_rows(3))
    assert "the reward head" in refused("eval", directory, pairs)


def test_model_whose_rewards_are_no_numbers(refused: Refused, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory = save_classifier(tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    tensors["score.weight"] = torch.full_like(tensors["score.weight"], float("nan"))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    pairs = write_rows(tmp_path / "p.jsonl", text_rows(3))
    for command in ("eval", "calibrate"):
        assert "6 of 6 rewards are NaN or infinite" in refused(command, directory, pairs, progress=True)
    assert not (directory / "reward_model.json").exists()


def remove_head(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = directory / "adapter_model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if "score" not in name}
    save_file(tensors, file, metadata={"format": "pt"})
