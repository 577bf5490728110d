"""Recipes behind the routes: components that recombine, errors that cost one item, servers without a model."""

import asyncio
import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from rm_core.checkpoint import CheckpointRecord
from rm_server.app import create_app
from rm_server.inputs import ItemInput
from rm_server.recipe import combine, load_recipe
from rm_server.schema import Message
from rm_server.service import ScoringService
from rm_server.settings import ServerSettings, SettingsError
from rm_server.verification import answer_of
from rm_server.verifiers.answers import Answer

MIXED = """
parts:
  model:  {kind: model, standardise: checkpoint}
  answer: {kind: math, timeout_seconds: 60}
  boxed:  {kind: regex, pattern: "boxed", whole: false, timeout_seconds: 60}
  length: {kind: overlong, max_length: 40, buffer: 20, timeout_seconds: 60}
reward:
  gate: boxed
  otherwise: -2.0
  then:
    sum:
      - {part: model, weight: 0.5}
      - answer
      - {part: length, weight: 0.25}
"""
MATH_GATE = """
parts:
  model:  {kind: model, standardise: checkpoint}
  answer: {kind: math, timeout_seconds: 60}
  length: {kind: overlong, max_length: 40, buffer: 20, timeout_seconds: 60}
reward:
  sum:
    - {gate: answer, then: model, otherwise: -3.0}
    - {part: length, weight: 0.5}
"""
MATH_ONLY = """
parts:
  answer: {kind: math, timeout_seconds: 60}
reward: answer
"""
QUICK = """
parts:
  form: {kind: regex, pattern: "(a|aa)+$", timeout_seconds: 1}
  size: {kind: length, maximum: 1000, timeout_seconds: 60}
reward: {product: [form, size]}
"""
TOWER = "9^{9^{9^{9}}}"


@asynccontextmanager
async def serving(
    tmp_path: Path, recipe: str, model: Any = None, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, ScoringService]]:
    """A started service with a recipe behind a client, in this process."""
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe)
    checkpoint = None if model is None else "fake"
    service = ScoringService(
        ServerSettings(checkpoint=checkpoint, recipe=str(path), num_verifier_workers=2, **settings)
    )
    app = create_app(service, service.settings)
    try:
        await service.start(lambda: model)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=300) as client:
            yield client, service
    finally:
        await service.stop()


@pytest.fixture
def measured(fake: Any) -> Any:
    """The fake model with a checkpoint's record of its rewards' spread."""
    known: dict[str, Any] = {"reward_mean": 1.5, "reward_std": 4.0, "num_eval": 100, "training_length": None}
    fake.record = CheckpointRecord.model_construct(**known)
    return fake


async def post(client: httpx.AsyncClient, body: Any) -> tuple[int, Any]:
    response = await client.post("/score", json=body)
    return response.status_code, response.json()


async def test_components_of_a_mixed_recipe_recombine_to_the_reward(
    tmp_path: Path, measured: Any, score_of: Callable[[Any], float]
) -> None:
    groups: list[dict[str, Any]] = [
        {"id": "a", "prompt": "1/2 = ", "reference": "0.5", "completions": [
            "\\boxed{\\frac{1}{2}}",
            "\\boxed{0.6}",
            "0.5",
            "it is of course and without any doubt \\boxed{50\\%}",
        ]},
        {"id": "b", "prompt": [{"role": "user", "content": "3"}], "reference": 3, "completions": [
            [{"role": "assistant", "content": "\\boxed{3}"}],
            {"content": "\\boxed{4}", "finished": False},
        ]},
    ]  # fmt: skip
    async with serving(tmp_path, MIXED, measured) as (client, _):
        status, answer = await post(client, {"groups": groups, "advantages": {"scale": "std"}})
        info = (await client.get("/info")).json()
        assert status == 200, answer
        components = answer["components"]
        render = measured.renderer.render
        raw = [
            *(score_of(render("1/2 = ", text)) for text in groups[0]["completions"]),
            score_of(render(groups[1]["prompt"], "\\boxed{3}")),
            score_of(render(groups[1]["prompt"], "\\boxed{4}", finished=False)),
        ]
        assert [*components["model"][0], *components["model"][1]] == [(value - 1.5) / 4.0 for value in raw]
        assert components["answer"] == [[1.0, 0.0, 1.0, 1.0], [1.0, 0.0]]
        assert components["boxed"] == [[1.0, 1.0, 0.0, 1.0], [1.0, 1.0]]
        assert components["length"] == [[0.0, 0.0, 0.0, -1.0], [0.0, -1.0]]

        node = load_recipe(tmp_path / "recipe.yaml").reward
        for g, row in enumerate(answer["rewards"]):
            for i, reward in enumerate(row):
                parts = {name: values[g][i] for name, values in components.items()}
                assert combine(node, parts) == reward
        assert answer["rewards"][0][2] == -2.0, "the gate is closed"
        assert answer["reward_id"] == info["reward_id"]
        assert info["model_reward_id"] == measured.reward_id != info["reward_id"]
        assert info["recipe"] == load_recipe(tmp_path / "recipe.yaml").as_json()
        assert info["standards"] == {"model": {"mean": 1.5, "std": 4.0}}
        assert info["verifier_versions"]["math-verify"]
        assert len(answer["advantages"]) == 2

        status, refused = await post(client, {"texts": ["x"], "reward_id": measured.reward_id})
        assert (status, refused["error"]["type"]) == (409, "reward_id_mismatch")


