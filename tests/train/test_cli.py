"""The commands of ``rm-train`` from a user's seat: what they print, write and return."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rm_core.checkpoint import CheckpointError, read_record
from rm_core.model import RewardModel
from rm_train.cli import main
from tests.conftest import save_classifier
from tests.train.runs import RUN_FILES, chat_rows, metric_lines, text_rows, write_rows


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of one command in this process."""
    code = 0
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{**row, "category": "odd" if number % 2 else "even"} for number, row in enumerate(text_rows(8))]
    return write_rows(tmp_path_factory.mktemp("data") / "pairs.jsonl", [*rows, *chat_rows(3, seed=1)])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path, pairs: Path) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(
        f"""# rm-train fit tiny.yaml
run: {{name: tiny, output_dir: {path.parent / "runs"}}}
model: {{base: {tiny_base}, dtype: float32, max_length: 128}}
lora: {{r: 4}}
data: {{train: [{pairs}], eval_fraction: 0.3}}
train: {{batch_size: 4, learning_rate: 3e-3, eval_every: 1}}
"""
    )
    return path


# ------------------------------------------------------------------ fit, eval


def test_fit_writes_a_run_and_says_what_it_did(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(
        capsys,
        "fit",
        config,
        "--set",
        f"run.output_dir={tmp_path}",
        "--set",
        "train.max_steps=3",
        "--set",
        "run.name=a",
    )
    assert code == 0, err
    directory = tmp_path / "a"
    assert sorted(path.name for path in directory.iterdir()) == RUN_FILES
    assert json.loads((directory / "config.json").read_text())["train"]["max_steps"] == 3
    assert [line["step"] for line in metric_lines(directory) if "loss" in line] == [1, 2, 3]
    record = read_record(directory / "checkpoint")
    assert record is not None
    assert record.reward_id in out
    for words in ("accuracy", "longer wins", "bag of words", "log-loss", "temperature"):
        assert words in out
    for words in ("8 training and 3 evaluation pairs", "trainable weights", "float32 was asked for"):
        assert words in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_fit_runs_as_a_program_of_its_own(config: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rm_train.cli", "fit", str(config), "--set", f"run.output_dir={tmp_path}"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tiny" / "checkpoint" / "reward_model.json").is_file()
    assert "accuracy" in done.stdout
    assert "Warning" not in done.stderr


def test_fit_resumes_a_run_that_was_done(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["fit", config, "--set", f"run.output_dir={tmp_path}", "--set", "train.save_every=1"]
    assert run(capsys, *arguments)[0] == 0
    before = metric_lines(tmp_path / "tiny")
    assert run(capsys, *arguments, "--resume")[0] == 0
    assert metric_lines(tmp_path / "tiny") == before


def test_eval_prints_a_table_or_json(tiny_checkpoint: Path, pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "eval", tiny_checkpoint, pairs, "--dtype", "float32")
    assert code == 0
    for words in ("accuracy", "95 % interval", "longer wins", "category even", "category odd", "reward ~ length"):
        assert words in out
    code, out, err = run(capsys, "eval", tiny_checkpoint, pairs, "--dtype", "float32", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["pairs"] == 11
    assert report["by_category"]["even"]["pairs"] == 4
    assert report["reward_id"] == RewardModel.load(str(tiny_checkpoint)).reward_id
    limited = json.loads(run(capsys, "eval", tiny_checkpoint, pairs, pairs, "--limit", 2, "--json")[1])
    assert limited["pairs"] == 4


def test_columns_can_be_mapped_wherever_pairs_are_evaluated(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = text_rows(4)
    file = write_rows(tmp_path / "plain.jsonl", rows)
    best = {"prompt": "Which? ", "chosen": ["this one"], "rejected": ["a", "b"]}
    named = [{"q": row["prompt"], "win": row["chosen"], "lose": row["rejected"], "prompt": "?"} for row in rows]
    named.append({"q": best["prompt"], "win": best["chosen"], "lose": best["rejected"]})
    other = write_rows(tmp_path / "named.jsonl", named)
    columns = ["--column", "prompt=q", "--column", "chosen=win", "--column", "rejected=lose"]
    wanted = json.loads(run(capsys, "eval", tiny_checkpoint, file, "--json")[1])
    code, out, err = run(capsys, "eval", tiny_checkpoint, other, *columns, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["accuracy"] == wanted["accuracy"]
    assert found["log_loss"] == pytest.approx(wanted["log_loss"])
    assert found["best_of_n"]["prompts"] == 1
    code, out, err = run(capsys, "compare", tiny_checkpoint, tiny_checkpoint, other, *columns, "--json")
    assert code == 0, err
    assert json.loads(out)["models"][1]["log_loss"] == pytest.approx(wanted["log_loss"])
    source = save_classifier(tmp_path / "classifier")
    code, _, err = run(capsys, "calibrate", source, other, *columns)
    assert code == 0, err
    record = read_record(source)
    assert record is not None
    assert record.metrics["pairs"] == 4
    for command in ("eval", "calibrate"):
        code, _, err = run(capsys, command, tiny_checkpoint, other, "--column", "winner=win")
        assert (code, "write OURS=THEIRS" in err) == (2, True)


def test_eval_gives_the_numbers_of_the_checkpoint(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = write_rows(tmp_path / "eval.jsonl", text_rows(9, seed=5))
    run(capsys, "fit", config, "--set", f"run.output_dir={tmp_path}", "--set", f"data.eval=[{held_out}]")
    record = read_record(tmp_path / "tiny" / "checkpoint")
    assert record is not None
    out = run(capsys, "eval", tmp_path / "tiny" / "checkpoint", held_out, "--dtype", "float32", "--json")[1]
    report = json.loads(out)
    assert report["accuracy"] == record.metrics["accuracy"]
    assert report["reward"]["mean"] == pytest.approx(record.reward_mean, abs=1e-4)
    assert report["calibration"]["temperature"] == pytest.approx(record.temperature, rel=1e-3)


# ------------------------------------------------------------------ score

FORMS = [
    {"id": 1, "prompt": "What? ", "completions": ["A stone.", "None."]},
    {"prompt": "What? ", "completion": "A stone."},
    {"text": "What? A stone."},
    {"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A stone."}]},
]


def test_score_reads_a_file_or_standard_input(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", FORMS)
    code, out, err = run(capsys, "score", tiny_checkpoint, file, "--dtype", "float32")
    assert code == 0, err
    answers = [json.loads(line) for line in out.splitlines()]
    assert [sorted(answer) for answer in answers] == [["id", "line", "rewards"], *[["line", "reward"]] * 3]
    assert answers[0]["rewards"][0] == pytest.approx(answers[1]["reward"], abs=1e-4)
    assert answers[1]["reward"] == pytest.approx(answers[2]["reward"], abs=1e-4)
    stdin = io.TextIOWrapper(io.BytesIO(file.read_bytes()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run(capsys, "score", tiny_checkpoint, "-", "--dtype", "float32")[1] == out


def test_score_answers_the_good_rows_and_ends_with_1_when_one_is_broken(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n{broken\n{"text": "b"}\n')
    code, out, err = run(capsys, "score", tiny_checkpoint, file)
    assert code == 1
    answers = [json.loads(line) for line in out.splitlines()]
    assert ["reward" in answer for answer in answers] == [True, False, True]
    assert answers[1]["line"] == 2
    assert "Traceback" not in err


def test_line_ends_of_unicode_inside_a_text_do_not_end_a_row(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON allows U+2028, U+0085 and the like in a string as they are. A byte order mark and CRLF are no matter."""
    file = tmp_path / "rows.jsonl"
    rows = [{"text": "a\u2028b\u0085c"}, {"text": "e"}]
    text = "\ufeff" + "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    file.write_bytes(text.encode())
    code, out, _ = run(capsys, "score", tiny_checkpoint, file)
    assert code == 0
    assert len(out.splitlines()) == 2


# ------------------------------------------------------------------ merge


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_folder_gives_the_adapters_scores_in_plain_transformers(
    dtype: str, tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain transformers, each text alone, read at the last position; in bf16 within the checkpoint's own tolerance."""
    from transformers import AutoModelForSequenceClassification

    output = tmp_path / "merged"
    code, out, err = run(capsys, "merge", tiny_checkpoint, output, "--dtype", dtype)
    assert code == 0, err
    record = read_record(output)
    assert record is not None
    assert record.kind == "model"
    assert record.reward_id in out
    assert "golden scores differ by at most" in out
    old = RewardModel.load(str(tiny_checkpoint), dtype="float32")
    assert old.record is not None
    assert record.data["merged_from"] == old.reward_id
    assert record.training_length == old.record.training_length
    assert record.rules == old.record.rules
    tolerance = 1e-4 if dtype == "float32" else old.record.golden.tolerance["bfloat16"]
    for score, expected in zip(record.golden.scores, old.record.golden.scores, strict=True):
        assert score.ids_sha256 == expected.ids_sha256
        assert score.reward == pytest.approx(expected.reward, abs=tolerance)

    plain = AutoModelForSequenceClassification.from_pretrained(output, dtype=torch.float32).eval()
    merged = RewardModel.load(str(output), dtype="float32")
    for row in chat_rows(5):
        ids = old.renderer.render_conversation([*row["prompt"], *row["chosen"]])
        with torch.no_grad():
            hidden = plain.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
            reward = float(plain.score(hidden)[0])
        assert reward == pytest.approx(float(old.score_ids([ids])[0]), abs=tolerance)
        assert float(merged.score_ids([ids])[0]) == pytest.approx(reward, abs=1e-4)


def test_merge_that_moves_a_golden_score_writes_nothing(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge that comes out wrong: the weights that were written are not those of the adapter."""
    original = RewardModel.save_weights

    def spoiled(self: RewardModel, directory: Path) -> None:
        with torch.no_grad():
            self.network.head.weight.mul_(1.5)
        original(self, directory)

    monkeypatch.setattr(RewardModel, "save_weights", spoiled)
    code, _, err = run(capsys, "merge", tiny_checkpoint, tmp_path / "merged")
    assert code == 2
    assert "a golden score moves by" in err
    assert "nothing was written" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["merge", "calibrate"])
def test_existing_directory_is_never_written_over(
    command: str, tiny_checkpoint: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.txt").write_text("years of work")
    source = shutil.copytree(tiny_checkpoint, tmp_path / "source")
    targets = [taken] if command == "calibrate" else [taken, source]
    for target in targets:
        where = [target] if command == "merge" else [pairs, "--output", target]
        code, _, err = run(capsys, command, source, *where)
        assert code == 2
        assert "exists already" in err
    assert (taken / "thesis.txt").read_text() == "years of work"
    assert read_record(source) == read_record(tiny_checkpoint)


# ------------------------------------------------------------------ calibrate


def by_hand(model: RewardModel, rows: list[dict[str, Any]]) -> np.ndarray:
    """Rewards of plain-text pairs whose ends are what the renderer says."""
    texts = [row["prompt"] + row[side] for row in rows for side in ("chosen", "rejected")]
    return np.array([float(model.score_ids([model.renderer.render_text(text)])[0]) for text in texts])


@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "output"])
def test_calibrate_adopts_a_classifier_of_plain_transformers(
    in_place: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = text_rows(6)
    pairs = write_rows(tmp_path / "pairs.jsonl", rows)
    source = save_classifier(tmp_path / "classifier")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    output = [] if in_place else ["--output", tmp_path / "adopted"]
    code, out, err = run(capsys, "calibrate", source, pairs, *output, "--training-length", 99)
    assert code == 0, err
    directory = source if in_place else tmp_path / "adopted"
    assert str(directory) in out
    record = read_record(directory)
    assert record is not None
    assert record.kind == "model"
    assert record.training_length == 99
    assert record.rules.end == "template"
    after = {path.name: path.read_bytes() for path in source.iterdir() if path.name != "reward_model.json"}
    assert after == before
    assert (source / "reward_model.json").exists() == in_place

    model = RewardModel.load(str(directory), dtype="float32")
    rewards = by_hand(model, rows)
    assert record.reward_mean == pytest.approx(rewards.mean(), abs=1e-4)
    assert record.reward_std == pytest.approx(rewards.std(), abs=1e-4)
    assert record.num_eval == 12
    spoil_head(directory)
    with pytest.raises(CheckpointError, match="head"):
        RewardModel.load(str(directory), dtype="float32")


@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "output"])
def test_calibrate_adopts_an_adapter_of_plain_peft(
    in_place: bool, tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(1)
    plain = AutoModelForSequenceClassification.from_pretrained(tiny_base, num_labels=1, dtype=torch.float32)
    options = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    plain = get_peft_model(plain, options)
    source = tmp_path / "adapter"
    plain.save_pretrained(source)
    rows = text_rows(6)
    pairs = write_rows(tmp_path / "pairs.jsonl", rows)
    output = [] if in_place else ["--output", tmp_path / "adopted"]
    code, _, err = run(capsys, "calibrate", source, pairs, *output, "--end", "token")
    assert code == 0, err
    directory = source if in_place else tmp_path / "adopted"
    record = read_record(directory)
    assert record is not None
    assert record.kind == "adapter"
    assert record.base_model.name == str(tiny_base)
    assert record.rules.end == "token"

    model = RewardModel.load(str(directory), dtype="float32")
    rewards = by_hand(model, rows)
    assert record.reward_mean == pytest.approx(rewards.mean(), abs=1e-4)
    inner = plain.get_base_model().eval()
    ids = model.renderer.render_text(rows[0]["prompt"] + rows[0]["chosen"])
    with torch.no_grad():
        hidden = inner.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
        assert rewards[0] == pytest.approx(float(inner.score(hidden)[0]), abs=1e-4)
    spoil_head(directory)
    with pytest.raises(CheckpointError, match="head"):
        RewardModel.load(str(directory), dtype="float32")


def test_calibrate_of_a_checkpoint_of_ours_keeps_what_defines_its_reward(
    tiny_checkpoint: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """New scale and temperature; rules, id, training length and golden scores stay, unless other rules are asked for."""
    source = shutil.copytree(tiny_checkpoint, tmp_path / "source")
    assert run(capsys, "calibrate", source, pairs)[0] == 0
    old, new = read_record(tiny_checkpoint), read_record(source)
    assert old is not None
    assert new is not None
    for name in ("reward_id", "rules", "training_length", "numerics"):
        assert getattr(new, name) == getattr(old, name), name
    assert new.num_eval == 2 * len(pairs.read_text().splitlines())
    assert new.data["calibrated_on"] == [str(pairs)]
    assert run(capsys, "calibrate", source, pairs, "--end", "template")[0] == 0
    other = read_record(source)
    assert other is not None
    assert other.rules.end == "template"


def spoil_head(directory: Path) -> None:
    """Add one thousandth to every weight of the head."""
    from safetensors.torch import load_file, save_file

    file = next(iter(sorted(directory.glob("*.safetensors"))))
    tensors = load_file(file)
    for name in tensors:
        if "score" in name:
            tensors[name] = tensors[name] + 1e-3
    save_file(tensors, file, metadata={"format": "pt"})
