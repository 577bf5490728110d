"""A run that was killed goes on to the very bits of the unbroken one, and refuses to go on as another run."""

import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import rm_train.fit as fit_module
from rm_train import run_directory
from rm_train import state as state_module
from rm_train.fit import fit
from rm_train.run_directory import RunError
from rm_train.state import STATE_FILE, MetricsFile, ResumeError
from tests.conftest import save_base
from tests.train.runs import (
    RUN_FILES,
    Killed,
    Quiet,
    assert_same_run,
    kill_at,
    make_config,
    metric_lines,
    text_rows,
    write_rows,
)

# Dropout, evaluations, epochs of a short last step, warm-up and a schedule: all that has a state of its own.
SETTINGS: dict[str, Any] = {
    "batch_size": 4,
    "epochs": 3,
    "save_every": 2,
    "eval_every": 3,
    "warmup_ratio": 0.2,
    "schedule": "cosine",
    "weight_decay": 0.1,
    "early_stopping_patience": 50,
}
STEPS = 9
"""Three epochs of ten pairs in steps of four."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("data")
    held_out = write_rows(directory / "eval.jsonl", text_rows(5, seed=1))
    return write_rows(directory / "train.jsonl", text_rows(10)), held_out


def config_in(directory: Path, base: Path, data: tuple[Path, Path], **sections: Any) -> Any:
    lora = sections.pop("lora", {"dropout": 0.3})
    return make_config(base, directory, *data, lora=lora, train={**SETTINGS, **sections.pop("train", {})}, **sections)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path, data: tuple[Path, Path]) -> Path:
    result = fit(config_in(tmp_path_factory.mktemp("unbroken"), tiny_base, data), Quiet())
    assert result.steps == STEPS
    return result.directory


@pytest.mark.parametrize("kills", [[3], [5, 8], [4, 9], [9]], ids=str)
def test_killed_run_resumes_to_the_same_bits(
    kills: list[int], unbroken: Path, tiny_base: Path, data: tuple[Path, Path], tmp_path: Path
) -> None:
    """Killed once or twice: between saves, at one, and at the last step."""
    config = config_in(tmp_path, tiny_base, data)
    for number, step in enumerate(kills):
        with pytest.raises(Killed):
            fit(config, kill_at(step), resume=number > 0)
    result = fit(config, Quiet(), resume=True)
    assert result.steps == STEPS
    assert_same_run(result.directory, unbroken)


def test_saving_changes_nothing(unbroken: Path, tiny_base: Path, data: tuple[Path, Path], tmp_path: Path) -> None:
    result = fit(config_in(tmp_path, tiny_base, data, train={"save_every": None}), Quiet())
    assert not (result.directory / STATE_FILE).exists()
    assert_same_run(result.directory, unbroken)


def test_full_fine_tuning_resumes_to_the_same_bits(tiny_base: Path, data: tuple[Path, Path], tmp_path: Path) -> None:
    whole = fit(config_in(tmp_path / "whole", tiny_base, data, lora=None), Quiet())
    config = config_in(tmp_path / "killed", tiny_base, data, lora=None)
    with pytest.raises(Killed):
        fit(config, kill_at(5))
    assert_same_run(fit(config, Quiet(), resume=True).directory, whole.directory)


def test_early_stopping_remembers_its_best_weights(
    tiny_base: Path, data: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations at 3, 6, 9 get worse; the kill at 8 lies between, so the best is known from the saved state alone."""

    def worse_every_time() -> Any:
        losses = iter([1.0, 2.0, 3.0])
        return lambda rewards, pairs: {"loss": next(losses), "accuracy": 0.5, "margin": 0.0}

    train = {"early_stopping_patience": 5}
    monkeypatch.setattr(fit_module, "quick_metrics", worse_every_time())
    whole = fit(config_in(tmp_path / "whole", tiny_base, data, train=train), Quiet())
    config = config_in(tmp_path / "killed", tiny_base, data, train=train)
    monkeypatch.setattr(fit_module, "quick_metrics", worse_every_time())
    with pytest.raises(Killed):
        fit(config, kill_at(8))
    # the state is that of step 8, or of 6 with its evaluation still to come
    seen = sum("eval_loss" in line for line in metric_lines(tmp_path / "killed" / "runs" / "run"))
    state = torch.load(tmp_path / "killed" / "runs" / "run" / STATE_FILE, weights_only=True)
    assert (seen, state["step"], state["best"]["step"]) == (2, 6, 3)
    losses = iter([2.0, 3.0])
    monkeypatch.setattr(
        fit_module, "quick_metrics", lambda rewards, pairs: {"loss": next(losses), "accuracy": 0.5, "margin": 0.0}
    )
    assert_same_run(fit(config, Quiet(), resume=True).directory, whole.directory)


