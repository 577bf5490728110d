"""Callers who are slow, many, or no HTTP at all, against a real socket; and TLS."""

import asyncio
import contextlib
import json
import logging
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import trustme

from rm_server.connections import MAX_HEADER_BYTES, check_tls
from rm_server.settings import ServerSettings, SettingsError
from tests.server.raw_http import Caller

Serve = Callable[..., Any]
BODY = b'{"input_ids": [[1, 2]]}'
HEAD = b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n"
WHOLE = HEAD % len(BODY) + b"\r\n" + BODY


async def test_headers_that_never_end_are_cut_off_while_others_are_served(fake: Any, serve_on_socket: Serve) -> None:
    async with serve_on_socket(fake, receive_seconds=0.3) as (url, _):
        silent = await Caller.to(url)
        slow = await Caller.to(url)
        after_one = await (await Caller.to(url)).send(WHOLE)
        assert (await after_one.answer())[0] == 200
        await after_one.send(b"POST /score HT")
        dripping = asyncio.create_task(slow.drip(HEAD * 100, 0.05))
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.post("/score", content=BODY)).status_code == 200
        for caller in (silent, slow, after_one):
            assert await caller.is_closed_by_server()
            await caller.close()
        await dripping


async def test_body_that_drips_is_answered_504_and_closed(fake: Any, serve_on_socket: Serve) -> None:
    async with serve_on_socket(fake, receive_seconds=0.3) as (url, server):
        for head in (HEAD % 1000, HEAD.replace(b"Content-Length: %d", b"Transfer-Encoding: chunked")):
            caller = await (await Caller.to(url)).send(head + b"\r\n")
            dripping = asyncio.create_task(caller.drip(b"1\r\na\r\n" * 200, 0.02))
            status, answer, _ = await caller.answer()
            assert status == 504
            assert answer["error"]["type"] == "deadline_exceeded"
            assert "receive_seconds" in answer["error"]["message"]
            assert await caller.is_closed_by_server()
            await dripping
            await caller.close()
        assert server.service.admission.items == 0


async def test_body_after_a_refusal_may_not_drip_for_ever_either(fake: Any, serve_on_socket: Serve) -> None:
    async with serve_on_socket(fake, receive_seconds=0.3) as (url, _):
        caller = await (await Caller.to(url)).send(b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        assert (await caller.answer())[0] == 404
        dripping = asyncio.create_task(caller.drip(b"a" * 1000, 0.05))
        assert await caller.is_closed_by_server()
        await dripping
        await caller.close()


async def test_slow_forward_is_not_a_slow_caller(fake: Any, serve_on_socket: Serve) -> None:
    async with serve_on_socket(fake, receive_seconds=0.1) as (url, _):
        fake.hold()
        caller = await (await Caller.to(url)).send(WHOLE)
        await fake.until_entered()
        await asyncio.sleep(1.5)
        fake.gate.set()
        assert (await caller.answer())[0] == 200
        await caller.close()


async def test_answer_that_nobody_reads_is_given_up(
    fake: Any, serve_on_socket: Serve, eventually: Callable[..., Any]
) -> None:
    body = b'{"input_ids": [' + b",".join([b"[1]"] * 30_000) + b"]}"
    async with serve_on_socket(fake, receive_seconds=0.5) as (url, server):
        loop, address = asyncio.get_running_loop(), urlsplit(url)
        with socket.socket() as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            caller.setblocking(False)
            await loop.sock_connect(caller, (address.hostname, address.port))
            await eventually(lambda: server.server_state.connections)
            (connection,) = server.server_state.connections
            served = connection.transport.get_extra_info("socket")
            served.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            await loop.sock_sendall(caller, HEAD % len(body) + b"\r\n" + body)
            await eventually(lambda: server.service.num_open > 0)
            await eventually(lambda: not server.server_state.connections)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /\r\n\r\n",
        b"\r\n\r\n\x00\x00",
        b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999999\r\n\r\n",
        b"POST /score HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST /score HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\ncanary",
        b"POST /score HTTP/1.1\r\nHost: x\r\nX-Canary: \x00\r\n\r\n",
        b"POST /score\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /score HTTP/1.1\r\n\r\n",
        b"POST /score HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: x\r\n\r\n",
        b"GET /" + b"a" * MAX_HEADER_BYTES,
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X-Canary: canary\r\n" * 10_000,
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"canary" * 100_000,
    ],
    ids=range(17),
)
async def test_what_is_no_http_is_refused_in_the_one_error_form(
    fake: Any, serve_on_socket: Serve, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    caplog.set_level(logging.INFO)
    async with serve_on_socket(fake) as (url, _):
        caller = await Caller.to(url)
        with contextlib.suppress(ConnectionError):
            await caller.send(data)
        status, answer, closes = await caller.answer()
        assert status in (0, 400), answer
        assert closes
        if status:
            assert answer["error"]["type"] == "invalid_request"
            assert answer["error"]["request_id"]
        assert "canary" not in json.dumps(answer) + caplog.text
        await caller.close()
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.post("/score", content=BODY)).status_code == 200


