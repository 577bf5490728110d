from collections.abc import Callable
from typing import Any

import orjson
import pytest

from rm_client.advantages import grpo_advantages

Serve = Callable[..., Any]
MESSAGES = [{"role": "user", "content": "hi"}]


async def post(client: Any, body: Any) -> tuple[int, dict[str, Any]]:
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    response = await client.post("/score", content=content)
    return response.status_code, response.json()


async def test_one_group_of_text_is_scored_in_order(fake: Any, serve: Serve, score_of: Any) -> None:
    async with serve(fake) as (client, _):
        status, answer = await post(client, {"prompt": "two + two = ", "completions": ["4", "5", "four"]})
    assert status == 200
    assert answer["rewards"] == [score_of(fake.renderer.render("two + two = ", text)) for text in ("4", "5", "four")]
    assert answer["truncated"] == [False, False, False]
    assert answer["reward_id"] == fake.reward_id
    assert answer["model"] == "fake"
    assert answer["usage"] == {"tokens": 45, "computed_tokens": 45}, "12 shared tokens are too few to share"
    assert set(answer["timing"]) == {"queue_ms", "tokenize_ms", "forward_ms"}
    assert "errors" not in answer
    assert "advantages" not in answer


async def test_every_form_of_input_gives_the_ids_of_the_renderer(fake: Any, serve: Serve, score_of: Any) -> None:
    render, conversation = fake.renderer.render, [*MESSAGES, {"role": "assistant", "content": "hello"}]
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"texts": ["a b", "c"]}, [fake.renderer.render_text("a b"), fake.renderer.render_text("c")]),
        ({"texts": ["a"], "text_as": "chat"}, [fake.renderer.render_text("a", text_as="chat")]),
        ({"conversations": [conversation]}, [fake.renderer.render_conversation(conversation)]),
        ({"input_ids": [[1, 2, 3], [4]]}, [[1, 2, 3], [4]]),
        ({"prompt": MESSAGES, "completions": ["hello"]}, [render(MESSAGES, "hello")]),
        ({"prompt": MESSAGES, "completions": [conversation[1:]]}, [render(MESSAGES, "hello")]),
        (
            {"prompt": "a", "completions": [{"content": "b", "finished": False}, {"content": "b"}]},
            [render("a", "b", finished=False), render("a", "b")],
        ),
        (
            {"prompt": MESSAGES, "completions": [{"content": conversation[1:], "finished": False}]},
            [render(MESSAGES, "hello", finished=False)],
        ),
    ]
    async with serve(fake) as (client, _):
        for body, ids in cases:
            status, answer = await post(client, body)
            assert (status, answer.get("rewards")) == (200, [score_of(sequence) for sequence in ids]), body


async def test_groups_keep_their_shape_and_names(fake: Any, serve: Serve) -> None:
    body = {
        "groups": [
            {"id": "a", "prompt": "p", "completions": ["1", "2", "3"]},
            {"prompt": "q", "completions": []},
            {"prompt": MESSAGES, "completions": ["4"]},
        ],
        "advantages": {"scale": "none"},
    }
    async with serve(fake) as (client, _):
        status, answer = await post(client, body)
    assert status == 200
    assert [len(row) for row in answer["rewards"]] == [3, 0, 1]
    assert answer["truncated"] == [[False] * 3, [], [False]]
    assert answer["ids"] == ["a", None, None]
    mean = sum(answer["rewards"][0]) / 3
    assert answer["advantages"][0] == pytest.approx([reward - mean for reward in answer["rewards"][0]])
    assert answer["advantages"][1:] == [[], [0.0]]


async def test_advantages_of_a_flat_list_are_those_of_one_group(fake: Any, serve: Serve) -> None:
    options = {"scale": "std", "ddof": 0, "eps": 0.0}
    async with serve(fake) as (client, _):
        _, answer = await post(client, {"input_ids": [[1], [2], [3, 4]], "advantages": options})
    assert answer["advantages"] == grpo_advantages([answer["rewards"]], **options)[0]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "p", "completions": []}, []),
        ({"texts": [], "advantages": {}}, []),
        ({"conversations": []}, []),
        ({"input_ids": []}, []),
        ({"groups": []}, []),
        ({"groups": [{"prompt": "p", "completions": []}], "advantages": {"scale": "batch"}}, [[]]),
    ],
)
async def test_empty_lists_are_answered_with_empty_lists(
    fake: Any, serve: Serve, body: dict[str, Any], expected: list[Any]
) -> None:
    async with serve(fake) as (client, _):
        status, answer = await post(client, body)
    assert (status, answer["rewards"]) == (200, expected)
    assert answer.get("advantages", expected) == expected
    assert answer["usage"] == {"tokens": 0, "computed_tokens": 0}


