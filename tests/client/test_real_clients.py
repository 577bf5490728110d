"""The trainers' own code calls a real server process: 64 real conversations get exactly what ``/score`` gives.

Each trainer runs in an environment of its own, named by BETTERTHAN_TRL_PYTHON, BETTERTHAN_OPENRLHF_PYTHON and
BETTERTHAN_VERL_PYTHON (docs/integrations.md says what goes into them); without it the test is skipped.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rm_client import RewardClient
from tests.conftest import make_checkpoint, save_base

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(__file__).parent / "peers"
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
}
CHATML = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@contextmanager
def reward_server(*arguments: str, port: int = 0) -> Iterator[str]:
    """A running ``rm-server``; yields its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rm_server.cli", *arguments, "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **QUIET},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("rm-server ready on http://127.0.0.1:"), process.communicate(timeout=30)
        yield line.split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def exact(checkpoint: Path) -> tuple[str, ...]:
    """How the checkpoint is served here: bit-identical rewards, whatever else is in a batch."""
    return (str(checkpoint), "--dtype", "float32", "--exact")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy, and the base of the reward model, with a chat template that knows generation prompts."""
    from tests.conftest import byte_tokenizer

    return save_base(tmp_path_factory.mktemp("policy") / "base", tokenizer=byte_tokenizer(CHATML))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("reward") / "checkpoint", base)


@pytest.fixture(scope="module")
def url(checkpoint: Path) -> Iterator[str]:
    with reward_server(*exact(checkpoint)) as address:
        yield address


@pytest.fixture(scope="module")
def conversations(shared_data: Callable[[str], Path]) -> list[tuple[list[dict[str, str]], str]]:
    """64 real prompts with an answer each."""
    found = []
    for line in shared_data("eval_hh_harmless.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = [{"role": message["role"], "content": message["content"]} for message in row["prompt"]]
        for answer in (row["chosen"], row["rejected"]):
            text = answer[0]["content"].strip()
            if text and sum(len(m["content"].encode()) for m in [*prompt, *answer]) < 330:
                found.append((prompt, text))
    assert len(found) >= 64
    return found[:64]


@pytest.fixture(scope="module")
def expected(url: str, conversations: list[Any]) -> list[float]:
    """What ``/score`` gives for the conversations as messages."""
    with RewardClient(url) as client:
        rewards = client.score_conversations(
            [[*p, {"role": "assistant", "content": a}] for p, a in conversations]
        ).rewards
    assert len({*rewards}) > 32
    return [float(reward) for reward in rewards if reward is not None]


def python_of(variable: str, needs: str) -> str:
    """The trainer's Python; the test is skipped where there is none."""
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} is not set: it names a Python that has {needs}")
    return python


def run_peer(
    python: str,
    script: Path,
    *arguments: str,
    job: dict[str, Any] | None = None,
    on_started: Callable[[], None] = lambda: None,
) -> Any:
    """Run a script in a trainer's environment; the last line it prints is its result. STARTED calls ``on_started``."""
    process = subprocess.Popen(
        [python, str(script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT)},
    )
    with process, ThreadPoolExecutor(1) as pool:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        errors = pool.submit(process.stderr.read)
        process.stdin.write(json.dumps(job))
        process.stdin.close()
        last = ""
        for line in process.stdout:
            last = line
            if line == "STARTED\n":
                on_started()
    assert process.returncode == 0, errors.result()[-3000:]
    return json.loads(last.removeprefix("RESULT "))


def templated(prompt: list[dict[str, str]], answer: str) -> tuple[str, str]:
    """Prompt and answer as the policy sees and writes them."""
    turns = [{"role": "system", "content": "Be helpful."}, *prompt] if prompt[0]["role"] != "system" else prompt
    text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
    return text + "<|im_start|>assistant\n", answer + "<|im_end|>"


def test_openrlhf_gets_what_score_gives(
    url: str, checkpoint: Path, conversations: list[Any], expected: list[float], tmp_path: Path
) -> None:
    python = python_of("BETTERTHAN_OPENRLHF_PYTHON", "openrlhf, aiohttp and httpx")
    reward_file = tmp_path / "reward.py"
    reward_file.write_text(f"from rm_client import OpenRLHFReward\nreward_func = OpenRLHFReward({url!r})\n")
    pairs = [templated(prompt, answer) for prompt, answer in conversations]
    items = [{"prompt": prompt, "response": response} for prompt, response in pairs]
    route = f"{url}/get_reward"
    # With two URLs it sends the second one empty lists.
    endpoints = {"http": [route], "function": [str(reward_file)], "two": [route, route]}
    job = {"endpoints": endpoints, "tokenizer": str(checkpoint), "items": items}
    result = run_peer(python, PEERS / "openrlhf_client.py", job=job)
    assert [answer["reward"] for answer in result["http"]] == expected
    assert [answer["reward"] for answer in result["two"]] == expected
    # its tensors are float32, as the rewards are
    assert [answer["reward"] for answer in result["function"]] == expected
    assert all(0 < answer["score"] < 1 for answer in result["http"] + result["function"])
    assert result["http"][0]["logs"] == ["rm_finished", "rm_reward", "rm_truncated"]


