"""Two replicas on Ray Serve answer as one server does, whatever happens to a replica or to the checkpoint meanwhile."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from rm_client import RewardClient, ScoreResult
from rm_core.model import RewardModel
from rm_server.settings import ServerSettings
from tests.conftest import make_checkpoint, save_base
from tests.server.conftest import running
from tests.server.ray_cluster import ROOT, Cluster, cluster

pytest.importorskip("ray", reason="the package ray[serve] is not installed")
pytestmark = pytest.mark.slow

NUM_THREADS = 8
ROUND_ROBIN = {"request_router_class": "ray.serve.experimental.round_robin_router:RoundRobinRouter"}
Item = tuple[Any, str]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two reward models that differ, with room for real conversations."""
    folder = tmp_path_factory.mktemp("ray")
    base = [save_base(folder / f"base{seed}", seed=seed, max_position_embeddings=8192) for seed in (0, 5)]
    return make_checkpoint(folder / "first", base[0]), make_checkpoint(folder / "second", base[1])


@pytest.fixture(scope="module")
def ray(checkpoints: tuple[Path, Path]) -> Iterator[Cluster]:
    with cluster() as started:
        started.deploy(application(checkpoints[0]))
        yield started


def application(args_checkpoint: Path, **changes: Any) -> dict[str, Any]:
    """The application of deploy/ray/serve.yaml, with two replicas of a tiny model on the CPU."""
    (found,) = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text(encoding="utf-8"))["applications"]
    found["args"] = {"checkpoint": str(args_checkpoint), "num_replicas": 2, "dtype": "float32", "device": "cpu"}
    found["deployments"] = [
        {"name": "Scorer", "user_config": {"checkpoint": str(args_checkpoint)}, **changes.pop("scorer", {})}
    ]
    return {**found, **changes}


