"""Hostile and mistaken requests: the answer names the field, quotes nothing, and is never a 500."""

import logging
from collections.abc import Callable
from typing import Any

import orjson
import pytest

Serve = Callable[..., Any]
SECRET = "the-secret-of-the-caller"

BAD = [
    (b"", 400, "JSON"),
    (b"{", 400, "line 1, column 2 (position 1)"),
    (b'{"texts": ["\xff\xfe"]}', 400, "invalid byte at position 12"),
    (b'{"texts": ["\\ud800"]}', 400, "position"),
    (b'{"input_ids": [[NaN]]}', 400, "position"),
    (b'{"input_ids": [[1e999]]}', 400, "position"),
    (b"[" * 3000 + b"]" * 3000, 400, "depth"),
    (b"[]", 422, "an array"),
    (b"null", 422, "null"),
    (b"{}", 422, "exactly one of"),
    ({"texts": ["a"], "input_ids": [[1]]}, 422, "texts and input_ids"),
    ({"prompt": "a"}, 422, "completions: is required beside prompt"),
    ({"completions": ["a"]}, 422, "prompt: is required beside completions"),
    ({"prompt": "", "completions": ["x"]}, 422, "prompt: must not be empty"),
    ({"prompt": [], "completions": ["x"]}, 422, "prompt: must not be empty"),
    ({"prompt": 5, "completions": ["x"]}, 422, "prompt: must be a text or a list of messages"),
    ({"prompt": "x", "completions": SECRET}, 422, "completions: must be a list"),
    ({"prompt": "x", "completions": [None]}, 422, "completions[0]: must be a text, a list of messages"),
    ({"prompt": "x", "completions": ["a", [{"role": 1, "content": SECRET}]]}, 422, "completions[1][0].role: must be"),
    (
        {"prompt": "x", "completions": [{"content": SECRET, "finished": "no"}]},
        422,
        "completions[0].finished: must be true",
    ),
    ({"prompt": "x", "completions": [{"text": SECRET}]}, 422, "completions[0].content: is required"),
    ({"prompt": [{"role": "user", "content": 5}], "completions": ["a"]}, 422, "prompt[0].content: must be a text or"),
    (
        {"prompt": [{"role": "user", "content": "x", "weight": 1}], "completions": ["a"]},
        422,
        "prompt[0].weight: unknown",
    ),
    (
        {"groups": [{"prompt": "x", "completions": [], "reference": SECRET}]},
        422,
        "groups[0].reference: is not supported",
    ),
    ({"texts": ["a"], "recipe": SECRET}, 422, "recipe: is not supported"),
    ({"texts": ["a"], "truncaton": SECRET}, 422, "truncaton: unknown field; did you mean truncation?"),
    ({"texts": ["a"], "truncation": SECRET}, 422, "truncation: must be 'error' or 'left'"),
    ({"texts": ["a"], "advantages": {"scale": SECRET}}, 422, "advantages.scale: must be 'std', 'none' or 'batch'"),
    ({"texts": ["a"], "advantages": True}, 422, "advantages: must be an object"),
    ({"texts": ["a"], "advantages": {"ddof": True}}, 422, "advantages.ddof: must be an integer"),
    ({"texts": ["a"], "deadline_ms": 0}, 422, "deadline_ms: must be greater than 0"),
    ({"texts": [SECRET, 1]}, 422, "texts[1]: must be a text"),
    ({"texts": [""]}, 422, "texts[0]: is empty"),
    ({"conversations": [[]]}, 422, "conversations[0]: must not be empty"),
    ({"conversations": [[{"role": "user"}]]}, 422, "conversations[0][0].content: is missing"),
    ({"input_ids": [[1], [2, None]]}, 422, "input_ids[1][1]: must be an integer"),
    ({"input_ids": [[1, True]]}, 422, "input_ids[0][1]: must be an integer"),
    ({"input_ids": [[1, 1.5]]}, 422, "input_ids[0][1]: must be an integer"),
    ({"input_ids": [[-1]]}, 422, "input_ids[0][0]: must be greater than or equal to 0"),
    ({"input_ids": [[1, 300]]}, 422, "input_ids[0][1]: 300 is not a token id"),
    (b'{"input_ids": [[18446744073709551615]]}', 422, "input_ids[0][0]: 18446744073709551615 is not a token id"),
    (b'{"input_ids": [[123456789012345678901234567890]]}', 422, "input_ids[0][0]: must be an integer"),
    ({f"field{n}": 1 for n in range(5000)}, 422, "the body: 5000 fields are too many"),
    ({"conversations": [[{f"field{n}": 1 for n in range(50)}]]}, 422, "conversations[0][0]: 50 fields are too many"),
    ({"input_ids": [3]}, 422, "input_ids[0]: must be a list"),
    ({"texts": ["a"], "tokenizer": "sha256:x"}, 422, "tokenizer: belongs to input_ids"),
    ({"texts": ["a " * 600]}, 422, "texts[0]: 120"),
    ({"texts": ["a" * 40_000]}, 422, "texts[0]: 40000 characters"),
    ({"prompt": "x", "completions": [[{"role": "assistant", "content": SECRET}]]}, 422, "completions[0]"),
    (
        {"prompt": [{"role": "user", "content": [{"type": "image_url"}]}], "completions": ["a"]},
        422,
        "prompt[0].content[0]: has type 'image_url'",
    ),
]