async def test_real_checkpoint_behind_a_math_gate_recombines(tmp_path: Path, tiny_model: Any) -> None:
    model = copy.copy(tiny_model)
    model.record = tiny_model.record.model_copy(update={"reward_mean": 0.25, "reward_std": 0.5, "num_eval": 64})
    completions = ["$4$", "$5$", "well, two and two are, as everybody knows, $4$"]
    async with serving(tmp_path, MATH_GATE, model) as (client, _):
        status, answer = await post(client, {"prompt": "2 + 2 = ", "completions": completions, "reference": 4})
    assert status == 200, answer
    ids = [tiny_model.renderer.render("2 + 2 = ", text) for text in completions]
    raw = tiny_model.score_batch(ids).rewards
    standardised = [(float(value) - 0.25) / 0.5 for value in raw]
    components = answer["components"]
    assert components["model"] == pytest.approx(standardised, abs=1e-3)
    assert components["answer"] == [1.0, 0.0, 1.0]
    assert components["length"] == [0.0, 0.0, -1.0]
    gated = [components["model"][0], -3.0, components["model"][2] - 0.5]
    assert answer["rewards"] == pytest.approx(gated, abs=1e-12)


Served = tuple[httpx.AsyncClient, ScoringService]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def math_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """Loading math-verify takes seconds: the tests of this server share one, and its event loop."""
    async with serving(tmp_path_factory.mktemp("math"), MATH_ONLY) as served:
        yield served


@pytest.mark.asyncio(loop_scope="module")
async def test_server_with_verifiers_only_scores_without_a_model(math_server: Served) -> None:
    client, service = math_server
    assert (await client.get("/ready")).status_code == 200
    body = {"prompt": "2 + 2 = ", "completions": ["$4$", "$5$", "four"], "reference": 4}
    status, answer = await post(client, body)
    assert status == 200, answer
    assert answer["rewards"] == [1.0, 0.0, 0.0]
    assert answer["components"] == {"answer": [1.0, 0.0, 0.0]}
    assert answer["usage"] == {"tokens": 0, "computed_tokens": 0}
    info = (await client.get("/info")).json()
    assert (info["model_reward_id"], info["rendering"], info["dtype"]) == (None, None, "none")
    assert info["reward_id"] == answer["reward_id"]
    assert (await client.get("/metrics")).status_code == 200
    assert (await post(client, {"texts": []}))[1]["rewards"] == []
    assert service.metrics.registry.get_sample_value("rm_verifier_seconds_count", {"part": "answer"}) == 3


@pytest.mark.asyncio(loop_scope="module")
async def test_64_requests_at_once_get_what_each_would_get_alone(math_server: Served) -> None:
    client, _ = math_server

    async def ask(number: int) -> Any:
        completions = [f"so ${number}$", f"$\\frac{{{2 * number}}}{{2}}$", f"$-{number + 1}$"]
        return await post(client, {"prompt": "?", "completions": completions, "reference": f"${number}$"})

    answers = await asyncio.gather(*(ask(number) for number in range(64)))
    assert [status for status, _ in answers] == [200] * 64
    assert [answer["rewards"] for _, answer in answers] == [[1.0, 1.0, 0.0]] * 64


