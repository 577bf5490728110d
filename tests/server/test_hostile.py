"""Hostile bodies on every route: never a 500, never a crash, never a word of the caller in an answer that refuses."""

import gzip
import logging
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import orjson
import pytest

from rm_server.auth import Keys, hash_key
from rm_server.settings import ServerSettings
from tests.server.raw_http import Caller

Serve = Callable[..., Any]
CANARY = "canary-91bc"
BOMB = b"0" * 20_000_000


def deep(opening: bytes, closing: bytes, depth: int, inside: bytes = b"1") -> bytes:
    return opening * depth + inside + closing * depth


def tool_calls(value: bytes) -> bytes:
    return b'{"conversations": [[{"role": "assistant", "content": "a", "tool_calls": [' + value + b"]}]]}"


NUMBERS = [
    b"1e308",
    b"-1e308",
    b"1e309",
    b"1e999999999",
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"-0",
    b"-0.0",
    b"0.1e-400",
    b"9223372036854775807",
    b"9223372036854775808",
    b"18446744073709551616",
    b"1" * 400,
    b"1" * 100_000,
    b"0." + b"1" * 100_000,
    b"1" + b"0" * 300 + b".0",
    b"00",
    b"+1",
    b".5",
    b"0x10",
    b"1_000",
]
HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "spaces": b" " * 100_000,
    "byte order mark": b'\xef\xbb\xbf{"texts": ["a"]}',
    "utf-16": '{"texts": ["a"]}'.encode("utf-16"),
    "null bytes": b"\x00" * 100,
    "text with null": b'{"texts": ["a\\u0000b"]}',
    "raw null in text": b'{"texts": ["a\x00b"]}',
    "lone high surrogate": b'{"texts": ["\\ud800"]}',
    "lone low surrogate": b'{"texts": ["\\udc00"]}',
    "surrogates in reverse": b'{"texts": ["\\udc00\\ud800"]}',
    "surrogate bytes": b'{"texts": ["\xed\xa0\x80"]}',
    "surrogate in a key": b'{"\\ud800": 1}',
    "overlong slash": b'{"texts": ["\xc0\xaf"]}',
    "beyond unicode": b'{"texts": ["\xf4\x90\x80\x80"]}',
    "cut character": b'{"texts": ["\xe2\x82"]}',
    "noncharacters": b'{"texts": ["\\uffff\\ufffe\\ufdd0"]}',
    "bidi and zero width": '{"texts": ["\u202e\u200b\ufeff"]}'.encode(),
    "combining flood": ('{"texts": ["a' + "\u0301" * 2000 + '"]}').encode(),
    "special tokens": b'{"texts": ["<|im_start|><|im_end|><|im_end|>"]}',
    "template in a text": b'{"texts": ["{{ 7 * 7 }}{% for x in y %}{{ config }}"]}',
    "template in a role": b'{"conversations": [[{"role": "{{ self }}", "content": "a"}]]}',
    "object deep": deep(b'{"a":', b"}", 100_000),
    "array deep": deep(b"[", b"]", 100_000),
    "array deep and open": b"[" * 1_000_000,
    "texts deep": b'{"texts": ' + deep(b"[", b"]", 900) + b"}",
    "groups deep": deep(b'{"groups": [', b"]}", 400, b""),
    "completions deep": b'{"prompt": "a", "completions": ' + deep(b'[{"content":', b"}]", 300, b'"a"') + b"}",
    "tool calls deep": tool_calls(deep(b'{"a":', b"}", 900)),
    "tool calls deep in arrays": tool_calls(b'{"a":' + deep(b"[", b"]", 900) + b"}"),
    "content parts deep": b'{"conversations": [[{"role": "user", "content": [' + deep(b'{"a":', b"}", 900) + b"]}]]}",
    "duplicate keys": b'{"texts": ["a"], "texts": ["b"], "texts": 5, "texts": ["c"]}',
    "duplicate keys of two forms": b'{"texts": ["a"], "input_ids": [[1]], "texts": null}',
    "many duplicate keys": b"{" + b",".join([b'"texts": ["a"]'] * 50_000) + b"}",
    "many keys": b"{" + b",".join(b'"k%d": 1' % n for n in range(100_000)) + b"}",
    "keys that collide": b"{" + b",".join(b'"%s": 1' % (b"\\u0000" * n) for n in range(300)) + b"}",
    "long key": b'{"' + b"k" * 1_000_000 + b'": 1}',
    "key of newlines": b'{"\\n\\r\\u001b[31m": 1}',
    "many empty groups": b'{"groups": [' + b",".join([b'{"prompt": "a", "completions": []}'] * 50_000) + b"]}",
    "many empty texts": b'{"texts": [' + b",".join([b'""'] * 20_000) + b"]}",
    "many wrong ids": b'{"input_ids": [[' + b",".join([b"-1"] * 500_000) + b"]]}",
    "many wrong kinds": b'{"texts": [' + b",".join([b"1"] * 500_000) + b"]}",
    "many roles": b'{"conversations": [[' + b",".join([b'{"role": "user", "content": ""}'] * 20_000) + b"]]}",
    "trailing comma": b'{"texts": ["a"],}',
    "two documents": b'{"texts": ["a"]}{"texts": ["b"]}',
    "comment": b'{"texts": ["a"] /* ' + CANARY.encode() + b" */}",
    "single quotes": b"{'texts': ['" + CANARY.encode() + b"']}",
    "form": b"texts=" + CANARY.encode(),
    "xml": b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "' + CANARY.encode() + b'">]><a>&b;</a>',
    "pickle": b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "gzip without saying so": gzip.compress(b'{"texts": ["a"]}'),
    "prototype": b'{"__proto__": {"texts": ["a"]}, "constructor": 1, "__class__": "' + CANARY.encode() + b'"}',
    "paths": b'{"model": "../../../etc/passwd", "texts": ["file:///etc/passwd"], "reward_id": "../.."}',
    "checkpoint that is none": b'{"checkpoint": "../../../etc/passwd\\u0000\\n", "reward_id": "%s"}' % CANARY.encode(),
    "checkpoint with a long name": b'{"checkpoint": "%s"}' % (CANARY.encode() * 1000),
    "checkpoint deep": b'{"checkpoint": ' + deep(b"[", b"]", 900) + b"}",
    "checkpoint that asks for more": b'{"checkpoint": "a", "trust_remote_code": true}',
    "null everywhere": b'{"prompt": null, "completions": null, "groups": null, "texts": null, "input_ids": null}',
    "wrong kinds everywhere": b'{"texts": {}, "groups": 1, "input_ids": "a", "advantages": [], "deadline_ms": "x"}',
}
for _number in NUMBERS:
    _name = _number[:24].decode()
    HOSTILE[f"ids {_name}"] = b'{"input_ids": [[%s]]}' % _number
    HOSTILE[f"options {_name}"] = b'{"texts": ["a", "b"], "deadline_ms": %s, "advantages": {"eps": %s, "ddof": %s}}' % (
        (_number,) * 3
    )
    HOSTILE[f"eps {_name}"] = b'{"texts": ["a", "b"], "advantages": {"eps": %s, "ddof": 0}}' % _number
    HOSTILE[f"tool calls {_name}"] = tool_calls(b'{"function": {"name": "f", "arguments": {"x": %s}}}' % _number)
    HOSTILE[f"elsewhere {_name}"] = b'{"query": [%s], "prompts": [%s], "labels": [%s], "top_n": %s, "input": %s}' % (
        (_number,) * 5
    )