@pytest.mark.parametrize(("body", "status", "says"), BAD, ids=[says for _, _, says in BAD])
async def test_bad_request_is_refused_in_words(
    fake: Any, serve: Serve, caplog: pytest.LogCaptureFixture, body: Any, status: int, says: str
) -> None:
    caplog.set_level(logging.DEBUG)
    async with serve(fake) as (client, service):
        response = await client.post("/score", content=body if isinstance(body, bytes) else orjson.dumps(body))
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert says in error["message"]
        assert error["retryable"] is False
        assert error["type"] in ("invalid_request", "too_long")
        assert SECRET not in response.text + caplog.text
        assert service.admission.tokens == service.admission.items == 0
        assert (await client.post("/score", json={"input_ids": [[1]]})).status_code == 200


async def test_role_that_the_template_does_not_know_is_named_and_fails_alone(fake: Any, serve: Serve) -> None:
    template = (
        "{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}{{ raise_exception('Unknown role') }}"
        "{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    )
    import copy

    from rm_core.chat import Renderer

    tokenizer = copy.deepcopy(fake.renderer.tokenizer)
    tokenizer.chat_template = template
    fake.renderer = Renderer.for_tokenizer(tokenizer)
    bad = [{"role": "wizard", "content": SECRET}, {"role": "assistant", "content": "b"}]
    good = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    async with serve(fake) as (client, _):
        response = await client.post("/score", json={"conversations": [good, bad]})
    answer = response.json()
    assert response.status_code == 200
    assert answer["rewards"][0] is not None
    assert answer["rewards"][1] is None
    assert answer["errors"][0]["message"].startswith("conversations[1]")
    assert "wizard" in answer["errors"][0]["message"]
    assert SECRET not in response.text


@pytest.mark.parametrize("depth", [200, 900])
async def test_deeply_nested_tool_calls_are_no_crash(fake: Any, serve: Serve, depth: int) -> None:
    nested = b'{"a":' * depth + b"1" + b"}" * depth
    body = b'{"conversations": [[{"role": "assistant", "content": "a", "tool_calls": [' + nested + b"]}]]}"
    async with serve(fake) as (client, _):
        response = await client.post("/score", content=body)
    assert response.status_code in (200, 422)


async def test_body_over_the_limit_is_refused_before_it_is_read(fake: Any, serve: Serve) -> None:
    async with serve(fake) as (client, service):
        response = await client.post("/score", content=b'{"texts": ["' + b"a" * 10_000_000 + b'"]}')
        assert response.status_code == 413
        assert response.json()["error"]["type"] == "too_large"
        assert "8388608" in response.json()["error"]["message"]

        async def chunks() -> Any:
            for _ in range(100):
                yield b"a" * 100_000

        response = await client.post("/score", content=chunks())
        assert response.status_code == 413
        assert (await client.get("/health")).status_code == 200
        assert service.admission.items == 0


async def test_bodies_held_at_once_are_bounded(fake: Any, serve: Serve) -> None:
    import asyncio

    fake_body = {"input_ids": [[1] * 200] * 2}
    size = len(orjson.dumps(fake_body))
    async with serve(fake, max_waiting_bytes=1024 + size, max_body_bytes=1024 + size) as (client, _):
        fake.hold()
        first = asyncio.create_task(client.post("/score", content=orjson.dumps(fake_body)))
        await fake.until_entered()
        response = await client.post("/score", content=b"x" * 1200)
        assert (response.status_code, response.json()["error"]["type"]) == (503, "overloaded")
        assert int(response.headers["retry-after"]) > 0
        fake.gate.set()
        assert (await first).status_code == 200
        assert (await client.post("/score", content=orjson.dumps(fake_body))).status_code == 200


async def test_compressed_bodies_are_refused(fake: Any, serve: Serve) -> None:
    async with serve(fake) as (client, _):
        response = await client.post("/score", content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert response.status_code == 422
    assert "Content-Encoding" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [[1]] * 4},
        {"texts": ["a"] * 4},
        {"conversations": [[]] * 4},
        {"prompt": "a", "completions": ["b"] * 4},
        {"groups": [{"prompt": "a", "completions": ["b", "c"]}] * 2},
        {"texts": ["a", 1, None, []]},
    ],
)
async def test_too_many_items_are_refused_with_both_numbers_before_they_are_read(
    fake: Any, serve: Serve, body: dict[str, Any]
) -> None:
    async with serve(fake, max_request_items=3) as (client, _):
        response = await client.post("/score", json=body)
    assert response.status_code == 413
    assert "4 items" in response.json()["error"]["message"]
    assert "limit of 3" in response.json()["error"]["message"]


async def test_unknown_routes_and_methods_answer_in_the_one_error_form(fake: Any, serve: Serve) -> None:
    async with serve(fake) as (client, _):
        missing, wrong = await client.get("/scores"), await client.get("/score")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request")
    assert "/score" not in missing.text + wrong.text, "what was sent is not quoted"


async def test_bug_in_a_route_shows_no_text_and_no_traceback(
    fake: Any, serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*args: Any) -> None:
        raise RuntimeError(SECRET)

    monkeypatch.setattr("rm_server.app.build_answer", explode)
    async with serve(fake) as (client, _):
        response = await client.post("/score", json={"texts": ["a"]})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "internal"
    assert SECRET not in response.text + caplog.text
    assert "RuntimeError at" in caplog.text


async def test_before_the_model_is_loaded_only_health_answers(fake: Any) -> None:
    import httpx

    from rm_server import ScoringService, ServerSettings, create_app

    service = ScoringService(ServerSettings(checkpoint="x"))
    transport = httpx.ASGITransport(app=create_app(service, service.settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        assert (await client.get("/health")).status_code == 200
        for response in (
            await client.get("/ready"),
            await client.get("/info"),
            await client.post("/score", json={"texts": ["a"]}),
        ):
            assert (response.status_code, response.json()["error"]["type"]) == (503, "loading")
            assert "retry-after" in response.headers
    await service.stop()
