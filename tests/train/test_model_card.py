"""The model card: its code gives the checkpoint's own scores, its numbers are the record's; and pushing it."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from rm_core.checkpoint import read_record, write_checkpoint
from rm_core.model import RewardModel
from rm_core.model_card import model_card
from rm_train.fit import fit
from tests.conftest import byte_tokenizer, save_base
from tests.train.runs import Quiet, make_config, text_rows, write_rows
from tests.train.test_cli import run


def run_card(card: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> float:
    """Run the card's Python as a reader would, with the folder put in the place of its name."""
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    code = code.replace('"CHECKPOINT"', repr(str(checkpoint))).replace('"content": "…"}, {', '"content": "Why?"}, {')
    names: dict[str, Any] = {}
    exec(compile(code.replace('"…"', '"Because."'), "card", "exec"), names)
    capsys.readouterr()
    return float(names["reward"])


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_code_of_an_adapters_card_gives_its_score(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = RewardModel.load(str(tiny_checkpoint), dtype="float32")
    card = (tiny_checkpoint / "README.md").read_text(encoding="utf-8")
    ids = model.renderer.render([{"role": "user", "content": "Why?"}], "Because.")
    assert run_card(card, tiny_checkpoint, capsys) == pytest.approx(float(model.score_ids([ids])[0]), abs=1e-4)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_code_of_a_merged_models_card_gives_its_score(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "merge", tiny_checkpoint, tmp_path / "merged")[0] == 0
    model = RewardModel.load(str(tiny_checkpoint), dtype="float32")
    card = (tmp_path / "merged" / "README.md").read_text(encoding="utf-8")
    ids = model.renderer.render([{"role": "user", "content": "Why?"}], "Because.")
    assert run_card(card, tmp_path / "merged", capsys) == pytest.approx(float(model.score_ids([ids])[0]), abs=1e-4)
    assert "library_name: transformers" in card


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_code_of_a_card_without_a_template_scores_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_base(tmp_path / "base", tokenizer=byte_tokenizer(None))
    model = RewardModel.for_training(str(base), lora=None, seed=0, dtype="float32", device="cpu", head_init_scale=1.0)
    write_checkpoint(model, tmp_path / "checkpoint", training_length=64)
    loaded = RewardModel.load(str(tmp_path / "checkpoint"), dtype="float32")
    ids = loaded.renderer.render("Because.", "Because.")
    card = (tmp_path / "checkpoint" / "README.md").read_text(encoding="utf-8")
    found = run_card(card, tmp_path / "checkpoint", capsys)
    assert found == pytest.approx(float(loaded.score_ids([ids])[0]), abs=1e-4)


def test_card_of_a_run_says_what_was_measured_and_the_rules(tiny_base: Path, tmp_path: Path) -> None:
    pairs = write_rows(
        tmp_path / "pairs.jsonl", [{**row, "category": f"c|{i % 2}"} for i, row in enumerate(text_rows(9))]
    )
    held_out = write_rows(
        tmp_path / "eval.jsonl", [{**row, "category": f"c|{i % 2}"} for i, row in enumerate(text_rows(6, 3))]
    )
    result = fit(make_config(tiny_base, tmp_path, pairs, held_out, train={"max_steps": 2}), Quiet())
    card = (result.directory / "checkpoint" / "README.md").read_text(encoding="utf-8")
    record = result.record
    assert record is not None
    accuracy = record.metrics["accuracy"]
    for words in (
        record.reward_id,
        f"{accuracy['value']:.3f} (95 % interval {accuracy['low']:.3f} to {accuracy['high']:.3f})",
        f"temperature | {record.temperature:.4g}",
        "| the longer answer wins |",
        "`<\\|im_end\\|>`",  # a bar in a table is escaped, in code too
        "raw logit",
        "| c\\|0 |",
        "128 tokens",
        "training pairs | 9",
    ):
        assert words in card, words


# ------------------------------------------------------------------ push


class FakeHub:
    """Stands for ``huggingface_hub.HfApi``: remembers what it was asked."""

    calls: list[tuple[str, dict[str, Any]]] = []  # noqa: RUF012
    error: Exception | None = None

    def __init__(self, **options: Any) -> None:
        pass

    def _note(self, name: str, **values: Any) -> Any:
        if self.error is not None and name == "upload":
            raise self.error
        FakeHub.calls.append((name, values))

        class Commit:
            commit_url = "https://hub.example/me/rm/commit/abc"

        return Commit

    def create_repo(self, repository: str, **options: Any) -> Any:
        return self._note("create", repository=repository, **options)

    def create_branch(self, repository: str, **options: Any) -> Any:
        return self._note("branch", repository=repository, **options)

    def upload_folder(self, **options: Any) -> Any:
        files = sorted(path.name for path in Path(options["folder_path"]).iterdir())
        return self._note("upload", files=files, **options)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[FakeHub]:
    monkeypatch.setattr("huggingface_hub.HfApi", FakeHub)
    monkeypatch.setattr(FakeHub, "calls", [])
    monkeypatch.setattr(FakeHub, "error", None)
    return FakeHub


@pytest.fixture
def merged(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert run(capsys, "merge", tiny_checkpoint, tmp_path / "merged")[0] == 0
    return tmp_path / "merged"


def test_push_uploads_the_verified_folder(merged: Path, hub: type[FakeHub], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "push", merged, "me/rm", "--private", "--branch", "v2")
    assert (code, out) == (0, "https://hub.example/me/rm/commit/abc\n"), err
    names = [name for name, _ in hub.calls]
    assert names == ["create", "branch", "upload"]
    assert hub.calls[0][1] == {"repository": "me/rm", "private": True, "exist_ok": True}
    uploaded = hub.calls[-1][1]
    assert {"README.md", "reward_model.json", "model.safetensors", "tokenizer.json"} <= set(uploaded["files"])
    assert (uploaded["repo_id"], uploaded["revision"]) == ("me/rm", "v2")


def test_push_refuses_what_was_changed_or_cannot_be_loaded_elsewhere(
    merged: Path, tiny_checkpoint: Path, tmp_path: Path, hub: type[FakeHub], capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads((merged / "reward_model.json").read_text())
    record["golden"]["scores"][0]["reward"] += 1
    (merged / "reward_model.json").write_text(json.dumps(record))
    for folder, words in (
        (merged, "golden conversation"),
        (tiny_checkpoint, "is a folder of this machine; push a whole model made by rm-train merge"),
        (tmp_path, "is no checkpoint folder"),
    ):
        code, _, err = run(capsys, "push", folder, "me/rm")
        assert (code, err.count("\n")) == (2, 1), err
        assert words in err
    assert hub.calls == []


def test_push_takes_a_folder_named_like_a_hub_id_for_the_folder_it_is(
    tiny_checkpoint: Path,
    tiny_base: Path,
    tmp_path: Path,
    hub: type[FakeHub],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`models/base` beside the run would mean somebody else's model to everyone else."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_base, tmp_path / "models" / "base")
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "adapter")
    values = json.loads((folder / "reward_model.json").read_text())
    values["base_model"]["name"] = "models/base"
    (folder / "reward_model.json").write_text(json.dumps(values))
    code, _, err = run(capsys, "push", folder, "me/rm")
    assert code == 2
    assert "its base models/base is a folder of this machine" in err
    assert hub.calls == []


def test_refusal_of_the_hub_is_one_line(
    merged: Path, hub: type[FakeHub], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub.errors import HFValidationError

    monkeypatch.setattr(hub, "error", HFValidationError("Repo id must be\nof another form"))
    code, _, err = run(capsys, "push", merged, "me/rm")
    assert (code, err) == (2, "rm-train: error: me/rm: the hub refused: Repo id must be\n")


def test_adapter_whose_base_is_on_a_hub_may_be_pushed_and_gets_its_card(
    tiny_checkpoint: Path,
    tmp_path: Path,
    hub: type[FakeHub],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(tiny_checkpoint, folder)
    (folder / "README.md").unlink()
    record = read_record(folder)
    assert record is not None
    local = record.base_model.name
    values = json.loads((folder / "reward_model.json").read_text())
    values["base_model"] = {"name": "owner/base", "revision": None}
    (folder / "reward_model.json").write_text(json.dumps(values))
    import rm_core.model as model_module

    real = model_module.locate
    monkeypatch.setattr(
        model_module, "locate", lambda name, revision=None: real(local if name == "owner/base" else name, revision)
    )
    code, _, err = run(capsys, "push", folder, "me/rm")
    assert code == 0, err
    assert "README.md" in hub.calls[-1][1]["files"]
    assert "base_model: owner/base" in model_card(read_record(folder))  # type: ignore[arg-type]
