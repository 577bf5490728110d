"""Which replica a prompt goes to, how many replicas there are, and an application called in the process. No cluster."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from rm_server.asgi_call import Call, answer
from rm_server.ray_prefix import prompt_key, rank_replicas, replicas_for

PROMPT = [{"role": "user", "content": "2 + 2?"}]
LONG = "system prompt " * 40


def key(body: Any, prefix_chars: int = 100) -> bytes | None:
    return prompt_key(json.dumps(body).encode(), prefix_chars)


@pytest.mark.parametrize(
    "form",
    [
        lambda prompt, answer: {"prompt": prompt, "completions": [answer]},
        lambda prompt, answer: {"completions": [answer, "x"], "prompt": prompt},
        lambda prompt, answer: {"groups": [{"prompt": prompt, "completions": [answer]}], "deadline_ms": 5},
        lambda prompt, answer: {"query": [prompt + answer], "prompts": [prompt], "labels": [None]},
        lambda prompt, answer: {"prompt": prompt, "response": answer, "label": 1},
        lambda prompt, answer: {"model": "m", "input": LONG + prompt + answer},
        lambda prompt, answer: {"input": [LONG + prompt + answer]},
        lambda prompt, answer: {"text": LONG + prompt + answer},
        lambda prompt, answer: {"texts": [LONG + prompt + answer, answer]},
        lambda prompt, answer: {"messages": [LONG + prompt + answer]},
        lambda prompt, answer: {
            "messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        },
        lambda prompt, answer: {"conversations": [[{"content": prompt}, {"content": answer}]]},
        lambda prompt, answer: {"input_ids": [[*range(25), *map(ord, answer)]]},
    ],
)
def test_answers_to_one_prompt_have_one_key_in_every_form(form: Any) -> None:
    assert key(form("2 + 2 = ", "4")) == key(form("2 + 2 = ", "5")) is not None


@pytest.mark.parametrize("name", ["prompt", "query", "texts", "input"])
def test_other_prompts_have_other_keys(name: str) -> None:
    bodies = [{name: value if name == "prompt" else [value]} for value in ("a" * 99, "a" * 99 + "b", "a" * 99 + "bc")]
    keys = [key(body) for body in bodies]
    assert keys[0] != keys[1]
    # a marked prompt counts to its end, a whole text with its beginning
    assert (keys[1] != keys[2]) == (name == "prompt")


@pytest.mark.parametrize(
    "body", [b"", b"nope", b"[1]", b"{}", b'{"texts": []}', b'{"texts": [[]]}', b'{"groups": [1]}', b'{"query": {}}']
)
def test_a_body_without_a_prompt_has_no_key(body: bytes) -> None:
    assert prompt_key(body, 100) is None


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["prompt", "groups", "prompts", "query", "messages", "input_ids"]), inner), max_leaves=12))  # fmt: skip
def test_no_body_breaks_the_gate(body: Any) -> None:
    found = key(body)
    assert found is None or len(found) == 16


def test_a_replica_that_goes_moves_only_its_own_prompts() -> None:
    names, keys = ["a", "b", "c"], [number.to_bytes(16, "big") for number in range(600)]
    before = [rank_replicas(key, names, [0, 0, 0])[0] for key in keys]
    counts = [before.count(i) for i in range(3)]
    assert min(counts) > 150, "a third each, about"
    after = [rank_replicas(key, names[:2], [0, 0])[0] for key in keys]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != 2)


def test_a_replica_over_its_share_is_passed_over_and_then_the_least_loaded_is_first() -> None:
    key, names = b"k" * 16, ["a", "b", "c"]
    first, second, third = rank_replicas(key, names, [5, 5, 5])
    loads = [0, 0, 0]
    loads[first] = 40  # the average is 13.3, so 33 are too many
    assert rank_replicas(key, names, loads) == [second, third, first]
    loads[first] = 16
    assert rank_replicas(key, names, loads)[0] == first, "few requests never count"
    assert rank_replicas(key, [], []) == []


def test_replicas_are_as_many_as_the_queued_tokens_ask_for() -> None:
    assert [replicas_for(tokens, 1000) for tokens in (0, 1, 1000, 1001, 9500)] == [0, 1, 1, 2, 10]


async def echo(request: Request) -> JSONResponse:
    body = await request.body()
    if request.query_params.get("wait"):
        while (await request.receive())["type"] != "http.disconnect":
            pass
    told = {
        "method": request.method,
        "path": request.url.path,
        "query": str(request.query_params),
        "body": body.decode(),
    }
    return JSONResponse({**told, "name": request.headers["x-name"]}, 418, {"x-told": "yes"})


async def test_an_application_answers_in_the_process_as_over_http() -> None:
    app = Starlette(routes=[Route("/a/{rest:path}", echo, methods=["PUT"])])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        wanted = await client.put("/a/b?x=1", content=b"text", headers={"x-name": "me"})
    found = await answer(app, Call("PUT", "/a/b", b"x=1", [(b"x-name", b"me")], b"text"))
    assert (found.status, found.body) == (wanted.status_code, wanted.content)
    assert dict(found.headers)[b"x-told"] == b"yes"

    waiting = asyncio.ensure_future(answer(app, Call("PUT", "/a/b", b"wait=1", [(b"x-name", b"me")], b"")))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