async def test_part_failure_keeps_the_other_rewards(fake: Any, serve: Serve, score_of: Any, sample: Any) -> None:
    fake.nan_for = lambda ids: ids == [7, 7]
    async with serve(fake, max_length=16) as (client, service):
        status, answer = await post(client, {"input_ids": [[1, 2], [7, 7], [9] * 17, [3, 300], [], [5]]})
        assert sample(service, "rm_items_non_finite_total") == 1
        assert sample(service, "rm_items_failed_total", reason="too_long") == 1
        assert sample(service, "rm_items_scored_total") == 2
    assert status == 200
    assert answer["rewards"] == [score_of([1, 2]), None, None, None, None, score_of([5])]
    found = [(error["index"], error["type"], error["retryable"]) for error in answer["errors"]]
    assert found == [
        ([1], "non_finite_reward", False),
        ([2], "too_long", False),
        ([3], "invalid_request", False),
        ([4], "invalid_request", False),
    ]
    messages = [error["message"] for error in answer["errors"]]
    assert "NaN" in messages[0]
    assert messages[1].startswith("input_ids[2]: 17 tokens are over the limit of 16")
    assert messages[2] == "input_ids[3][1]: 300 is not a token id of this model (0 to 299)"
    assert messages[3].startswith("input_ids[4]: is empty")


async def test_missing_reward_has_advantage_zero_and_does_not_shift_the_others(fake: Any, serve: Serve) -> None:
    async with serve(fake) as (client, _):
        _, whole = await post(client, {"input_ids": [[1], [2]], "advantages": {}})
        _, holed = await post(client, {"input_ids": [[1], [], [2]], "advantages": {}})
    assert holed["advantages"] == [whole["advantages"][0], 0, whole["advantages"][1]]


async def test_when_every_item_fails_the_answer_is_their_error(fake: Any, serve: Serve) -> None:
    async with serve(fake, max_length=4) as (client, _):
        status, answer = await post(client, {"groups": [{"prompt": "x", "completions": ["too long", "also too long"]}]})
    assert status == 422
    assert answer["error"]["type"] == "too_long"
    assert answer["error"]["message"].startswith("groups[0].completions[0]: ")
    assert [error["index"] for error in answer["errors"]] == [[0, 0], [0, 1]]


async def test_truncation_left_keeps_the_end_and_says_so(fake: Any, serve: Serve, score_of: Any, sample: Any) -> None:
    async with serve(fake, max_length=4) as (client, service):
        status, answer = await post(client, {"input_ids": [[1, 2, 3, 4, 5], [1, 2]], "truncation": "left"})
        assert sample(service, "rm_items_truncated_total") == 1
    assert (status, answer["rewards"]) == (200, [score_of([2, 3, 4, 5]), score_of([1, 2])])
    assert answer["truncated"] == [True, False]
    assert answer["usage"]["tokens"] == 6


async def test_sequences_longer_than_in_training_are_scored_marked_and_counted(
    fake: Any, tiny_model: Any, serve: Serve, sample: Any
) -> None:
    fake.record = tiny_model.record
    long = [1] * (tiny_model.record.training_length + 1)
    async with serve(fake) as (client, service):
        status, answer = await post(client, {"input_ids": [[1], long]})
        assert sample(service, "rm_items_over_training_length_total") == 1
    assert status == 200
    assert answer["over_training_length"] == [[1]]
    assert None not in answer["rewards"]


async def test_pins_are_checked(fake: Any, serve: Serve) -> None:
    async with serve(fake) as (client, _):
        good = {"input_ids": [[1]], "reward_id": fake.reward_id, "tokenizer": fake.tokenizer_hash}
        assert (await post(client, good))[0] == 200
        status, answer = await post(client, {**good, "reward_id": "sha256:other"})
        assert (status, answer["error"]["type"], answer["error"]["retryable"]) == (409, "reward_id_mismatch", False)
        status, answer = await post(client, {**good, "tokenizer": "sha256:other"})
        assert (status, answer["error"]["type"]) == (409, "tokenizer_mismatch")


async def test_usage_counts_a_shared_prompt_once(fake: Any, serve: Serve) -> None:
    prompt = list(range(100))
    async with serve(fake) as (client, _):
        _, answer = await post(client, {"input_ids": [[*prompt, 200 + n] for n in range(8)]})
    assert answer["usage"] == {"tokens": 808, "computed_tokens": 108}


async def test_other_routes_say_what_they_are_for(fake: Any, tiny_model: Any, serve: Serve) -> None:
    fake.record = tiny_model.record
    async with serve(fake) as (client, _):
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/ready")).json() == {"status": "ready"}
        info = (await client.get("/info")).json()
        assert (await client.get("/docs")).status_code == 200
        assert (await client.get("/openapi.json")).json()["paths"].keys() >= {"/score", "/v1/score", "/info"}
        assert "rm_forward_seconds_bucket" in (await client.get("/metrics")).text
        assert (await client.post("/v1/score", json={"input_ids": [[1]]})).status_code == 200
    record = tiny_model.record
    assert info["reward_id"] == fake.reward_id
    assert info["tokenizer_hash"] == fake.tokenizer_hash
    assert info["training_length"] == record.training_length
    assert (info["reward_mean"], info["reward_std"]) == (record.reward_mean, record.reward_std)
    assert info["rendering"]["end"] == record.rules.end
    assert info["dtype_reason"]
    assert info["limits"]["max_batch_tokens"] == 12288
    assert "raw" in info["squashing"]