# ------------------------------------------------------------------ refusals


@pytest.fixture
def killed(tiny_base: Path, data: tuple[Path, Path], tmp_path: Path) -> Path:
    """A run directory with the state of step 4."""
    with pytest.raises(Killed):
        fit(config_in(tmp_path, tiny_base, data), kill_at(5))
    return tmp_path / "runs" / "run"


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"train": {"batch_size": 5}}, "train.batch_size was 4 and is now 5"),
        ({"run": {"seed": 1}}, "run.seed was 0 and is now 1"),
        ({"train": {"learning_rate": 0.5}}, "train.learning_rate was 0.001 and is now 0.5"),
        ({"lora": None}, "lora"),
        ({"model": {"dtype": "bfloat16"}}, "model.dtype was 'float32' and is now 'bfloat16'"),
    ],
)
def test_resume_as_another_run_is_refused_with_the_difference(
    sections: dict[str, Any], named: str, killed: Path, tiny_base: Path, data: tuple[Path, Path], tmp_path: Path
) -> None:
    before = {path.name: path.read_bytes() for path in killed.iterdir()}
    with pytest.raises(ResumeError) as caught:
        fit(config_in(tmp_path, tiny_base, data, **sections), Quiet(), resume=True)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in killed.iterdir()} == before, "the refused run left traces"


def test_resume_on_other_data_is_refused(
    killed: Path, tiny_base: Path, data: tuple[Path, Path], tmp_path: Path
) -> None:
    """The same file name, one word changed."""
    path = tmp_path / "train.jsonl"
    config = config_in(tmp_path, tiny_base, (path, data[1]))
    write_rows(path, text_rows(10))
    with pytest.raises(Killed):
        fit(config, kill_at(5), overwrite=True)
    rows = text_rows(10)
    rows[7]["rejected"] += " indeed"
    write_rows(path, rows)
    with pytest.raises(ResumeError, match=r"data fingerprint \(train\) was 'sha256:"):
        fit(config, Quiet(), resume=True)


def test_resume_without_a_state_says_what_to_do(tiny_base: Path, data: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match=r"no state to resume from.*train\.save_every"):
        fit(config_in(tmp_path, tiny_base, data), Quiet(), resume=True)


def test_unfinished_run_is_not_thrown_away_unless_asked(
    killed: Path, unbroken: Path, tiny_base: Path, data: tuple[Path, Path], tmp_path: Path
) -> None:
    config = config_in(tmp_path, tiny_base, data)
    before = {path.name: path.read_bytes() for path in killed.iterdir()}
    with pytest.raises(RunError) as caught:
        fit(config, Quiet())
    assert str(caught.value) == (
        f"{killed}: holds the state of an unfinished run; --resume goes on with it, --overwrite starts again"
    )
    assert {path.name: path.read_bytes() for path in killed.iterdir()} == before
    assert_same_run(fit(config, Quiet(), overwrite=True).directory, unbroken)
    assert_same_run(fit(config, Quiet()).directory, unbroken)  # a finished run is replaced as ever