async def test_verifier_at_its_limit_costs_its_item_and_never_gives_0(tmp_path: Path) -> None:
    hangs = "a" * 100 + "b"
    async with serving(tmp_path, QUICK) as (client, service):
        status, answer = await post(client, {"prompt": "?", "completions": ["aaa", hangs, "aab"]})
        assert status == 200
        assert answer["rewards"] == [1.0, None, 0.0]
        assert answer["components"] == {"form": [1.0, None, 0.0], "size": [1.0, 1.0, 1.0]}
        assert answer["errors"] == [
            {
                "index": [1],
                "type": "verifier_timeout",
                "message": "completions[1]: form: took longer than its limit of 1 s",
                "retryable": False,
            }
        ]
        status, answer = await post(client, {"prompt": "?", "completions": [hangs]})
        assert (status, answer["error"]["type"]) == (500, "verifier_timeout")
        assert service.metrics.registry.get_sample_value("rm_verifier_workers_replaced_total") == 2


async def test_item_not_verified_before_its_deadline_says_so(tmp_path: Path) -> None:
    recipe = QUICK.replace("timeout_seconds: 1}", "timeout_seconds: 600}")
    async with serving(tmp_path, recipe) as (client, service):
        body = {"prompt": "?", "completions": ["aaa", "a" * 100 + "b"], "deadline_ms": 1500}
        status, answer = await post(client, body)
        assert (status, answer["rewards"]) == (200, [1.0, None])
        assert answer["errors"][0]["type"] == "deadline_exceeded"
        assert service.num_open == 0
        assert service.rewards is not None
        assert service.rewards.num_items == 0


async def test_model_error_is_the_items_error_and_is_not_needed_behind_a_closed_gate(
    tmp_path: Path, measured: Any
) -> None:
    measured.nan_for = lambda ids: len(ids) > 1  # not for the probe at the start
    body = {"prompt": "?", "completions": ["\\boxed{1}", "1"], "reference": 1}
    async with serving(tmp_path, MIXED, measured) as (client, _):
        status, answer = await post(client, body)
    assert (status, answer["rewards"]) == (200, [None, -2.0])
    assert answer["errors"][0]["type"] == "non_finite_reward"
    assert answer["components"]["model"] == [None, None]


@pytest.mark.asyncio(loop_scope="module")
async def test_missing_reference_is_asked_for_by_name(math_server: Served) -> None:
    client, _ = math_server
    status, answer = await post(client, {"groups": [{"prompt": "?", "completions": ["$1$"]}]})
    assert status == 422
    assert answer["error"]["message"] == "groups[0].completions[0]: answer: reference: is required"
    status, answer = await post(client, {"input_ids": [[1, 2]]})
    assert status == 422
    assert "input_ids[0]: this server's verifiers read text" in answer["error"]["message"]
    status, answer = await post(client, {"texts": ["$1$"], "reference": 1})
    says = "reference: belongs to prompt + completions, or to one of groups"
    assert (status, answer["error"]["message"]) == (422, says)


@pytest.mark.asyncio(loop_scope="module")
async def test_other_trainers_routes_answer_with_the_recipes_reward(math_server: Served) -> None:
    client, service = math_server
    assert service.model is not None
    body = {"query": ["2 + 2 = $4$", "2 + 2 = $5$"], "prompts": ["2 + 2 = "] * 2, "labels": ["4", "4"]}
    answer = (await client.post("/get_reward", json=body)).json()
    assert answer["rewards"] == answer["scores"] == [1.0, 0.0]
    assert answer["extra_logs"]["rm_answer"] == [1.0, 0.0]
    response = await client.post("/get_reward", json=body | {"labels": ["4"]})
    assert response.status_code == 422
    assert "labels: there are 1 of them for 2 texts" in response.json()["error"]["message"]
    one = {"prompt": "2 + 2 = ", "response": "$4$", "label": 4}
    assert (await client.post("/reward", json=one)).json() == 1.0
    answer = (await client.post("/reward?form=object", json=one)).json()
    assert (answer["score"], answer["components"]) == (1.0, {"answer": 1.0})
    assert answer["reward_id"] == service.model.reward_id


async def test_reference_that_nothing_compares_with_is_refused_by_name(tmp_path: Path) -> None:
    async with serving(tmp_path, QUICK) as (client, _):
        status, answer = await post(client, {"groups": [{"prompt": "?", "completions": ["a"], "reference": "x"}]})
        assert status == 422
        assert answer["error"]["message"].startswith("groups[0].reference: is not supported by this server")


