"""What went wrong in other trainers, each with the small input that shows it: data, loss and metrics."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rm_client.bradley_terry import bradley_terry_loss
from rm_core.model import RewardModel
from rm_train.check import CheckInput, examine
from rm_train.config import SourceConfig
from rm_train.data import load_fit_data, prompt_key, read_pairs
from rm_train.encode import count_truncated, encode_pairs
from rm_train.fit import fit
from rm_train.metrics import accuracy
from tests.conftest import save_base
from tests.train.runs import Quiet, make_config, metric_lines, text_rows, write_rows
from tests.train.test_cli import run


def test_pair_of_1100_tokens_at_a_limit_of_1024_is_kept_cut_and_counted(tmp_path: Path) -> None:
    """Elsewhere it vanishes, from evaluation too, and nobody is told. The answer's end must survive."""
    base = save_base(tmp_path / "base", max_position_embeddings=2048)
    model = RewardModel.for_training(str(base), lora={"r": 2}, seed=0, dtype="float32", device="cpu")
    answer = "good" + "!" * 95
    rows = [*text_rows(3), {"prompt": "p" * 1000, "chosen": answer, "rejected": "bad" + "!" * 96}]
    file = write_rows(tmp_path / "pairs.jsonl", rows)
    encoded = encode_pairs(list(read_pairs(str(file))), model.renderer, 1024)
    assert len(model.renderer.render("p" * 1000, answer)) == 1100
    assert (len(encoded), count_truncated(encoded)) == (4, 1)
    assert [len(encoded[3].chosen), len(encoded[3].rejected)] == [1024, 1024]
    assert encoded[3].chosen[-100:] == model.renderer.render_text(answer)[-100:]
    report = examine(CheckInput([SourceConfig(path=str(file))], model=str(base), max_length=1024))
    finding = report.finding("over_long")
    assert finding is not None
    assert (finding.locations, finding.examples[0].note) == ([f"{file}:4"], "1100 tokens")
    reporter = Quiet()
    config = make_config(base, tmp_path, file, file, model={"max_length": 1024}, train={"max_steps": 1})
    result = fit(config, reporter)
    assert result.record is not None
    assert (result.record.metrics["pairs"], result.record.metrics["truncated"]) == (4, 1)
    assert any("evaluation: 1 of 4 pairs are over 1024 tokens" in text for text in reporter.said)


