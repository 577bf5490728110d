"""On a GPU: FlexAttention's rewards and gradients, the prefix cache, serving and training, against plain transformers.

Tiny models with heads of 32, the smallest shapes that FlexAttention's kernels like. What a CPU can run of the same code
is in tests/core/test_flex.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rm_core.model import RewardModel
from rm_core.prefix_cache import PrefixCache
from tests.conftest import save_base
from tests.core.exactness import (
    Ids,
    Subject,
    arrive,
    corpus,
    hidden_of,
    plain_classifier,
    plain_scores,
    rms,
    subject_of,
)
from tests.core.test_exactness_gradients import check_bfloat16_gradients, trainable_of
from tests.server.conftest import running
from tests.train.runs import Quiet, learnable_rows, make_config, metric_lines, text_rows, write_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
    # the compiler's own: deprecations inside torch, advice about TF32
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

WIDE = {
    "hidden_size": 192,
    "intermediate_size": 176,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "mistral": {**WIDE, "sliding_window": 23},
    "gemma2": {**WIDE, "sliding_window": 23},
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """The reference is computed on the CPU in fp32; the model of ours is on the GPU."""
    on_cpu = subject_of(request.param, 150, tmp_path_factory.mktemp("gpu") / request.param, **FAMILIES[request.param])
    model = RewardModel.load(str(on_cpu.directory), dtype="float32", device="cuda")
    assert model.device.type == "cuda"
    assert model.sharing_off is None
    return on_cpu._replace(model=model)


def plain_hidden_on_cuda(directory: Path, sequences: list[Ids], dtype: torch.dtype) -> np.ndarray:
    classifier = plain_classifier(directory, dtype).cuda()
    hidden = []
    with torch.inference_mode():
        for ids in sequences:
            states = classifier.base_model(input_ids=torch.tensor([ids], device="cuda")).last_hidden_state
            hidden.append(states[0, -1].double().cpu())
    return torch.stack(hidden).numpy()


# ------------------------------------------------------------------ rewards


def test_fp32_rewards_are_those_of_plain_transformers(subject: Subject) -> None:
    subject.check(subject.model.score_batch(subject.sequences).rewards)
    subject.check(subject.model.score_batch(subject.sequences, max_tokens=100).rewards)


def test_fp32_rewards_survive_the_cache_evictions_and_any_order(subject: Subject) -> None:
    roomy = PrefixCache(10**9)
    first = arrive(subject, roomy, 1000, seed=2)
    assert 0 < first < arrive(subject, roomy, 300, seed=3)
    tight = PrefixCache(roomy.num_bytes // 20)
    assert arrive(subject, tight, 300, seed=4) > 0
    assert 0 < tight.num_bytes <= tight.max_bytes


def test_bf16_is_as_close_to_fp32_as_plain_transformers_in_bf16(subject: Subject) -> None:
    model = RewardModel.load(str(subject.directory), dtype="bfloat16", device="cuda")
    assert model.sharing_off is None
    plain = plain_hidden_on_cuda(subject.directory, subject.sequences, torch.bfloat16)
    allowed = 1.1 * rms(plain - subject.hidden)
    _, one_tree = hidden_of(model, subject.sequences)
    assert rms(one_tree - subject.hidden) <= allowed
    cache = PrefixCache(10**9)
    model.score_batch(subject.sequences[::2], max_tokens=500, cache=cache)
    _, cached = hidden_of(model, subject.sequences, max_tokens=500, cache=cache)
    assert rms(cached - subject.hidden) <= allowed


def test_changing_lengths_do_not_recompile_for_ever(subject: Subject) -> None:
    """A graph for a length would cost seconds each; dozens of lengths may take a handful of graphs."""
    from torch._dynamo.utils import counters

    draw = np.random.default_rng(5)
    cache = PrefixCache(10**9)
    seen = []
    for _ in range(24):
        count = int(draw.integers(1, 40))
        chosen = draw.choice(len(subject.items), count, replace=False)
        scored = subject.model.score_batch([subject.sequences[i] for i in chosen], max_tokens=700, cache=cache)
        subject.check(scored.rewards, chosen)
        seen.append(counters["stats"]["unique_graphs"])
    assert seen[-1] - seen[0] <= 8
    assert seen[-1] == seen[11], "the second dozen of lengths needed new graphs"


# ------------------------------------------------------------------ gradients


@pytest.mark.parametrize("family", list(FAMILIES))
def test_fp32_gradients_are_those_of_plain_peft(family: str, tmp_path: Path) -> None:
    trainable = trainable_of(family, tmp_path, FAMILIES[family], device="cuda")
    trainable.check()
    trainable.check(cuts=[7, 30])


@pytest.mark.parametrize("family", list(FAMILIES))
def test_bf16_gradients_are_as_close_to_fp32_as_those_of_plain_peft(family: str, tmp_path: Path) -> None:
    check_bfloat16_gradients(family, FAMILIES[family], tmp_path, "cuda")


# ------------------------------------------------------------------ serving and training


async def test_served_rewards_are_those_of_plain_transformers(subject: Subject) -> None:
    """The default dtype on a GPU is bf16; over HTTP in fp32 here, so that the bound is the fp32 one."""
    async with running(subject.model, max_batch_tokens=1024) as (client, _):
        chosen = np.arange(0, len(subject.items), 2)
        body = {"input_ids": [subject.sequences[index] for index in chosen]}
        for _ in range(2):  # the second time with everything known
            answer = await client.post("/score", json=body)
            assert answer.status_code == 200
            subject.check(np.array(answer.json()["rewards"]), chosen)
        info = (await client.get("/info")).json()
        assert "cuda" in str(info["device"])


def test_auto_takes_bf16_on_a_gpu(subject: Subject) -> None:
    model = RewardModel.load(str(subject.directory))
    assert (model.device.type, model.dtype) == ("cuda", "bfloat16")
    assert "GPU" in model.dtype_reason


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_learns_and_its_checkpoint_scores_alike_on_the_cpu(dtype: str, tmp_path: Path) -> None:
    from rm_train.fit import fit

    base = save_base(tmp_path / "base", "llama", **WIDE)
    rows, held_out = learnable_rows(160, seed=1), text_rows(8, seed=2)
    config = make_config(
        base,
        tmp_path,
        write_rows(tmp_path / "train.jsonl", rows),
        write_rows(tmp_path / "eval.jsonl", held_out),
        model={"dtype": dtype},
        train={"batch_size": 16, "epochs": 4, "learning_rate": 3e-3},
    )
    result = fit(config, Quiet())
    losses = [line["loss"] for line in metric_lines(result.directory) if "loss" in line]
    assert len(losses) == 40
    assert np.isfinite(losses).all()
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    # loading recomputes the golden scores, here on the CPU, and refuses where they differ
    model = RewardModel.load(str(result.directory / "checkpoint"), dtype="float32", device="cpu")
    again = RewardModel.load(str(result.directory / "checkpoint"), dtype="float32", device="cuda")
    sequences = [item.ids for item in corpus(30) if len(item.ids) < 400]
    expected = model.score_batch(sequences).rewards
    np.testing.assert_allclose(again.score_batch(sequences).rewards, expected, atol=1e-4 * max(expected.std(), 1.0))


def test_plain_transformers_agrees_with_itself_across_devices(subject: Subject) -> None:
    """So the reference, computed on the CPU, is no artefact of the device."""
    few = subject.sequences[:20]
    classifier = plain_classifier(subject.directory).cuda()
    with torch.inference_mode():
        on_gpu = [float(classifier(input_ids=torch.tensor([ids], device="cuda")).logits[0, 0]) for ids in few]
    on_cpu, _ = plain_scores(plain_classifier(subject.directory), few)
    np.testing.assert_allclose(on_gpu, on_cpu, atol=subject.bound)