async def test_one_connection_too_many_is_told_so(fake: Any, serve_on_socket: Serve, sample: Any) -> None:
    async with serve_on_socket(fake, max_connections=3) as (url, server):
        held = [await (await Caller.to(url)).send(WHOLE) for _ in range(3)]
        for caller in held:
            assert (await caller.answer())[0] == 200
        one_more = await Caller.to(url)
        status, answer, closes = await one_more.answer()
        assert (status, closes) == (503, True)
        assert answer["error"]["type"] == "overloaded"
        assert "3 connections" in answer["error"]["message"]
        assert sample(server.service, "rm_requests_refused_total", reason="overloaded") == 1
        assert await one_more.is_closed_by_server()
        assert (await (await held[0].send(WHOLE)).answer())[0] == 200
        for caller in (one_more, *held):
            await caller.close()


def blocking_call(url: str) -> bytes:
    """What a client that sends first and reads afterwards gets: everything, up to the connection's end."""
    address = urlsplit(url)
    received = b""
    with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
        time.sleep(0.2)
        for _ in range(30):
            connection.sendall(HEAD % 300_000 + b"\r\n" + b" " * 10_000)
            time.sleep(0.005)
        while piece := connection.recv(65536):
            received += piece
    return received


async def test_refusal_reaches_a_caller_who_is_still_sending(fake: Any, serve_on_socket: Serve) -> None:
    async with serve_on_socket(fake, max_connections=1) as (url, _):
        held = await (await Caller.to(url)).send(WHOLE)
        assert (await held.answer())[0] == 200
        answer = await asyncio.to_thread(blocking_call, url)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert answer.endswith(b"}")
        await held.close()


async def test_pipelined_requests_are_answered_in_order(fake: Any, serve_on_socket: Serve, score_of: Any) -> None:
    async with serve_on_socket(fake, receive_seconds=5) as (url, _):
        caller = await Caller.to(url)
        bodies = [b'{"input_ids": [[%d]]}' % n for n in range(1, 6)]
        await caller.send(b"".join(HEAD % len(body) + b"\r\n" + body for body in bodies))
        for n in range(1, 6):
            status, answer, _ = await caller.answer()
            assert (status, answer["rewards"]) == (200, [score_of([n])])
        await caller.close()


async def test_what_follows_a_request_is_never_taken_for_its_answer(
    fake: Any, serve_on_socket: Serve, eventually: Callable[..., Any]
) -> None:
    async with serve_on_socket(fake) as (url, server):
        chunked = HEAD.replace(b"Content-Length: %d", b"Transfer-Encoding: chunked") + b"\r\nno number\r\n"
        for wrong in (b"this is no HTTP\r\n\r\n", chunked):
            fake.hold()
            caller = await (await Caller.to(url)).send(WHOLE)
            await fake.until_entered()
            await caller.send(wrong)
            await eventually(lambda: not server.server_state.connections)
            fake.gate.set()
            assert await caller.answer() == (0, {}, True), "a 400 would be taken for the first request's answer"
            await caller.close()


def mutated(random: Random) -> bytes:
    """Some requests on one connection, mostly damaged."""
    chunked = HEAD.replace(b"Content-Length: %d", b"Transfer-Encoding: chunked") + b"\r\n"
    whole = [
        WHOLE,
        chunked + b"%x\r\n%s\r\n0\r\nX-Trailer: 1\r\n\r\n" % (len(BODY), BODY),
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.0\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    ]
    data = bytearray(b"".join(random.choices(whole, k=random.randint(1, 4))))
    for _ in range(random.choice((0, 1, 2, 5))):
        place, noise = random.randrange(len(data)), random.randbytes(random.randint(0, 8))
        data[place : place + random.randint(0, 8)] = noise
    return bytes(data)