async def test_too_many_items_at_once_are_refused_as_overload(tmp_path: Path, eventually: Any) -> None:
    recipe = QUICK.replace("timeout_seconds: 1}", "timeout_seconds: 600}")
    async with serving(tmp_path, recipe, max_queued_items=3) as (client, service):
        slow = asyncio.create_task(
            post(client, {"prompt": "?", "completions": ["a" * 100 + "b"] * 2, "deadline_ms": 3000})
        )
        assert service.rewards is not None
        rewards = service.rewards
        await eventually(lambda: rewards.num_items == 2)
        status, answer = await post(client, {"prompt": "?", "completions": ["a", "a"]})
        assert (status, answer["error"]["type"]) == (503, "overloaded")
        await slow


def test_checkpoint_and_recipe_must_belong_together(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(MIXED)
    with pytest.raises(SettingsError, match=r"recipe\.yaml: parts\.model: needs a reward model; give a CHECKPOINT"):
        ScoringService(ServerSettings(recipe=str(path)))
    path.write_text(QUICK)
    with pytest.raises(SettingsError, match="no part is of kind model, so CHECKPOINT would score nothing"):
        ScoringService(ServerSettings(checkpoint="x", recipe=str(path)))


async def test_standardising_needs_the_checkpoints_spread(tmp_path: Path, fake: Any) -> None:
    with pytest.raises(SettingsError, match=r"parts\.model\.standardise: the checkpoint stores no spread"):
        async with serving(tmp_path, MIXED, fake):
            pass


def test_verifiers_read_the_answer_alone_without_its_end_token(fake: Any) -> None:
    user, said = (
        Message(role="user", content="2 + 2"),
        Message(role="assistant", content=[{"type": "text", "text": "4"}]),
    )
    for item, answer in [
        (ItemInput("x", "4", "2 + 2 = ", reference=4), Answer("4", 4)),
        (ItemInput("x", [user, said]), Answer("4")),
        (ItemInput("x", [Message(role="assistant")]), Answer("")),
        (ItemInput("x", "4", finished=False), Answer("4", finished=False)),
        (ItemInput("x", "4<|im_end|>", finished=None, is_templated=True), Answer("4")),
        (ItemInput("x", "4", finished=None, is_templated=True), Answer("4", finished=False)),
        (ItemInput("x", "2 + 2 = 4<|im_end|>", answer="4<|im_end|>", is_templated=True), Answer("4")),
    ]:
        assert answer_of(item, fake) == answer
    assert answer_of(ItemInput("x", "4<|im_end|>"), fake, is_templated=True) == Answer("4")


# ------------------------------------------------------------------ as a process

WITHOUT_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "peft", "datasets"):
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)
sys.meta_path.insert(0, NoTorch())
from rm_server.cli import main
import atexit
atexit.register(lambda: print("torch" in sys.modules, flush=True))
main(sys.argv[1:])
"""


def children_of(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found += [int(folder.name), *children_of(int(folder.name))]
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_process_with_verifiers_only_needs_no_torch_and_leaves_no_process(tmp_path: Path, number: int) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(QUICK.replace("timeout_seconds: 1}", "timeout_seconds: 600}"))
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_TORCH, "--recipe", str(path), "--port", "0", "--grace-seconds", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("rm-server ready on http://"), process.communicate(timeout=60)
        url = line.split()[-1]
        answer = httpx.post(f"{url}/score", json={"prompt": "?", "completions": ["aaa", "aab"]}, timeout=60).json()
        assert answer["rewards"] == [1.0, 0.0]
        children = children_of(process.pid)
        assert len(children) >= 2
        body = json.dumps({"prompt": "?", "completions": ["a" * 100 + "b"], "deadline_ms": 500})
        hung = httpx.post(f"{url}/score", content=body, timeout=60)
        assert hung.json()["error"]["type"] == "deadline_exceeded"  # and its worker is still busy
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    if number == signal.SIGTERM:
        assert (process.returncode, out) == (0, "False\n"), err
    assert "Traceback" not in err
    while any(is_running(pid) for pid in children):
        pass


def is_running(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_process_whose_recipe_is_wrong_says_so_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("parts: {a: {kind: maths}}\nreward: a\n")
    result = subprocess.run(
        [sys.executable, "-m", "rm_server.cli", "--recipe", str(path), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"rm-server: error: {path}: parts.a.kind: must be one of model, math,")
    assert result.stderr.count("\n") == 1