def is_json(response: httpx.Response) -> bool:
    return response.headers.get("content-type", "").startswith("application/json")


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_body_is_answered_in_the_one_form_on_every_route(
    fake: Any, serve: Serve, admin_key: tuple[Keys, str], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    def load(settings: ServerSettings, checkpoint: str) -> Any:
        raise ValueError("there is no such checkpoint")

    caplog.set_level(logging.DEBUG)
    body, (keys, key) = HOSTILE[name], admin_key
    async with serve(fake, keys=keys, load=load) as (client, service):
        client.headers["X-API-Key"] = key
        paths = (await client.get("/openapi.json")).json()["paths"]
        posts = [path for path, methods in paths.items() if "post" in methods]
        assert posts.index("/admin/wake") == posts.index("/admin/sleep") + 1
        for path in posts:
            response = await client.post(path, content=body)
            assert response.status_code in (200, 400, 413, 422), (path, response.text[:500])
            assert is_json(response)
            if response.status_code != 200:
                error = response.json()["error"]
                assert CANARY not in response.text
                assert len(error["message"]) < 600
                assert error["message"].isprintable(), error["message"]
        assert service.admission.tokens == service.admission.items == 0
        assert (await client.post("/score", json={"input_ids": [[1]]})).status_code == 200
        assert (await client.get("/ready")).status_code == 200
    assert CANARY not in caplog.text


async def test_of_duplicate_keys_the_last_one_counts(fake: Any, serve: Serve, score_of: Any) -> None:
    async with serve(fake) as (client, _):
        response = await client.post("/score", content=b'{"input_ids": [[1], [2]], "input_ids": [[3]]}')
    assert response.json()["rewards"] == [score_of([3])]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "identity, gzip", "x-canary"])