async def test_damaged_requests_leave_the_server_at_work_and_its_log_without_errors(
    fake: Any, serve_on_socket: Serve, caplog: pytest.LogCaptureFixture, sample: Any
) -> None:
    caplog.set_level(logging.ERROR)
    random = Random(0)
    async with serve_on_socket(fake, receive_seconds=0.5) as (url, server):

        async def damage() -> None:
            data, caller, start = mutated(random), await Caller.to(url), 0
            with contextlib.suppress(ConnectionError):
                while start < len(data):
                    end = random.randint(start + 1, len(data))
                    await caller.send(data[start:end])
                    await asyncio.sleep(random.choice((0, 0.001)))
                    start = end
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(caller.answer(), 0.05)
            await caller.close()

        for _ in range(20):
            await asyncio.gather(*(damage() for _ in range(20)))
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.post("/score", content=BODY)).status_code == 200
        assert sample(server.service, "rm_requests_refused_total", reason="internal") in (None, 0)
    assert not [record for record in caplog.records if record.name != "asyncio"]


async def test_half_a_pipelined_request_waits_for_the_first_and_is_then_timed(
    fake: Any, serve_on_socket: Serve, score_of: Any
) -> None:
    async with serve_on_socket(fake, receive_seconds=0.2) as (url, _):
        fake.hold()
        caller = await (await Caller.to(url)).send(WHOLE + WHOLE[:-4])
        await fake.until_entered()
        await asyncio.sleep(0.6)
        fake.gate.set()
        assert (await caller.answer())[1]["rewards"] == [score_of([1, 2])]
        assert (await caller.answer())[0] == 504
        assert await caller.is_closed_by_server()
        await caller.close()


