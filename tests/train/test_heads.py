"""Several heads on one adapter: each from its own start and sample, their mean served as one plain head."""

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rm_core.checkpoint import CheckpointError, WeightHashes, conservative_reward_id, read_record, reward_id_of
from rm_core.model import RewardModel
from rm_core.reward_heads import offsets_of
from rm_server.groups import SpreadReward
from rm_server.scorer import BatchScorer
from rm_train.data import read_pairs
from rm_train.encode import encode_pairs
from rm_train.eval_table import table_of
from rm_train.fit import fit
from rm_train.losses import BootstrapSamples, head_losses, pair_losses
from rm_train.score_file import score_lines
from tests.conftest import save_classifier
from tests.train.runs import (
    Killed,
    Quiet,
    assert_same_run,
    kill_at,
    make_config,
    metric_lines,
    text_rows,
    weights_of,
    write_rows,
)
from tests.train.test_cli import run

COUNT = 4


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("data")
    held_out = write_rows(directory / "eval.jsonl", text_rows(6, seed=2))
    return write_rows(directory / "train.jsonl", text_rows(10)), held_out


def config_of(base: Path, directory: Path, files: tuple[Path, Path], **sections: Any) -> Any:
    sections = {"head": {"count": COUNT, "init_scale": 1.0}, **sections}
    train = {"max_steps": 5, "learning_rate": 3e-3, **sections.pop("train", {})}
    return make_config(base, directory, *files, train=train, **sections)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path, files: tuple[Path, Path]) -> Path:
    result = fit(config_of(tiny_base, tmp_path_factory.mktemp("run"), files), Quiet())
    return result.directory / "checkpoint"


def heads_of(checkpoint: Path) -> torch.Tensor:
    return load_file(checkpoint / "reward_heads" / "heads.safetensors")["heads"]


def test_checkpoint_serves_the_mean_of_heads_that_differ(checkpoint: Path) -> None:
    heads = heads_of(checkpoint)
    assert heads.shape[0] == COUNT
    assert len({tuple(row.tolist()) for row in heads}) == COUNT
    (stored,) = (tensor for name, tensor in weights_of(checkpoint).items() if "score" in name)
    torch.testing.assert_close(stored, heads.mean(dim=0, keepdim=True))
    model = RewardModel.load(str(checkpoint), dtype="float32", device="cpu")
    ids = [model.renderer.render("a question? ", answer) for answer in ("yes", "no, never")]
    scored = model.score_batch(ids)
    assert scored.heads is not None
    assert scored.heads.shape == (2, COUNT)
    np.testing.assert_allclose(scored.rewards, scored.heads.mean(axis=1), atol=1e-5)
    assert scored.heads.std(axis=1).min() > 0.01


def test_record_of_a_run_tells_the_spread(checkpoint: Path) -> None:
    record = read_record(checkpoint)
    assert record is not None
    assert record.metrics["heads"]["mean_std"] > 0