def test_identical_answers_count_one_half(tiny_checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    assert accuracy([1.0, 2.0, 0.0], [1.0, 1.0, 1.0]) == 0.5
    rows = [{"prompt": "q? ", "chosen": "the same", "rejected": "the same"}] * 3
    report = json.loads(run(capsys, "eval", tiny_checkpoint, write_rows(tmp_path / "ties.jsonl", rows), "--json")[1])
    assert report["accuracy"]["value"] == 0.5
    assert report["longer_wins"] == 0.5


def test_accuracy_is_never_shown_without_longer_wins(tiny_checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    """A set where length alone is always right."""
    rows = [{"prompt": f"{n}? ", "chosen": "long answer", "rejected": "short"} for n in range(4)]
    file = write_rows(tmp_path / "pairs.jsonl", rows)
    lines = run(capsys, "eval", tiny_checkpoint, file)[1].splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("accuracy "))
    assert lines[place + 1].split() == ["longer", "wins", "1.000"]
    assert "the longer wins" in run(capsys, "check", file)[1]


def test_format_is_judged_row_by_row(tiny_model: RewardModel, tmp_path: Path) -> None:
    """Row 1 is text, row 2 messages, row 3 K-wise: each becomes what it would be alone."""
    talk = [{"role": "user", "content": "q"}]
    rows: list[dict[str, Any]] = [
        {"prompt": "q ", "chosen": "yes", "rejected": "no"},
        {
            "prompt": talk,
            "chosen": [{"role": "assistant", "content": "yes"}],
            "rejected": [{"role": "assistant", "content": "no"}],
        },
        {"prompt": talk, "completions": ["yes", "no"], "ranks": [1, 2]},
    ]
    pairs = list(read_pairs(str(write_rows(tmp_path / "mixed.jsonl", rows))))
    text, messages, ranked = encode_pairs(pairs, tiny_model.renderer, 128)
    assert text.chosen == tiny_model.renderer.render_text("q yes")
    assert messages.chosen == ranked.chosen == tiny_model.renderer.render(talk, "yes")
    assert text.chosen != messages.chosen


def test_evaluation_split_never_shares_a_prompt_and_leaks_are_reported(tiny_base: Path, tmp_path: Path) -> None:
    """Two pairs to each prompt; one of them repeats it in other case and spacing."""
    rows = text_rows(10)
    again = [{**row, "prompt": f"  {row['prompt'].upper()}\n", "chosen": row["chosen"] + "!"} for row in rows]
    file = write_rows(tmp_path / "pairs.jsonl", [*rows, *again])
    data = load_fit_data(make_config(tiny_base, tmp_path, file, data={"eval_fraction": 0.3}).data, 0)
    trained, held_out = ({prompt_key(pair) for pair in side} for side in (data.train, data.eval))
    assert (len(trained) + len(held_out), trained & held_out, data.leaks) == (10, set(), [])
    one, other = write_rows(tmp_path / "train.jsonl", rows), write_rows(tmp_path / "eval.jsonl", again[:4])
    reporter = Quiet()
    fit(make_config(tiny_base, tmp_path, one, other, train={"max_steps": 1}), reporter)
    assert any(text.startswith("check: error: leaked (4 of 14)") for text in reporter.said)


def test_loss_is_that_of_the_sequences_alone_whatever_their_lengths(tiny_model: RewardModel) -> None:
    """Ten and three tokens, padded together: elsewhere the loss was averaged over the shorter one's padding."""
    long, short = [65, 66, 67, 68, 69, 70, 71, 72, 73, 257], [65, 66, 257]
    alone = [float(tiny_model.score_ids([ids])[0]) for ids in (long, short)]
    for side in ("right", "left"):
        with torch.no_grad():
            padded = tiny_model.network.forward_padded([long, short], side)  # type: ignore[arg-type]
        loss = bradley_terry_loss(padded[:1], padded[1:])
        expected = math.log1p(math.exp(-(alone[0] - alone[1])))
        assert float(loss) == pytest.approx(expected, abs=1e-5)


def test_centring_holds_rewards_near_zero_and_the_mean_is_stored(tiny_base: Path, tmp_path: Path) -> None:
    """The preference leaves the rewards' level free; a head that starts far away is brought back."""
    pairs = write_rows(tmp_path / "pairs.jsonl", text_rows(8))
    means = []
    for name, centring in (("free", 0.0), ("centred", 0.1)):
        config = make_config(
            tiny_base, tmp_path / name, pairs, pairs, loss={"centering": centring}, head={"init_scale": 3.0},
            train={"max_steps": 40, "learning_rate": 1e-2},
        )  # fmt: skip
        record = fit(config, Quiet()).record
        assert record is not None
        lines = [json.loads(line) for line in (tmp_path / name / "runs/run/evaluation.jsonl").read_text().splitlines()]
        stored = np.mean([[line["chosen"], line["rejected"]] for line in lines])
        assert record.reward_mean == pytest.approx(stored, abs=1e-5)
        means.append(abs(record.reward_mean))
    assert means[1] < 0.5 * means[0]


def test_logged_loss_is_the_mean_of_all_four_passes_of_a_step(tiny_base: Path, tmp_path: Path) -> None:
    """Four pairs in four passes: elsewhere the loss of the last one was logged."""
    rows = text_rows(4)
    logged = []
    for name, tokens in (("four", 128), ("one", 4096)):
        pairs = write_rows(tmp_path / f"{name}.jsonl", rows)
        config = make_config(
            tiny_base, tmp_path / name, pairs, pairs, model={"max_length": 64}, head={"init_scale": 3.0},
            train={"max_steps": 1, "batch_size": 4, "max_tokens": tokens},
        )  # fmt: skip
        (line,) = metric_lines(fit(config, Quiet()).directory)
        logged.append((line["loss"], line["accuracy"], line["margin"]))
    assert logged[0] == pytest.approx(logged[1], abs=1e-5)
    assert abs(logged[0][0] - math.log(2)) > 0.01, "the four losses differ"