def test_state_of_a_run_killed_while_its_last_checkpoint_was_written_is_kept(
    tiny_base: Path, data: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older checkpoint of that name does not make it a finished run."""
    config = config_in(tmp_path, tiny_base, data)
    fit(config, Quiet())
    with monkeypatch.context() as patch:
        patch.setattr(fit_module, "write_checkpoint", lambda *args, **options: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            fit(config, Quiet())
    with pytest.raises(RunError, match="unfinished run"):
        fit(config, Quiet())


def test_resume_with_other_base_weights_torch_or_threads_is_refused(
    data: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same path, other weights; and what the last bits depend on."""
    base = save_base(tmp_path / "base")
    config = config_in(tmp_path, base, data)
    with pytest.raises(Killed):
        fit(config, kill_at(5))
    threads = torch.get_num_threads()
    for name, value, named in (
        ("get_num_threads", lambda: threads + 3, f"number of threads was {threads} and is now {threads + 3}"),
        ("__version__", "9.9", f"version of torch was {str(torch.__version__)!r} and is now '9.9'"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(torch, name, value)
            with pytest.raises(ResumeError, match=re.escape(named)):
                fit(config, Quiet(), resume=True)
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ResumeError, match=r"base weights was 'sha256:\w+' and is now 'sha256:"):
        fit(config, Quiet(), resume=True)


def test_data_may_move_before_a_run_is_resumed(
    killed: Path, unbroken: Path, tiny_base: Path, data: tuple[Path, Path], tmp_path: Path
) -> None:
    moved = [shutil.copy(path, tmp_path / f"moved-{path.name}") for path in data]
    config = config_in(tmp_path, tiny_base, (moved[0], moved[1]))
    assert_same_run(fit(config, Quiet(), resume=True).directory, unbroken)


def test_run_that_saves_no_states_says_so(tiny_base: Path, data: tuple[Path, Path], tmp_path: Path) -> None:
    said = "train.save_every is null: no state is saved, so this run cannot be resumed"
    for every in (None, 2):
        config, reporter = config_in(tmp_path / str(every), tiny_base, data, train={"save_every": every}), kill_at(1)
        with pytest.raises(Killed):
            fit(config, reporter)
        assert (said in reporter.said) == (every is None)


def test_run_may_move_before_it_is_resumed(
    killed: Path, unbroken: Path, tiny_base: Path, data: tuple[Path, Path], tmp_path: Path
) -> None:
    target = tmp_path / "elsewhere" / "renamed"
    target.parent.mkdir()
    killed.rename(target)
    run = {"name": "renamed", "output_dir": str(tmp_path / "elsewhere")}
    assert_same_run(fit(config_in(tmp_path, tiny_base, data, run=run), Quiet(), resume=True).directory, unbroken)


# ------------------------------------------------------------------ files


def test_full_disk_while_saving_leaves_the_old_state_whole(
    killed: Path,
    unbroken: Path,
    tiny_base: Path,
    data: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """/dev/full takes the place of the temporary file: every write to it fails as on a full disk."""
    before = (killed / STATE_FILE).read_bytes()
    config = config_in(tmp_path, tiny_base, data)
    with monkeypatch.context() as patch:
        patch.setattr(fit_module, "clear_leftovers", lambda directory: None)
        (killed / f".{STATE_FILE}.tmp").symlink_to("/dev/full")
        with pytest.raises(OSError, match="No space left"):
            fit(config, Quiet(), resume=True)
    assert (killed / STATE_FILE).read_bytes() == before
    assert not (killed / f".{STATE_FILE}.tmp").is_symlink()
    assert_same_run(fit(config, Quiet(), resume=True).directory, unbroken)


def test_damaged_state_is_named(killed: Path, tiny_base: Path, data: tuple[Path, Path], tmp_path: Path) -> None:
    (killed / STATE_FILE).write_bytes((killed / STATE_FILE).read_bytes()[:1000])
    with pytest.raises(ResumeError, match=r"resume\.pt: cannot be read .*start again with --overwrite") as caught:
        fit(config_in(tmp_path, tiny_base, data), Quiet(), resume=True)
    assert "\n" not in str(caught.value)


def test_seconds_go_on_counting_after_a_resume(
    killed: Path, tiny_base: Path, data: tuple[Path, Path], tmp_path: Path
) -> None:
    state = torch.load(killed / STATE_FILE, weights_only=True)
    assert state["seconds"] > 0
    torch.save({**state, "seconds": 1000.0}, killed / STATE_FILE)
    fit(config_in(tmp_path, tiny_base, data), Quiet(), resume=True)
    seconds = [line["seconds"] for line in metric_lines(killed, wall_clock=True) if "seconds" in line]
    assert all(later > 1000 for later in seconds[state["step"] :])


def test_kill_while_saving_leaves_the_old_state_whole(
    killed: Path,
    unbroken: Path,
    tiny_base: Path,
    data: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of the new state is on the disk when the kill comes."""
    config = config_in(tmp_path, tiny_base, data)
    with monkeypatch.context() as patch:

        def half(state: Any, file: Any) -> None:
            file.write(b"half a state")
            raise Killed

        patch.setattr(state_module.torch, "save", half)
        with pytest.raises(Killed):
            fit(config, Quiet(), resume=True)
    assert_same_run(fit(config, Quiet(), resume=True).directory, unbroken)


def test_full_disk_while_writing_the_checkpoint_leaves_the_old_one(
    unbroken: Path, tiny_base: Path, data: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rm_core.checkpoint as checkpoint_module

    config = config_in(tmp_path, tiny_base, data)
    first = fit(config, Quiet()).directory / "checkpoint"
    before = {path.name: path.read_bytes() for path in first.iterdir()}

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "write_record", full)
        with pytest.raises(OSError, match="No space left"):
            fit(config, Quiet())
    assert {path.name: path.read_bytes() for path in first.iterdir()} == before
    found = sorted(path.name for path in first.parent.iterdir())
    left = {*RUN_FILES, STATE_FILE} - {"evaluation.jsonl"}  # that of the first run would be taken for this one's
    assert found == sorted(left), "no half-written directory stays behind"
    # training was done: its last saved state is enough to finish
    assert_same_run(fit(config, Quiet(), resume=True).directory, unbroken)


def test_metrics_that_are_shorter_than_the_state_says_are_refused(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write({"step": 1})
    with pytest.raises(ResumeError, match="missing"):
        metrics.cut(1000)
    metrics.cut(0)
    assert metrics.position() == 0


# ------------------------------------------------------------------ a real kill


@pytest.mark.slow
def test_processes_killed_at_random_moments_resume_to_the_same_bits(tiny_base: Path, tmp_path: Path) -> None:
    """kill -9 and the command line; ``scripts/kill_and_resume.py --kills 20`` does it more often."""
    path = Path(__file__).resolve().parents[2] / "scripts" / "kill_and_resume.py"
    spec = importlib.util.spec_from_file_location("kill_and_resume", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    result = script.prove(str(tiny_base), 3, 0, tmp_path)
    assert [outcome["wrong"] for outcome in result["outcomes"]] == [[], [], []]


# ------------------------------------------------------------------ two runs, and none saved yet


def test_second_fit_into_a_directory_in_use_is_refused(
    tiny_base: Path, data: tuple[Path, Path], tmp_path: Path
) -> None:
    """The second begins while the first trains; the first goes on undisturbed."""
    config = config_in(tmp_path, tiny_base, data)
    refusals = []

    def start_another(fraction: float, text: str) -> None:
        if text.startswith("step 2/"):
            with pytest.raises(RunError) as caught:
                fit(config, Quiet())
            refusals.append(str(caught.value))

    result = fit(config, Quiet(start_another))
    assert result.steps == STEPS
    assert refusals == [
        f"{result.directory}: another process is training into it; wait for it, or choose another run.name"
    ]
    assert not [path for path in result.directory.iterdir() if "lock" in path.name]
    assert fit(config, Quiet(), resume=True).steps == STEPS, "the lock ends with the run"


def test_resume_of_a_run_killed_before_its_first_save_starts_over_and_says_so(
    unbroken: Path, tiny_base: Path, data: tuple[Path, Path], tmp_path: Path
) -> None:
    config = config_in(tmp_path, tiny_base, data)
    with pytest.raises(Killed):
        fit(config, kill_at(1))
    assert not (tmp_path / "runs" / "run" / STATE_FILE).exists()
    reporter = Quiet()
    assert_same_run(fit(config, reporter, resume=True).directory, unbroken)
    assert [text for text in reporter.said if text.startswith("resume: ")] == [
        f"resume: {tmp_path / 'runs' / 'run'} was stopped before its first saved state, so it starts from the beginning"
    ]


def test_resume_of_a_finished_run_without_states_is_refused(
    tiny_base: Path, data: tuple[Path, Path], tmp_path: Path
) -> None:
    """It would train everything again; but a later run of that name that was killed at once may start over."""
    config = config_in(tmp_path, tiny_base, data, train={"save_every": None})
    fit(config, Quiet())
    with pytest.raises(ResumeError, match="no state to resume from"):
        fit(config, Quiet(), resume=True)
    with pytest.raises(Killed):
        fit(config, kill_at(1))
    assert fit(config, Quiet(), resume=True).steps == STEPS


def test_leftovers_of_a_kill_while_the_checkpoint_was_written_are_cleared(
    unbroken: Path, tiny_base: Path, data: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the two renames: the old checkpoint lies aside, the new one under a temporary name."""
    config = config_in(tmp_path, tiny_base, data)
    run = fit(config, Quiet()).directory
    (run / ".checkpoint-old-x").mkdir()
    (run / "checkpoint").rename(run / ".checkpoint-old-x" / "checkpoint")
    (run / ".checkpoint-y").mkdir()
    (run / ".checkpoint-y" / "half.safetensors").write_bytes(b"half")
    run_directory.clear_leftovers(run)
    assert_same_run(run, unbroken)
    assert sorted(path.name for path in run.iterdir()) == [*RUN_FILES, STATE_FILE]
    (run / ".checkpoint-z").mkdir()
    assert_same_run(fit(config, Quiet(), resume=True).directory, unbroken)
    assert sorted(path.name for path in run.iterdir()) == [*RUN_FILES, STATE_FILE]


def test_full_disk_while_the_run_begins_leaves_an_earlier_run_whole(
    unbroken: Path, tiny_base: Path, data: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/full takes the place of the temporary file."""
    config = config_in(tmp_path, tiny_base, data)
    run = fit(config, Quiet()).directory
    before = (run / "config.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(fit_module, "clear_leftovers", lambda directory: None)
        (run / ".config.json.tmp").symlink_to("/dev/full")
        with pytest.raises(OSError, match="No space left"):
            fit(config, Quiet())
    assert (run / "config.json").read_bytes() == before
    assert_same_run(fit(config, Quiet(), resume=True).directory, unbroken)