async def test_headers_up_to_the_limit_are_read_however_they_come(fake: Any, serve_on_socket: Serve) -> None:
    async with serve_on_socket(fake) as (url, _):
        head = HEAD % len(BODY)
        long = head + b"X-Long: " + b"a" * (MAX_HEADER_BYTES - len(head) - 20) + b"\r\n\r\n" + BODY
        for sizes in ((len(long),), (10, len(long) // 2, len(long))):
            caller, start = await Caller.to(url), 0
            for end in sizes:
                await caller.send(long[start:end])
                await asyncio.sleep(0.02)
                start = end
            assert (await caller.answer())[0] == 200
            await (await caller.send(WHOLE + long)).answer()
            assert (await caller.answer())[0] == 200
            await caller.close()


async def test_what_comes_behind_a_body_is_no_header(fake: Any, serve_on_socket: Serve) -> None:
    async with serve_on_socket(fake) as (url, _):
        caller = await Caller.to(url)
        head = HEAD.replace(b"Content-Length: %d", b"Transfer-Encoding: chunked") + b"\r\n"
        chunks = b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
        for trailer in (b"", b"X-Request-ID: canary\r\n", b"Content-Encoding: gzip\r\n"):
            await caller.send(head + chunks + trailer + b"\r\n")
            status, answer, _ = await caller.answer()
            assert status == 200, answer
            assert "canary" not in json.dumps(answer)
        for end in (b"", b"\r\n\r\n"):
            await caller.send(head + chunks + b"X: " + b"a" * 4 * MAX_HEADER_BYTES + end)
            status, _, closes = await caller.answer()
            assert status in (0, 400)
            assert closes
            await caller.close()
            caller = await Caller.to(url)
        await caller.close()


async def test_blank_lines_are_no_request_and_do_not_hold_a_connection(fake: Any, serve_on_socket: Serve) -> None:
    async with serve_on_socket(fake, receive_seconds=0.3) as (url, _):
        for before in (b"", WHOLE):
            caller = await Caller.to(url)
            if before:
                assert (await (await caller.send(before)).answer())[0] == 200
            dripping = asyncio.create_task(caller.drip(b"\r\n" * 400, 0.02))
            assert await caller.is_closed_by_server()
            await dripping
            await caller.close()


async def test_offer_to_change_the_protocol_is_declined_and_the_connection_goes_on(
    fake: Any, serve_on_socket: Serve, score_of: Any
) -> None:
    async with serve_on_socket(fake) as (url, _):
        caller = await Caller.to(url)
        offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"
        for _ in range(2):
            await caller.send(b"GET /health HTTP/1.1\r\nHost: x\r\n" + offer)
            assert (await caller.answer())[:2] == (200, {"status": "ok"})
        await caller.send(WHOLE)
        assert (await caller.answer())[1]["rewards"] == [score_of([1, 2])]
        # The parser takes what follows such an offer for the other protocol: never score a request without its body.
        await caller.send(HEAD % len(BODY) + offer + BODY)
        status, answer, closes = await caller.answer()
        assert (status, closes) == (400, True)
        assert "Upgrade" in answer["error"]["message"]
        await caller.close()


async def test_websocket_upgrade_is_an_ordinary_request(fake: Any, serve_on_socket: Serve) -> None:
    async with serve_on_socket(fake) as (url, _):
        caller = await Caller.to(url)
        await caller.send(
            b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert (await caller.answer())[:2] == (200, {"status": "ok"})
        await caller.close()


async def test_no_answer_allows_another_origin(fake: Any, serve: Serve) -> None:
    origin = {"Origin": "http://elsewhere.example", "Access-Control-Request-Method": "POST"}
    async with serve(fake) as (client, _):
        for response in (
            await client.post("/score", content=BODY, headers=origin),
            await client.options("/score", headers=origin),
            await client.get("/info", headers=origin),
        ):
            assert not [name for name in response.headers if name.startswith("access-control")]


# ------------------------------------------------------------------ TLS


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def certificate(authority: trustme.CA, tmp_path: Path) -> dict[str, str]:
    made = authority.issue_cert("127.0.0.1")
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    key.write_bytes(made.private_key_pem.bytes())
    return {"ssl_certfile": str(chain), "ssl_keyfile": str(key)}


async def test_server_speaks_tls_with_a_certificate(
    fake: Any, serve_on_socket: Serve, authority: trustme.CA, certificate: dict[str, str]
) -> None:
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    async with serve_on_socket(fake, **certificate) as (url, _):
        async with httpx.AsyncClient(base_url=url, verify=trust) as client:
            assert (await client.post("/score", content=BODY)).status_code == 200
        async with httpx.AsyncClient(base_url=url) as stranger:
            with pytest.raises(httpx.ConnectError):
                await stranger.get("/health")
        plain = await (await Caller.to(url)).send(WHOLE)
        assert (await plain.answer())[0] == 0
        await plain.close()


async def test_idle_tls_connections_do_not_hold_up_the_end(
    fake: Any, serve_on_socket: Serve, authority: trustme.CA, certificate: dict[str, str]
) -> None:
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient(verify=trust) as client:
        async with serve_on_socket(fake, **certificate) as (url, _):
            assert (await client.post(f"{url}/score", content=BODY)).status_code == 200
            begin = loop.time()
        assert loop.time() - begin < 15, "without the limit it takes 30 s"


def test_certificate_that_cannot_be_used_is_refused_at_the_start(
    authority: trustme.CA, certificate: dict[str, str], tmp_path: Path
) -> None:
    check_tls(ServerSettings(checkpoint="x", **certificate))
    check_tls(ServerSettings(checkpoint="x"))
    other = tmp_path / "other.pem"
    other.write_bytes(authority.issue_cert("elsewhere").private_key_pem.bytes())
    garbage = tmp_path / "garbage.pem"
    garbage.write_bytes(b"canary")
    for changes, says in [
        ({"ssl_keyfile": str(other)}, "other.pem: is not the unencrypted PEM key"),
        ({"ssl_keyfile": str(garbage)}, "garbage.pem: is not"),
        ({"ssl_certfile": str(garbage)}, "key.pem: is not"),
        ({"ssl_keyfile": None}, "chain.pem: is not"),
        ({"ssl_certfile": str(tmp_path / "none.pem")}, "none.pem: cannot be read: No such file"),
    ]:
        with pytest.raises(SettingsError) as raised:
            check_tls(ServerSettings(checkpoint="x", **{**certificate, **changes}))
        assert says in str(raised.value)
        assert "canary" not in str(raised.value)
        assert "\n" not in str(raised.value)