def pairs(path: Path, number: int) -> list[Item]:
    """Real prompts, each with its two answers."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    items = [(row["prompt"], row[side][-1]["content"]) for row in rows for side in ("chosen", "rejected")]
    return items[:number]


def score_each(url: str, items: list[Item], *, num_threads: int = NUM_THREADS, **options: Any) -> list[ScoreResult]:
    """One request for each answer, as many trainers send them."""
    with RewardClient(url, **options) as client, ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(lambda item: client.score(item[0], [item[1]]), items))


def ask_one_server(checkpoint: Path, calls: list[tuple[str, str, Any]]) -> list[httpx.Response]:
    """What one server in this process answers to (method, URL, body)."""

    async def ask() -> list[httpx.Response]:
        async with running(RewardModel.load(str(checkpoint), dtype="float32", device="cpu")) as (client, _):
            headers = {"X-Request-ID": "mine"}
            return [await client.request(method, url, json=body, headers=headers) for method, url, body in calls]

    return asyncio.run(ask())


def scores_of_one_server(checkpoint: Path, items: list[Item]) -> np.ndarray[Any, Any]:
    groups = [{"prompt": prompt, "completions": [answer]} for prompt, answer in items]
    (answer,) = ask_one_server(checkpoint, [("POST", "/score", {"groups": groups})])
    return np.array([reward for (reward,) in answer.json()["rewards"]])


def assert_same_scores(ray: Cluster, checkpoint: Path, items: list[Item]) -> None:
    before = ray.samples("rm_items_scored_total")
    found = np.array([result.rewards[0] for result in score_each(ray.url, items)])
    wanted = scores_of_one_server(checkpoint, items)
    difference = np.abs(found - wanted).max()
    print(f"{len(items)} items: at most {difference:.1e} apart, at a spread of {wanted.std():.2f}")
    assert difference <= 1e-4 * max(wanted.std(), 1)
    shares = [value - before.get(labels, 0) for labels, value in ray.samples("rm_items_scored_total").items()]
    assert len(shares) == 2
    assert sum(shares) == len(items)
    assert min(shares) > len(items) / 10, "each replica had its part"


class Counting(httpx.HTTPTransport):
    """Counts the answers of each status."""

    def __init__(self) -> None:
        super().__init__()
        self.statuses: list[int] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        self.statuses.append(response.status_code)
        return response


def under_load(
    ray: Cluster, items: list[Item], happening: Callable[[], None]
) -> tuple[list[tuple[int, ScoreResult]], list[int]]:
    """Answers to the items, again and again, from before something happens until after it; and every status seen."""
    counting, is_over = Counting(), False
    with RewardClient(ray.url, transport=counting) as client, ThreadPoolExecutor(NUM_THREADS) as pool:

        def keep_asking(number: int) -> list[tuple[int, ScoreResult]]:
            found = []
            while not is_over:
                prompt, answer = items[number % len(items)]
                found.append((number % len(items), client.score(prompt, [answer])))
                number += NUM_THREADS
            return found

        asking = [pool.submit(keep_asking, first) for first in range(NUM_THREADS)]
        try:
            ray.until(lambda: len(counting.statuses) > 4 * NUM_THREADS)
            happening()
            seen = len(counting.statuses)
            ray.until(lambda: len(counting.statuses) > seen + 4 * NUM_THREADS)
        finally:
            is_over = True
        return [pair for future in asking for pair in future.result()], counting.statuses


# ------------------------------------------------------------------ the same answers


def test_two_replicas_give_the_scores_of_one_server(ray: Cluster, checkpoints: tuple[Path, Path]) -> None:
    items = pairs(ROOT / "data" / "demo_heldout.jsonl", 200) + pairs(ROOT / "data" / "demo_train.jsonl", 40)
    assert_same_scores(ray, checkpoints[0], items)


@pytest.mark.long
def test_two_replicas_give_the_scores_of_one_server_on_2000_items(
    ray: Cluster, checkpoints: tuple[Path, Path], shared_data: Callable[[str], Path]
) -> None:
    assert_same_scores(ray, checkpoints[0], pairs(shared_data("hh_harmless.jsonl"), 2000))


def test_every_route_answers_through_ray_as_it_does_alone(ray: Cluster, checkpoints: tuple[Path, Path]) -> None:
    calls: list[tuple[str, str, Any]] = [
        ("POST", "/score", {"prompt": "2 + 2 = ", "completions": ["4", "5"], "advantages": {}}),
        ("POST", "/v1/score", {"texts": ["a", "b"]}),
        ("POST", "/get_reward", {"query": ["2 + 2 = 4"], "prompts": ["2 + 2 = "], "labels": [None]}),
        ("POST", "/get_reward", {"query": [], "prompts": [], "labels": []}),
        ("POST", "/reward", {"prompt": "2 + 2 = ", "response": "4", "label": None}),
        ("POST", "/reward?form=object", {"prompt": "2 + 2 = ", "response": "4"}),
        ("POST", "/classify", {"model": "m", "input": "2 + 2 = 4", "use_activation": False}),
        ("POST", "/classify", {"text": ["2 + 2 = 4", "5"]}),
        ("POST", "/v1/embeddings", {"model": "m", "input": "2 + 2 = 4"}),
        ("POST", "/v1/score/evaluation", {"model": "m", "messages": ["2 + 2 = 4"]}),
        ("GET", "/info", None),
        ("GET", "/health", None),
        ("GET", "/ready", None),
        ("GET", "/openapi.json", None),
        ("GET", "/", None),
        ("GET", "/ui/app.js", None),
        ("GET", "/ui/checkpoint", None),
        ("POST", "/score", {"prompt": 1}),
        ("POST", "/score", "no object"),
        ("PUT", "/score", {}),
        ("GET", "/nowhere", None),
    ]
    volatile = {"timing", "id", "created", "request_id", "meta_info", "dtype_reason"}

    def stable(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: stable(inner) for name, inner in value.items() if name not in volatile}
        if isinstance(value, list):
            return [stable(inner) for inner in value]
        return round(value, 3) if isinstance(value, float) else value

    for (method, url, body), wanted in zip(calls, ask_one_server(checkpoints[0], calls), strict=True):
        found = httpx.request(method, ray.url + url, json=body, headers={"X-Request-ID": "mine"}, timeout=60)
        assert found.status_code == wanted.status_code, (url, found.text)
        if "json" in wanted.headers["content-type"]:
            assert stable(found.json()) == stable(wanted.json()), url
        else:
            assert found.content == wanted.content, url
        assert found.headers["content-type"] == wanted.headers["content-type"]
        assert found.headers.get_list("x-request-id") == ["mine"], url


@pytest.mark.parametrize("seconds", [3, 13])
def test_the_live_page_is_given_its_events(ray: Cluster, seconds: int) -> None:
    """Longer than a replica is asked at a time, too: the events go on."""
    started, times = time.monotonic(), []
    with httpx.stream("GET", f"{ray.url}/ui/live", timeout=60) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: "):
                times.append(json.loads(line.removeprefix("data: "))["time"])
            if time.monotonic() - started > seconds:
                break
    assert seconds - 1 <= len(times) <= 2 * seconds + 2
    assert times == sorted(times)
    assert times[-1] - times[0] > seconds - 2
    refused = httpx.post(f"{ray.url}/ui/live", timeout=60)
    assert refused.status_code == 405


def test_what_is_not_json_is_refused_in_the_servers_own_words(ray: Cluster) -> None:
    found = httpx.post(f"{ray.url}/score", content=b"nope", timeout=60)
    assert found.status_code == 400
    assert found.json()["error"]["type"] == "invalid_request"
    too_large = httpx.post(f"{ray.url}/score", content=b" " * (ServerSettings(checkpoint="x").max_body_bytes + 1))
    assert (too_large.status_code, too_large.json()["error"]["type"]) == (413, "too_large")


def test_one_replica_alone_cannot_be_changed(ray: Cluster) -> None:
    found = httpx.post(f"{ray.url}/admin/checkpoint", json={"checkpoint": "/elsewhere"}, timeout=60)
    assert found.status_code == 403
    assert "user_config.checkpoint" in found.json()["error"]["message"]


def test_metrics_are_those_of_all_replicas(ray: Cluster) -> None:
    text = httpx.get(f"{ray.url}/metrics", timeout=60).text
    assert text.count("# TYPE rm_ready gauge") == 1
    assert list(ray.samples("rm_ready").values()) == [1.0, 1.0]


def test_a_caller_who_leaves_is_noticed_by_the_replica(ray: Cluster) -> None:
    texts = [f"{number} " + "a long text that takes its time " * 60 for number in range(400)]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{ray.url}/score", json={"texts": texts}, timeout=httpx.Timeout(60, read=0.5))
    ray.until(lambda: sum(ray.samples("rm_requests_cancelled_total").values()) == 1)


# ------------------------------------------------------------------ prefixes


def test_prefix_routing_computes_fewer_tokens_than_round_robin(ray: Cluster, checkpoints: tuple[Path, Path]) -> None:
    first = application(checkpoints[0])
    other = application(
        checkpoints[0], name="robin", route_prefix="/robin", scorer={"request_router_config": ROUND_ROBIN}
    )
    rows = pairs(ROOT / "data" / "demo_train.jsonl", 400)
    prompts = [" ".join(answer for _, answer in rows[start : start + 12]) for start in range(0, 180, 12)]
    answers = [answer for _, answer in rows[200:208]]
    # Each round brings one answer to every prompt, one after the other. The number of prompts is odd, so taking turns
    # brings a prompt to the other replica in the next round.
    items = [(prompt, answer) for answer in answers for prompt in prompts]
    ray.deploy(first, other)
    saved = {}
    for name, url in (("prefix", ray.url), ("round robin", f"{ray.url}/robin")):
        usage = [result.usage for result in score_each(url, items, num_threads=1)]
        saved[name] = 1 - sum(used.computed_tokens for used in usage) / sum(used.tokens for used in usage)
    ray.deploy(first)
    print({name: round(share, 3) for name, share in saved.items()})
    assert saved["prefix"] > saved["round robin"] + 0.05


# ------------------------------------------------------------------ what happens meanwhile


def test_a_killed_replica_costs_no_answer_and_comes_back(ray: Cluster, checkpoints: tuple[Path, Path]) -> None:
    items = pairs(ROOT / "data" / "demo_heldout.jsonl", 120)
    wanted = scores_of_one_server(checkpoints[0], items)
    before = set(ray.ask()["replicas"])

    def happening() -> None:
        ray.ask("kill")
        ray.until(lambda: len(set(ray.ask()["replicas"]) - before) == 1 and ray.is_running())

    results, statuses = under_load(ray, items, happening)
    print(f"{len(results)} answers; {len(statuses) - statuses.count(200)} requests were tried again")
    assert all(abs(result.rewards[0] - wanted[index]) < 1e-3 for index, result in results)
    assert len(results) == statuses.count(200), "every request got its answer"
    assert set(statuses) <= {200, 503}
    assert len(ray.ask()["replicas"]) == 2


def test_the_checkpoint_changes_under_load_without_a_lost_request(ray: Cluster, checkpoints: tuple[Path, Path]) -> None:
    items = pairs(ROOT / "data" / "demo_heldout.jsonl", 80)
    ids = [json.loads((path / "reward_model.json").read_text(encoding="utf-8"))["reward_id"] for path in checkpoints]
    wanted = {reward_id: scores_of_one_server(path, items) for reward_id, path in zip(ids, checkpoints, strict=True)}
    second = application(checkpoints[0], scorer={"user_config": {"checkpoint": str(checkpoints[1])}})
    replicas = set(ray.ask()["replicas"])
    results, statuses = under_load(ray, items, lambda: ray.deploy(second))
    try:
        assert set(statuses) == {200}, "no request was refused or lost"
        assert {result.reward_id for _, result in results} == set(ids)
        assert all(abs(result.rewards[0] - wanted[result.reward_id][index]) < 1e-3 for index, result in results)
        assert set(ray.ask()["replicas"]) == replicas, "none was restarted"
        assert {result.reward_id for result in score_each(ray.url, items)} == {ids[1]}
    finally:
        ray.deploy(application(checkpoints[0]))


@pytest.mark.long
def test_a_checkpoint_that_cannot_be_served_leaves_the_other_replica_at_work(
    ray: Cluster, checkpoints: tuple[Path, Path]
) -> None:
    items = pairs(ROOT / "data" / "demo_heldout.jsonl", 20)
    reward_id = json.loads((checkpoints[0] / "reward_model.json").read_text(encoding="utf-8"))["reward_id"]
    ray.submit(application(checkpoints[0], scorer={"user_config": {"checkpoint": "/nowhere"}}))
    try:
        ray.until(lambda: ray.ask()["applications"]["betterthan"][0] in ("DEPLOY_FAILED", "UNHEALTHY"))
        assert {result.reward_id for result in score_each(ray.url, items)} == {reward_id}
    finally:
        ray.deploy(application(checkpoints[0]))
    assert len(ray.samples("rm_ready")) == 2


@pytest.mark.long
def test_queued_tokens_bring_another_replica(ray: Cluster, checkpoints: tuple[Path, Path]) -> None:
    """As the builder sets it up, but without the half minute that Ray waits by default before it acts."""
    policy = {
        "policy_function": "rm_server.ray_routing:QueuedTokensPolicy",
        "policy_kwargs": {"tokens_per_replica": 2000},
    }
    quick = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 1, "look_back_period_s": 11, "policy": policy}
    scaled = application(checkpoints[0], name="scaled", route_prefix="/scaled", scorer={"autoscaling_config": quick})
    scaled["args"] |= {"num_replicas": 1, "max_replicas": 2, "queued_tokens_per_replica": 2000}
    ray.deploy(application(checkpoints[0]), scaled)
    try:
        assert len(ray.samples("rm_ready", "/scaled")) == 1
        texts = [f"{number} " + "many words and many more " * 150 for number in range(40)]
        with ThreadPoolExecutor(NUM_THREADS) as pool, RewardClient(f"{ray.url}/scaled") as client:

            def there_are_two() -> bool:
                assert all(result.rewards for result in pool.map(lambda text: client.score_texts([text]), texts))
                return len(ray.samples("rm_ready", "/scaled")) == 2

            ray.until(there_are_two)
    finally:
        ray.deploy(application(checkpoints[0]))