def test_plain_peft_gives_the_mean(checkpoint: Path, tiny_base: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    model = RewardModel.load(str(checkpoint), dtype="float32", device="cpu")
    ids = model.renderer.render("a question? ", "yes")
    plain = AutoModelForSequenceClassification.from_pretrained(tiny_base, num_labels=1, dtype=torch.float32)
    plain = PeftModel.from_pretrained(plain, str(checkpoint)).eval()
    plain.get_base_model().config.pad_token_id = None
    with torch.inference_mode():
        logit = float(plain(input_ids=torch.tensor([ids])).logits[0, 0])
    assert logit == pytest.approx(float(model.score_ids([ids])[0]), abs=1e-4)


@pytest.mark.parametrize("lora", [{"r": 4, "alpha": 8}, None], ids=["adapter", "whole"])
def test_merged_and_whole_models_keep_their_heads(
    lora: Any, tiny_base: Path, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = fit(config_of(tiny_base, tmp_path, files, lora=lora, train={"max_steps": 2}), Quiet())
    folder = result.directory / "checkpoint"
    if lora is not None:
        assert run(capsys, "merge", folder, tmp_path / "merged")[0] == 0
        torch.testing.assert_close(heads_of(tmp_path / "merged"), heads_of(folder))
        folder = tmp_path / "merged"
    from transformers import AutoModelForSequenceClassification

    plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert plain.config.num_labels == 1
    assert RewardModel.load(str(folder), dtype="float32").network.num_heads == COUNT


def test_one_head_has_neither_folder_nor_another_id(tiny_checkpoint: Path) -> None:
    assert not (tiny_checkpoint / "reward_heads").exists()
    model = RewardModel.load(str(tiny_checkpoint), dtype="float32")
    assert model.score_batch([[1, 2, 257]]).heads is None
    record = read_record(tiny_checkpoint)
    assert record is not None
    assert record.hashes.heads is None
    with_heads = WeightHashes.model_validate({**record.hashes.model_dump(), "heads": "sha256:0"})
    assert reward_id_of(with_heads, record.rules) != record.reward_id == reward_id_of(record.hashes, record.rules)


def test_changed_or_foreign_heads_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    import shutil

    for change, words in (
        (lambda heads: heads.flip(1), "mean"),
        (lambda heads: heads + torch.tensor([[1.0], [-1.0], [0.0], [0.0]]), "one of the single reward heads changed"),
    ):
        folder = tmp_path / words[:4]
        shutil.copytree(checkpoint, folder)
        file = folder / "reward_heads" / "heads.safetensors"
        save_file({"heads": change(heads_of(checkpoint)).contiguous()}, file)
        with pytest.raises(CheckpointError, match=rf"{words}|one of the single reward heads"):
            RewardModel.load(str(folder), dtype="float32")


def test_resume_restores_every_head(tiny_base: Path, files: tuple[Path, Path], tmp_path: Path) -> None:
    train = {"save_every": 2, "max_steps": 5}
    whole = fit(config_of(tiny_base, tmp_path / "whole", files, train=train), Quiet()).directory
    config = config_of(tiny_base, tmp_path / "killed", files, train=train)
    with pytest.raises(Killed):
        fit(config, kill_at(3))
    resumed = fit(config, Quiet(), resume=True).directory
    assert_same_run(resumed, whole)
    assert torch.equal(heads_of(resumed / "checkpoint"), heads_of(whole / "checkpoint"))


def test_first_loss_is_ln_2_with_several_heads(tiny_base: Path, files: tuple[Path, Path], tmp_path: Path) -> None:
    config = config_of(tiny_base, tmp_path, files, head={"count": COUNT}, train={"max_steps": 1})
    (line,) = metric_lines(fit(config, Quiet()).directory)
    assert line["loss"] == pytest.approx(math.log(2), rel=0.01)


@pytest.mark.parametrize("kind", ["adapter", "whole"])
def test_several_heads_need_a_base_without_one(kind: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
    base = tiny_checkpoint if kind == "adapter" else save_classifier(tmp_path / "classifier")
    with pytest.raises(CheckpointError, match=r"has a head to go on with; head\.count 3"):
        RewardModel.for_training(
            str(base),
            lora={"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
            seed=0,
            dtype="float32",
            num_heads=3,
        )


# ------------------------------------------------------------------ loss and samples


def test_loss_of_heads_is_the_mean_of_their_weighed_losses(tiny_model: RewardModel, files: tuple[Path, Path]) -> None:
    from rm_train.config import LossConfig

    pairs = encode_pairs(list(read_pairs(str(files[0])))[:2], tiny_model.renderer, 128)
    chosen, rejected = torch.tensor([[1.0, 0.0], [2.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    found = head_losses(chosen, rejected, pairs, LossConfig(), [[1.0, 2.0], [0.0, 3.0]])
    first, second = (pair_losses(chosen[:, k], rejected[:, k], pairs, LossConfig()) for k in range(2))
    expected = [(1 * first[0] + 2 * second[0]) / 2, (0 * first[1] + 3 * second[1]) / 2]
    torch.testing.assert_close(found, torch.stack(expected))


def test_bootstrap_samples_are_fixed_of_mean_one_and_by_prompt(tiny_model: RewardModel, tmp_path: Path) -> None:
    rows = text_rows(200)
    again = [{**row, "chosen": row["chosen"] + "!"} for row in rows]
    file = write_rows(tmp_path / "pairs.jsonl", [*rows, *again])
    pairs = encode_pairs(list(read_pairs(str(file))), tiny_model.renderer, 256)
    samples = BootstrapSamples(pairs, 8, 0)
    counts = np.array(samples.weights(range(400)))
    assert counts.shape == (400, 8)
    assert (counts[:200] == counts[200:]).all()
    assert counts.mean() == pytest.approx(1.0, abs=0.1)
    assert np.corrcoef(counts[:200].T)[0, 1:].max() < 0.3
    assert samples.weights([7, 3]) == counts[[7, 3]].tolist()
    assert (np.array(BootstrapSamples(pairs, 8, 0).weights(range(400))) == counts).all()
    assert BootstrapSamples(pairs, 1, 0).weights([0]) is None


# ------------------------------------------------------------------ what is told


def test_eval_and_score_tell_how_sure_a_reward_is(
    checkpoint: Path, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = json.loads(run(capsys, "eval", checkpoint, files[1], "--dtype", "float32", "--json")[1])
    assert set(report["heads"]) == {
        "mean_std",
        "margin_std_right",
        "margin_std_wrong",
        "accuracy_of_surer_half",
        "accuracy_mean_minus_std",
    }
    assert report["heads"]["mean_std"] > 0
    assert "accuracy of the surer half" in run(capsys, "eval", checkpoint, files[1])[1]
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": "Why? ", "completions": ["So.", "No."]}, {"text": "A text."}]
    )
    plain, cautious = (
        [
            json.loads(line)
            for line in run(capsys, "score", checkpoint, rows, "--dtype", "float32", *options)[1].splitlines()
        ]
        for options in (["--components"], ["--conservative", "2"])
    )
    parts = plain[0]["components"]
    assert parts["mean"] == plain[0]["rewards"]
    assert all(low < mean for low, mean in zip(parts["min"], parts["mean"], strict=True))
    expected = [mean - 2 * std for mean, std in zip(parts["mean"], parts["std"], strict=True)]
    assert cautious[0]["rewards"] == pytest.approx(expected, abs=1e-5)
    assert plain[1]["components"]["mean"] == plain[1]["reward"]


def test_heads_are_compared_without_their_offsets_and_the_reward_stays_as_it_was(
    checkpoint: Path, files: tuple[Path, Path], tmp_path: Path
) -> None:
    """Bradley-Terry leaves the offset of every head free: it says nothing of how sure a reward is."""
    record = read_record(checkpoint)
    assert record is not None
    assert record.head_means is not None
    assert np.mean(record.head_means) == pytest.approx(record.reward_mean, abs=1e-5)
    assert np.std(record.head_means) > 0.01
    model = RewardModel.load(str(checkpoint), dtype="float32", device="cpu")
    pairs = encode_pairs(list(read_pairs(str(files[1]))), model.renderer, 128)
    ids = [ids for item in pairs for ids in (item.chosen, item.rejected)]
    scored = model.score_batch(ids)
    assert scored.heads is not None
    np.testing.assert_allclose(scored.heads.mean(axis=0), record.reward_mean, atol=1e-4)
    np.testing.assert_allclose(scored.heads.mean(axis=1), scored.rewards, atol=1e-5)
    earlier = tmp_path / "earlier"
    shutil.copytree(checkpoint, earlier)
    values = json.loads((earlier / "reward_model.json").read_text())
    del values["head_means"]
    (earlier / "reward_model.json").write_text(json.dumps(values))
    raw = RewardModel.load(str(earlier), dtype="float32", device="cpu").score_batch(ids)
    assert raw.heads is not None
    assert np.array_equal(raw.rewards, scored.rewards)
    np.testing.assert_allclose(raw.heads.mean(axis=0), record.head_means, atol=1e-4)
    np.testing.assert_allclose(
        raw.heads - scored.heads, np.tile(offsets_of(record.head_means), (len(ids), 1)), atol=1e-5
    )
    std = scored.heads.std(axis=1)
    assert record.metrics["heads"]["mean_std"] == pytest.approx(float(std.mean()), abs=1e-4)
    assert abs(float(raw.heads.std(axis=1).mean()) - float(std.mean())) > 1e-3
    (first, *_) = score_lines(model, [json.dumps({"text": "So."})], max_tokens=512, components=True)
    served = BatchScorer(model, 512, "shared", time.monotonic)
    (reward,) = served.score([np.array(model.renderer.render_text("So."), dtype=">u4").tobytes()]).outcomes
    assert isinstance(reward, SpreadReward)
    assert first["components"]["std"] == pytest.approx(reward.std, abs=1e-5)
    assert first["components"]["min"] == pytest.approx(reward.least, abs=1e-5)
    alone = model.score_batch([model.renderer.render_text("So.")]).heads
    assert alone is not None
    assert reward.std == pytest.approx(float(alone.std()), abs=1e-5)


def test_constant_added_to_one_head_changes_neither_std_nor_min(
    tiny_model: RewardModel, files: tuple[Path, Path]
) -> None:
    pairs = encode_pairs(list(read_pairs(str(files[0]))), tiny_model.renderer, 128)
    draw = np.random.default_rng(0)
    heads = (draw.normal(size=(len(pairs), COUNT)), draw.normal(size=(len(pairs), COUNT)))
    moved = tuple(side + np.array([0.0, 7.0, 0.0, -2.0]) for side in heads)
    tables = [table_of(pairs, *(side.mean(axis=1) for side in sides), sides) for sides in (heads, moved)]
    for before, after in zip(*(table.spread for table in tables), strict=True):
        np.testing.assert_allclose(after, before, atol=1e-5)
    means = [table.head_means for table in tables]
    np.testing.assert_allclose(np.subtract(means[1], means[0]), [0.0, 7.0, 0.0, -2.0], atol=1e-6)
    np.testing.assert_allclose(means[0], np.concatenate(heads).mean(axis=0), atol=1e-6)
    centred = [sides[0] - offsets_of(mean) for sides, mean in zip((heads, moved), means, strict=True)]
    # the reward itself moves by the mean of what was added
    np.testing.assert_allclose(centred[1].min(axis=1), centred[0].min(axis=1) + 1.25, atol=1e-5)


def test_merged_and_adopted_checkpoints_keep_the_means(
    checkpoint: Path, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = read_record(checkpoint)
    assert run(capsys, "merge", checkpoint, tmp_path / "merged")[0] == 0
    merged = read_record(tmp_path / "merged")
    assert record is not None
    assert merged is not None
    assert merged.head_means == record.head_means
    assert run(capsys, "calibrate", tmp_path / "merged", files[1], "--output", tmp_path / "adopted")[0] == 0
    adopted = read_record(tmp_path / "adopted")
    assert adopted is not None
    assert adopted.head_means == pytest.approx(record.head_means, abs=1e-4)


def test_eval_of_the_conservative_reward_is_of_what_is_scored_and_served(
    checkpoint: Path, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pairs and best-of-N rows: every reward is mean - 2 std, and the report has its id."""
    rows = [json.loads(line) for line in files[1].read_text().splitlines()]
    best = {"prompt": "Q? ", "chosen": ["yes"], "rejected": ["no", "never"]}
    file = write_rows(tmp_path / "both.jsonl", [*rows, best])
    options = ["--dtype", "float32", "--conservative", "2"]
    report = json.loads(run(capsys, "eval", checkpoint, file, *options, "--json")[1])
    model = RewardModel.load(str(checkpoint), dtype="float32", device="cpu")
    assert (report["conservative"], report["reward_id"]) == (2.0, conservative_reward_id(model.reward_id, 2.0))
    asked = [{"prompt": row["prompt"], "completions": [row["chosen"], row["rejected"]]} for row in rows]
    asked.append({"prompt": best["prompt"], "completions": [*best["chosen"], *best["rejected"]]})
    lines = [json.dumps(row) for row in asked]
    scored = [answer["rewards"] for answer in score_lines(model, lines, max_tokens=512, conservative=2.0)]
    pairs = np.array(scored[:-1])
    assert report["reward"]["mean"] == pytest.approx(pairs.mean(), abs=1e-5)
    assert report["accuracy"]["value"] == pytest.approx((pairs[:, 0] > pairs[:, 1]).mean())
    assert report["best_of_n"]["accuracy"]["value"] == float(scored[-1][0] > max(scored[-1][1:]))
    served = BatchScorer(model, 512, "shared", time.monotonic, conservative=2.0)
    ids = [model.renderer.render(best["prompt"], answer) for answer in (*best["chosen"], *best["rejected"])]
    outcomes = served.score([np.array(one, dtype=">u4").tobytes() for one in ids]).outcomes
    assert outcomes == pytest.approx(scored[-1], abs=1e-5)

    plain = json.loads(run(capsys, "eval", checkpoint, file, "--dtype", "float32", "--json")[1])
    assert (plain["reward_id"], "conservative" in plain) == (model.reward_id, False)
    spread = plain["heads"]["mean_std"]
    assert report["reward"]["mean"] == pytest.approx(plain["reward"]["mean"] - 2 * spread, abs=1e-5)
    for name in ("mean_std", "accuracy_mean_minus_std"):
        assert report["heads"][name] == pytest.approx(plain["heads"][name], abs=1e-6)
    assert "mean - 2 std over the heads" in run(capsys, "eval", checkpoint, file, *options)[1]


def test_one_head_alone_cannot_tell(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "A text."}])
    code, out, err = run(capsys, "score", tiny_checkpoint, rows, "--conservative", "1")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "has one head alone" in err
    pairs = write_rows(tmp_path / "pairs.jsonl", text_rows(2))
    code, out, err = run(capsys, "eval", tiny_checkpoint, pairs, "--conservative", "1")
    assert (code, out) == (2, "")
    assert "has one head alone" in err