async def test_compressed_bomb_is_refused_unread(fake: Any, serve: Serve, encoding: str) -> None:
    bomb = zlib.compress(BOMB) if encoding == "deflate" else gzip.compress(BOMB, 9)
    async with serve(fake) as (client, _):
        paths = (await client.get("/openapi.json")).json()["paths"]
        for path in (path for path, methods in paths.items() if "post" in methods and not path.startswith("/admin")):
            response = await client.post(path, content=bomb, headers={"Content-Encoding": encoding})
            assert response.status_code == 422, path
            assert response.json()["error"]["message"].startswith("Content-Encoding: ")
        plain = {"Content-Encoding": "identity"}
        assert (await client.post("/score", json={"input_ids": [[1]]}, headers=plain)).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "//score",
        "/score/",
        "/score/..",
        "/..%2f..%2fetc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/%00",
        "/%ff%fe",
        "/%ed%a0%80",
        "/%0d%0aSet-Cookie:%20a=b",
        "/a" * 4000,
        "/admin/../score",
        "/%61dmin/checkpoint",
        "/docs/../admin",
        "/openapi.json%00",
    ],
)
async def test_strange_path_is_no_route_and_no_way_around_a_key(
    fake: Any, serve_on_socket: Serve, tmp_path: Any, path: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(hash_key("k"))
    async with serve_on_socket(fake, api_keys_file=str(keys)) as (url, _):
        for header, allowed in ((b"", (401, 403)), (b"X-API-Key: k\r\n", (403, 404))):
            caller = await Caller.to(url)
            await caller.send(b"POST %s HTTP/1.1\r\nHost: x\r\n%sContent-Length: 2\r\n\r\n{}" % (path.encode(), header))
            status, answer, _ = await caller.answer()
            assert status in allowed, answer
            assert answer["error"]["request_id"]
            await caller.close()


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CANARY", "get"])
async def test_wrong_method_is_405_with_the_allowed_ones(fake: Any, serve: Serve, method: str) -> None:
    async with serve(fake) as (client, _):
        response = await client.request(method, "/score")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("number", range(5))
async def test_huge_random_headers_are_no_error_of_ours(fake: Any, serve: Serve, number: int) -> None:
    value = [b"\xff" * 8000, b"," * 8000, b"bytes=0-" + b",0-" * 2000, b"*/*;q=" + b"9" * 5000, b"a=b;" * 2000][number]
    names = (b"accept", b"range", b"content-type", b"cookie", b"if-none-match", b"expect", b"te", b"content-length-x")
    async with serve(fake) as (client, _):
        for name in names:
            response = await client.post("/score", content=b'{"input_ids": [[1]]}', headers=[(name, value)])
            assert response.status_code == 200, name


async def test_error_bodies_are_json_even_where_names_are_not_printable(fake: Any, serve: Serve) -> None:
    async with serve(fake) as (client, _):
        response = await client.post("/score", content=orjson.dumps({"\u2028\x1b[0m": 1, "texts": ["a"]}))
    assert response.status_code == 422
    assert response.json()["error"]["message"] == "??[0m: unknown field"