NARROW = ("--max-queued-tokens", "512", "--max-queued-items", "1")
"""Room for one answer: whoever comes beside it has to wait."""


@contextmanager
def restarting(checkpoint: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """The URL of a server that is not there yet, and what starts it: with room for one answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as running:

        def start() -> None:
            running.enter_context(reward_server(*exact(checkpoint), *NARROW, port=port))

        yield f"http://127.0.0.1:{port}", start


def test_openrlhf_survives_a_restart_and_an_overload(
    checkpoint: Path, conversations: list[Any], expected: list[float]
) -> None:
    """Nobody listens when 64 calls begin (5 tries, 1 s apart); then there is room for one at a time."""
    python = python_of("BETTERTHAN_OPENRLHF_PYTHON", "openrlhf, aiohttp and httpx")
    items = [dict(zip(("prompt", "response"), templated(*pair), strict=True)) for pair in conversations]
    with restarting(checkpoint) as (url, start):
        job = {"endpoints": {"http": [f"{url}/get_reward"]}, "tokenizer": str(checkpoint), "items": items}
        result = run_peer(python, PEERS / "openrlhf_client.py", job=job, on_started=start)
    assert [answer["reward"] for answer in result["http"]] == expected


def verl_job(url: str, checkpoint: Path, conversations: list[Any], *ways: str) -> dict[str, Any]:
    items = [{"messages": prompt, "response": answer + "<|im_end|>"} for prompt, answer in conversations]
    return {"url": url, "tokenizer": str(checkpoint), "items": items, "ways": ways}


def test_verl_gets_what_score_gives(
    checkpoint: Path, url: str, conversations: list[Any], expected: list[float]
) -> None:
    python = python_of("BETTERTHAN_VERL_PYTHON", "verl, ray, tensordict, hydra-core and httpx")
    job = verl_job(url, checkpoint, conversations, "vllm", "sglang", "function")
    result = run_peer(python, PEERS / "verl_client.py", job=job)
    assert result == {"vllm": expected, "sglang": expected, "function": expected}


def test_verl_survives_a_restart_and_an_overload(
    checkpoint: Path, conversations: list[Any], expected: list[float]
) -> None:
    """Nobody listens when it posts; then the model is being loaded; then there is room for one at a time."""
    python = python_of("BETTERTHAN_VERL_PYTHON", "verl, ray, tensordict, hydra-core and httpx")
    with restarting(checkpoint) as (url, start):
        job = verl_job(url, checkpoint, conversations, "vllm")
        assert run_peer(python, PEERS / "verl_client.py", job=job, on_started=start) == {"vllm": expected}


def test_verls_formulas_are_ours() -> None:
    python = python_of("BETTERTHAN_VERL_PYTHON", "verl, ray, tensordict and hydra-core")
    worst = run_peer(python, PEERS / "verl_formulas.py")
    assert set(worst) == {"advantages std", "advantages none", "k3", "loss grpo", "loss dr_grpo", "loss dapo"}
    assert max(worst.values()) < 1e-6, worst  # verl adds 1e-8 to each length


def test_trl_gets_what_score_gives(url: str, base: Path, checkpoint: Path, conversations: list[Any]) -> None:
    python = python_of("BETTERTHAN_TRL_PYTHON", "trl and httpx")
    reward_id = json.loads((checkpoint / "reward_model.json").read_text())["reward_id"]
    prompts = [prompt for prompt, _ in conversations[::4]]
    job = {"url": url, "policy": str(base), "prompts": prompts, "reward_id": reward_id}
    result = run_peer(python, PEERS / "trl_client.py", job=job)
    for name in ("plain", "waiting"):
        seen = result["seen"][name]
        assert len(seen) == 64
        groups = [
            {"prompt": prompt, "completions": [completion if finished else {"content": completion, "finished": False}]}
            for prompt, completion, finished, _ in seen
        ]
        with RewardClient(url, reward_id=reward_id) as client:
            scored = client.score_groups(groups)
            assert client.info().reward_id == reward_id
        assert [reward for _, _, _, reward in seen] == [row[0] for row in scored.rewards]
    assert any(not finished for _, _, finished, _ in result["seen"]["plain"])
    assert len(result["logged"]) == 2


def test_trl_survives_a_restart_and_an_overload(base: Path, checkpoint: Path, conversations: list[Any]) -> None:
    """Nobody listens at the first step; then groups come in answer by answer, for there is room for one."""
    python = python_of("BETTERTHAN_TRL_PYTHON", "trl and httpx")
    reward_id = json.loads((checkpoint / "reward_model.json").read_text())["reward_id"]
    with restarting(checkpoint) as (url, start):
        job = {"url": url, "policy": str(base), "prompts": [p for p, _ in conversations[::4]], "reward_id": reward_id}
        result = run_peer(python, PEERS / "trl_client.py", job=job, on_started=start)
        for seen in result["seen"].values():
            groups = [
                {
                    "prompt": prompt,
                    "completions": [completion if finished else {"content": completion, "finished": False}],
                }
                for prompt, completion, finished, _ in seen
            ]
            with RewardClient(url) as client:
                assert [row[0] for row in client.score_groups(groups).rewards] == [reward for *_, reward in seen]
            assert len(seen) == 64


def test_trl_examples_run(url: str, base: Path, tmp_path: Path) -> None:
    python = python_of("BETTERTHAN_TRL_PYTHON", "trl and httpx")
    quick = ["--quick", "--model", str(base), "--out", str(tmp_path)]
    with reward_server("--recipe", str(ROOT / "examples" / "rlvr_math.yaml")) as verifiers:
        for script, server in (("trl_grpo.py", url), ("rlvr_math.py", verifiers)):
            result = run_peer(python, ROOT / "examples" / script, *quick, "--server", server)
            assert result["steps"] == 2
            assert result["reward_id_is_unchanged"] is True
            assert result["held_out_prompts"] == 4


def test_llama_factory_and_slime_shapes_get_what_score_gives(
    url: str, conversations: list[Any], expected: list[float]
) -> None:
    pairs = [templated(prompt, answer) for prompt, answer in conversations]
    body = {"model": "model", "messages": [prompt + answer for prompt, answer in pairs]}
    response = httpx.post(f"{url}/v1/score/evaluation", json=body, headers={"Content-Type": "application/json"})
    assert json.loads(response.text)["scores"] == expected
    assert httpx.post(f"{url}/v1/score/evaluation", json={"model": "model", "messages": []}).json()["scores"] == []

    def slime(pair: tuple[str, str]) -> float:
        answer = httpx.post(f"{url}/reward", json={"prompt": pair[0], "response": pair[1], "label": ""}, timeout=120)
        answer.raise_for_status()
        return float(answer.json())

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(slime, pairs)) == expected


@pytest.mark.parametrize("shape", ["openrlhf", "llama_factory", "slime"])
def test_a_server_with_room_for_one_answer_keeps_its_callers_waiting(
    checkpoint: Path, conversations: list[Any], expected: list[float], shape: str
) -> None:
    """64 callers at once, none of whom could try again for long: all are answered, none is turned away."""
    with reward_server(*exact(checkpoint), *NARROW) as url:

        def call(pair: tuple[str, str]) -> float:
            prompt, response = pair
            route, body = {
                "openrlhf": ("/get_reward", {"query": [prompt + response], "prompts": [prompt], "labels": [""]}),
                "llama_factory": ("/v1/score/evaluation", {"model": "model", "messages": [prompt + response]}),
                "slime": ("/reward", {"prompt": prompt, "response": response, "label": ""}),
            }[shape]
            answer = httpx.post(url + route, json=body, timeout=180)
            assert answer.status_code == 200, answer.text
            found = answer.json()
            return float(found if shape == "slime" else found.get("rewards", found.get("scores"))[0])

        with ThreadPoolExecutor(64) as pool:
            assert list(pool.map(call, [templated(*pair) for pair in conversations])) == expected


def test_a_caller_with_few_tries_survives_a_restart(
    checkpoint: Path, conversations: list[Any], expected: list[float]
) -> None:
    """OpenRLHF tries 5 times, 1 s apart: as soon as the socket is open it is kept waiting, not turned away."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    prompt, answer = templated(*conversations[0])
    body = {"query": [prompt + answer], "prompts": [prompt], "labels": [""]}
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(first_answer, f"http://127.0.0.1:{port}/get_reward", body)
        with reward_server(*exact(checkpoint), port=port):
            answered = call.result()
    assert answered.status_code == 200
    assert answered.json()["rewards"] == expected[:1]


def first_answer(url: str, body: Any) -> httpx.Response:
    """The first answer that comes at all."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return httpx.post(url, json=body, timeout=120)
        except httpx.ConnectError:
            assert time.monotonic() < deadline
            threading.Event().wait(0.1)
