"""The examples run from end to end, on a tiny random policy."""

import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import rm_client

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def loaded(monkeypatch: pytest.MonkeyPatch, name: str) -> types.ModuleType:
    """An example with those that it imports, which are forgotten after the test."""
    monkeypatch.syspath_prepend(EXAMPLES)
    for each in ("grpo_shared", "grpo", "trl_grpo", "rlvr_math"):
        monkeypatch.setitem(sys.modules, each, types.ModuleType(each))
        del sys.modules[each]
    return load(name)


@pytest.fixture
def grpo(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    return loaded(monkeypatch, "grpo")


@pytest.fixture
def served(server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    real = rm_client.RewardClient
    monkeypatch.setattr(
        rm_client,
        "RewardClient",
        lambda url, **rest: real(url, transport=httpx.MockTransport(server), sleep=lambda seconds: None, **rest),
    )
    return server


def test_grpo_example_trains_a_policy_and_reports(
    grpo: types.ModuleType, served: Any, tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.name: path.read_bytes() for path in tiny_base.glob("*.safetensors")}
    code = grpo.main(["--quick", "--model", str(tiny_base), "--out", str(tmp_path), "--updates", "2"])
    assert code == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert result["reward_id_is_unchanged"] is True
    assert result["gain_interval_95"][0] <= result["gain"] <= result["gain_interval_95"][1]
    assert result["gain"] == pytest.approx(result["reward_end"] - result["reward_start"])
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(np.isfinite(step["loss"]) and step["kl"] >= 0 for step in steps)
    assert (tmp_path / "grpo.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert before == {path.name: path.read_bytes() for path in tiny_base.glob("*.safetensors")}
    # one request a batch, whole groups in it, and the pin in every one
    scored = [body for body in served.bodies if "groups" in body]
    assert {len(group["completions"]) for group in scored[2]["groups"]} == {8}
    assert {body["reward_id"] for body in scored} == {result["reward_id"]}


def test_log_probs_of_the_example_are_those_of_each_answer_alone(grpo: types.ModuleType, tiny_base: Path) -> None:
    torch.manual_seed(0)
    policy, tokenizer = grpo.load_policy(str(tiny_base), 4, torch.float32, "cpu")
    prompts = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "a longer prompt than that"}]]
    answers = grpo.sample(policy, tokenizer, prompts, 2, 6, 1.0)
    with torch.no_grad():
        batched = grpo.log_probs(policy, answers, 0.7)
        for row in range(4):
            ids = answers.ids[row][answers.attention[row]].unsqueeze(0)
            length = int(answers.mask[row].sum())
            logits = policy(input_ids=ids).logits[0, -length - 1 : -1] / 0.7
            alone = torch.log_softmax(logits, -1)[torch.arange(length), ids[0, -length:]]
            torch.testing.assert_close(batched[row][answers.mask[row]], alone, atol=1e-4, rtol=1e-4)


def test_an_answer_counts_up_to_its_end_token(grpo: types.ModuleType, tiny_base: Path) -> None:
    policy, tokenizer = grpo.load_policy(str(tiny_base), 4, torch.float32, "cpu")
    ids = torch.tensor([[5, 257, 257, 257], [5, 6, 7, 8]])

    def generate(**inputs: Any) -> torch.Tensor:
        return torch.cat([inputs["input_ids"], ids], dim=1)

    policy.generate = generate
    answers = grpo.sample(policy, tokenizer, [[{"role": "user", "content": "a"}]], 2, 4, 1.0)
    assert answers.mask.tolist() == [[True, True, False, False], [True] * 4]
    assert answers.finished == [True, False]


def test_paired_bootstrap_finds_a_shift_that_noise_between_prompts_hides(grpo: types.ModuleType) -> None:
    random = np.random.default_rng(0)
    before = random.normal(size=40) * 10
    paired_bootstrap = sys.modules["grpo_shared"].paired_bootstrap
    gain, low, high = paired_bootstrap(before, before + 0.5 + random.normal(size=40) * 0.1)
    assert 0.4 < low < gain < high < 0.6
    _, low, high = paired_bootstrap(before, before + random.normal(size=40))
    assert low < 0 < high


def test_a_wrong_server_is_one_line(
    grpo: types.ModuleType, served: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Callable[..., Any]
) -> None:
    served.refusals = [refusal(401, "unauthorized")]
    assert grpo.main(["--quick", "--model", "x", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("grpo: error: HTTP 401 unauthorized")


def test_a_server_that_is_not_there_is_one_line_soon(
    grpo: types.ModuleType, served: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.refusals = [httpx.ConnectError("Connection refused") for _ in range(99)]
    assert grpo.main(["--quick", "--model", "x", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("grpo: error: connection_failed: http://127.0.0.1:8000/info: Connection refused")
    assert len(served.refusals) == 96


def test_sums_are_held_out_and_their_recipe_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from rm_server.recipe import load_recipe

    module = loaded(monkeypatch, "rlvr_math")
    train, held_out = module.sums(types.SimpleNamespace(eval_prompts=40))
    questions = [row["prompt"][0]["content"] for row in train]
    assert (len(train), len(held_out)) == (104, 40)
    assert not {row["prompt"][0]["content"] for row in held_out} & set(questions)
    for row in train:
        a, b = (int(word.rstrip("?.")) for word in row["prompt"][0]["content"].split() if word.rstrip("?.").isdigit())
        assert row["reference"] == str(a + b)
    assert load_recipe(EXAMPLES / "rlvr_math.yaml").model_part is None
