"""What is tried again, how long it takes, and which exception each answer becomes."""

import asyncio
import gzip
import pickle
import random
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rm_client
from rm_client import AsyncRewardClient, RewardClient
from rm_client.errors import ConnectionFailedError, OverloadedError, RewardClientError, response_error
from rm_client.retry import RetryPolicy, connection_error, retry_after_seconds

MIRRORED = [
    (400, "invalid_request", rm_client.InvalidRequestError),
    (422, "invalid_request", rm_client.InvalidRequestError),
    (405, "invalid_request", rm_client.InvalidRequestError),
    (422, "too_long", rm_client.TooLongError),
    (401, "unauthorized", rm_client.UnauthorizedError),
    (403, "forbidden", rm_client.ForbiddenError),
    (404, "not_found", rm_client.NotFoundError),
    (404, "model_not_found", rm_client.ModelNotFoundError),
    (409, "reward_id_mismatch", rm_client.RewardIdMismatchError),
    (409, "tokenizer_mismatch", rm_client.TokenizerMismatchError),
    (413, "too_large", rm_client.TooLargeError),
    (504, "deadline_exceeded", rm_client.DeadlineExceededError),
    (500, "internal", rm_client.InternalError),
    (500, "non_finite_reward", rm_client.NonFiniteRewardError),
    (500, "verifier_failed", rm_client.VerifierFailedError),
    (500, "verifier_timeout", rm_client.VerifierTimeoutError),
    (418, "teapot", rm_client.ResponseError),
]
WAITED_FOR = [
    (503, "overloaded", rm_client.OverloadedError),
    (503, "loading", rm_client.LoadingError),
    (503, "draining", rm_client.DrainingError),
    (503, "asleep", rm_client.AsleepError),
    (503, "not_ready", rm_client.NotReadyError),
]


@pytest.mark.parametrize(("status", "kind", "expected"), MIRRORED)
def test_refusals_become_their_exception_and_are_not_repeated(
    connect: Any, server: Any, fake_time: Any, refusal: Any, status: int, kind: str, expected: type
) -> None:
    # The deadline was the caller's own: another call may succeed, this one is over.
    may_succeed_later = kind == "deadline_exceeded"
    server.refusals = [refusal(status, kind, may_succeed_later, Retry_After="1")]
    client = connect()
    with pytest.raises(RewardClientError) as caught:
        client.score("p", ["a"])
    error = caught.value
    assert type(error) is expected
    assert (error.type, error.status, error.retryable, error.message) == (
        kind,
        status,
        may_succeed_later,
        f"about {kind}",
    )
    assert len(server.requests) == 1
    assert fake_time.waits == []


@pytest.mark.parametrize(("status", "kind", "expected"), WAITED_FOR)
def test_not_now_is_repeated_until_it_works(
    connect: Any, server: Any, fake_time: Any, refusal: Any, status: int, kind: str, expected: type
) -> None:
    server.refusals = [refusal(status, kind, True)] * 2
    client = connect()
    assert client.score("p", ["a"]).rewards == [1.0]
    assert fake_time.waits == [0.5, 1.0]  # first_wait * 2**n with the draw at its upper end
    server.refusals = [refusal(status, kind, True)] * 9
    client = connect(max_retries=2)
    with pytest.raises(RewardClientError) as caught:
        client.score("p", ["a"])
    assert type(caught.value) is expected
    assert caught.value.num_attempts == 3
    assert "after 3 attempts" in str(caught.value)


@pytest.mark.parametrize("draw", [0.0, 0.999])
def test_by_default_a_server_may_be_away_for_ten_minutes(
    connect: Any, server: Any, fake_time: Any, draw: float
) -> None:
    server.refusals = [httpx.ConnectError("refused") for _ in range(1000)]
    client = connect(draw=draw)
    with pytest.raises(ConnectionFailedError):
        client.score("p", ["a"])
    assert 560 < sum(fake_time.waits) < 600


@pytest.mark.parametrize(("deadline_ms", "seconds"), [(None, 120.0), (5_000, 120.0), (300_000, 310.0), (9e6, 600.0)])
def test_a_call_waits_as_long_as_its_own_deadline_within_the_budget(
    connect: Any, server: Any, deadline_ms: float | None, seconds: float
) -> None:
    client = connect()
    client.score("p", ["a"], deadline_ms=deadline_ms)
    assert server.requests[0].extensions["timeout"]["read"] == seconds


def test_an_api_key_is_sent_without_its_line_end_and_quoted_by_no_error(connect: Any, server: Any) -> None:
    client = connect(api_key="rm-canary\n")
    client.score("p", ["a"])
    assert server.requests[0].headers["Authorization"] == "Bearer rm-canary"
    for key in ("", " \n", "rm-\ncanary", "rm-canary\x00", "rm-canary\u00e9"):
        for kind in (RewardClient, AsyncRewardClient):
            with pytest.raises(ValueError, match="api_key: must be printable ASCII") as caught:
                kind("http://rm", api_key=key)
            assert "canary" not in str(caught.value)


def test_every_error_of_the_server_has_an_exception_here() -> None:
    from rm_server import errors

    def below(cls: type[errors.ServerError]) -> set[str]:
        return {cls.type}.union(*(below(sub) for sub in cls.__subclasses__() if sub.__module__ == errors.__name__))

    def retryable(cls: type[errors.ServerError]) -> set[str]:
        of_its_own = {cls.type} if cls.retryable and "type" in vars(cls) else set()
        return of_its_own.union(*(retryable(sub) for sub in cls.__subclasses__() if sub.__module__ == errors.__name__))

    administration = {"busy", "checkpoint_refused", "not_enough_memory"}
    known = {kind for _, kind, _ in (*MIRRORED, *WAITED_FOR)} - {"teapot"}
    assert below(errors.ServerError) - administration <= known
    waited_for = {kind for _, kind, _ in WAITED_FOR}
    assert retryable(errors.ServerError) - administration == {*waited_for, "deadline_exceeded"}


def test_waiting_is_said_once_a_minute_however_many_wait(
    connect: Any, server: Any, fake_time: Any, refusal: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server.refusals = [refusal(503, "overloaded", True, Retry_After="20") for _ in range(7)]
    client = connect(draw=0.0)
    client.score("p", ["a"])
    assert len(fake_time.waits) == 7
    said = [record.getMessage() for record in caplog.records if record.name == "rm_client"]
    after = ("", " (after 4 attempts)", " (after 7 attempts)")
    assert said == [
        f"trying again in 20.0 s: http://rm: HTTP 503 overloaded: about overloaded{tries}" for tries in after
    ]


def test_not_ready_in_time_says_what_the_last_try_met(connect: Any, server: Any, refusal: Any) -> None:
    client = connect()
    server.refusals = [refusal(503, "loading", True) for _ in range(99)]
    with pytest.raises(RewardClientError, match="not ready within 1 s; the last try: HTTP 503 loading"):
        client.wait_until_ready(1)
    server.refusals = [httpx.ConnectError("Connection refused") for _ in range(99)]
    with pytest.raises(RewardClientError, match="last try: connection_failed: http://rm/ready: Connection refused"):
        client.wait_until_ready(1)
    server.refusals = [httpx.Response(200, text="<html>") for _ in range(99)]
    client.wait_until_ready(1)


def test_a_redirect_says_where_to(connect: Any, server: Any) -> None:
    server.refusals = [httpx.Response(308, headers={"Location": "https://rm/score"})]
    client = connect()
    with pytest.raises(rm_client.ResponseError, match="redirects to https://rm"):
        client.score("p", ["a"])
    assert len(server.requests) == 1


async def test_an_answer_that_drips_ends_with_the_budget() -> None:
    class Drips(httpx.AsyncByteStream):
        async def __aiter__(self) -> Any:
            while True:
                yield b" "
                await asyncio.sleep(0)

    async def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Drips())

    async with AsyncRewardClient("http://rm", transport=httpx.MockTransport(answer), budget_seconds=0.05) as client:
        with pytest.raises(rm_client.RequestTimeoutError, match="no answer within the budget"):
            await client.score("p", ["a"])


def test_an_answer_that_drips_ends_with_the_budget_of_the_blocking_client(fake_time: Any) -> None:
    class Drips(httpx.SyncByteStream):
        def __iter__(self) -> Any:
            while True:
                fake_time.now += 1
                yield b" "

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Drips())

    client = RewardClient("http://rm", transport=httpx.MockTransport(answer), budget_seconds=20, clock=fake_time.clock)
    with client, pytest.raises(rm_client.RequestTimeoutError, match="http://rm/score: no answer within the budget"):
        client.score("p", ["a"])
    assert fake_time.now == 121.0


@pytest.mark.parametrize("encoding", [None, "gzip"])
def test_an_answer_that_comes_in_pieces_is_whole(encoding: str | None) -> None:
    body = b'{"rewards": [1.5], "reward_id": "r", "model": "m"}'
    sent = gzip.compress(body) if encoding else body

    class Pieces(httpx.SyncByteStream):
        def __iter__(self) -> Any:
            yield from (sent[at : at + 7] for at in range(0, len(sent), 7))

    def answer(request: httpx.Request) -> httpx.Response:
        headers = {"Content-Encoding": encoding} if encoding else {}
        return httpx.Response(200, stream=Pieces(), headers=headers)

    with RewardClient("http://rm", transport=httpx.MockTransport(answer)) as client:
        assert client.score("p", ["a"]).rewards == [1.5]


def test_the_server_can_say_that_waiting_is_pointless(connect: Any, server: Any, fake_time: Any, refusal: Any) -> None:
    server.refusals = [refusal(503, "draining", False)]
    client = connect()
    with pytest.raises(rm_client.DrainingError):
        client.score("p", ["a"])
    assert fake_time.waits == []


@pytest.mark.parametrize(
    "broken",
    [httpx.ConnectError, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError, httpx.ConnectTimeout],
)
def test_broken_connections_are_repeated(connect: Any, server: Any, fake_time: Any, broken: Any) -> None:
    server.refusals = [broken("server restarts"), broken("server restarts")]
    client = connect(draw=0.0)
    assert client.score("p", ["a"]).rewards == [1.0]
    assert fake_time.waits == [0.25, 0.5]  # half of first_wait * 2**n at the draw's lower end


@pytest.mark.parametrize("kind", [httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout])
def test_a_time_out_is_an_error_of_its_own_and_not_repeated(connect: Any, server: Any, kind: Any) -> None:
    server.refusals = [kind("slow")]
    client = connect()
    with pytest.raises(rm_client.RequestTimeoutError) as caught:
        client.score("p", ["a"], on_error="none")
    assert len(server.requests) == 1
    assert isinstance(caught.value.__cause__, kind)


def test_what_httpx_cannot_do_is_not_repeated(connect: Any, server: Any) -> None:
    server.refusals = [httpx.DecodingError("bad gzip")]
    client = connect()
    with pytest.raises(ConnectionFailedError, match="bad gzip"):
        client.score("p", ["a"])
    assert len(server.requests) == 1


def test_retry_after_is_a_floor(connect: Any, server: Any, fake_time: Any, refusal: Any) -> None:
    date = {"Date": "Tue, 03 Mar 2026 10:00:00 GMT", "Retry_After": "Tue, 03 Mar 2026 10:00:20 GMT"}
    server.refusals = [refusal(503, "loading", True, Retry_After="8"), refusal(503, "loading", True, **date)]
    client = connect(draw=0.0)
    client.score("p", ["a"])
    assert fake_time.waits == [8.0, 20.0]


@pytest.mark.parametrize(
    ("header", "date", "expected"),
    [
        (None, None, None),
        ("3", None, 3.0),
        ("-3", None, 0.0),
        ("soon", None, None),
        ("Tue, 03 Mar 2026 10:00:20 GMT", None, None),
        ("Tue, 03 Mar 2026 10:00:20 GMT", "Tue, 03 Mar 2026 10:00:30 GMT", 0.0),
    ],
)
def test_retry_after_in_every_form(header: Any, date: Any, expected: Any) -> None:
    assert retry_after_seconds(header, date) == expected


def test_the_whole_call_stays_within_its_budget(connect: Any, server: Any, fake_time: Any, refusal: Any) -> None:
    server.refusals = [refusal(503, "overloaded", True)] * 100
    client = connect(max_retries=50, budget_seconds=10.0)
    with pytest.raises(rm_client.OverloadedError):
        client.score("p", ["a"])
    assert fake_time.waits == [0.5, 1.0, 2.0, 4.0]  # 7.5 s; 8 s more would pass the budget
    assert fake_time.now == 107.5
    server.refusals = [refusal(503, "overloaded", True, Retry_After="3600")]
    with pytest.raises(rm_client.OverloadedError):
        client.score("p", ["a"])
    assert fake_time.now == 107.5  # no waiting for what cannot be reached


def test_an_attempt_may_not_outlast_the_budget(connect: Any, server: Any, refusal: Any) -> None:
    server.refusals = [refusal(503, "overloaded", True)] * 3
    client = connect(timeout=100.0, connect_timeout=50.0, budget_seconds=4.0)
    client.score("p", ["a"])
    limits = [request.extensions["timeout"] for request in server.requests]
    assert [limit["read"] for limit in limits] == [4.0, 3.5, 2.5, 0.5]
    assert [limit["pool"] for limit in limits] == [4.0, 3.5, 2.5, 0.5]
    assert [limit["connect"] for limit in limits] == [4.0, 3.5, 2.5, 0.5]


@given(
    error=st.sampled_from([ConnectionFailedError("x"), OverloadedError("x")]),
    asked=st.one_of(st.none(), st.floats(0, 1e4)),
    attempt=st.integers(0, 2000),
    elapsed=st.floats(0, 1e4),
    draw=st.floats(0, 1, exclude_max=True),
)
def test_no_wait_passes_the_budget_or_undercuts_the_server(
    error: RewardClientError, asked: float | None, attempt: int, elapsed: float, draw: float
) -> None:
    policy = RetryPolicy(max_retries=1000, budget_seconds=600.0)
    if isinstance(error, OverloadedError):
        error.retry_after_seconds = asked
    wait = policy.wait_seconds(error, attempt, elapsed, draw)
    if wait is None:
        return
    assert attempt < 1000
    assert wait > 0
    assert elapsed + wait < 600.0
    if isinstance(error, OverloadedError) and asked is not None:
        assert wait >= asked
    else:
        assert 0.25 <= wait <= 30.0


def test_a_proxys_page_is_an_error_by_its_status(connect: Any, server: Any, fake_time: Any) -> None:
    server.refusals = [httpx.Response(502, text="<html>Bad  Gateway</html>"), httpx.Response(404, text="nginx")]
    client = connect()
    with pytest.raises(rm_client.NotFoundError, match="nginx"):
        client.score("p", ["a"])
    assert len(fake_time.waits) == 1  # 502: what a proxy says while the server restarts
    client = connect()
    server.refusals = [httpx.Response(200, content=b"\xff\xfe")]
    with pytest.raises(rm_client.InvalidAnswerError, match="JSON object"):
        client.score("p", ["a"])
    server.refusals = [httpx.Response(307, headers={"Location": "http://elsewhere/"})]
    with pytest.raises(rm_client.ResponseError, match="HTTP 307"):
        client.score("p", ["a"])


@pytest.mark.parametrize("body", [None, [], {}, {"error": "text"}, {"error": {"message": 3}}, {"detail": "x"}])
def test_any_error_body_becomes_an_exception_of_its_status(body: Any) -> None:
    assert type(response_error(503, body, text="down")) is rm_client.UnavailableError
    assert type(response_error(409, body)) is rm_client.PinMismatchError


def test_exceptions_survive_the_way_between_processes() -> None:
    error = response_error(503, {"error": {"type": "loading", "message": "wait", "retryable": True}})
    error.num_attempts = 4
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is rm_client.LoadingError
    assert (str(copy), copy.status, copy.retryable) == (str(error), 503, True)
    item = rm_client.ItemError((0, 1), "internal", "m", False)
    partial = pickle.loads(pickle.dumps(rm_client.PartialFailureError.of([[1.0, None]], (item,))))
    assert (partial.rewards, partial.errors) == ([[1.0, None]], (item,))


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    from rm_client import errors

    drawn = errors.__doc__ or ""
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, RewardClientError):
            assert f"{name} " in drawn or f"{name}\n" in drawn, name


async def test_512_calls_at_once_share_one_pool_with_a_limit() -> None:
    num_open, most_open, num_opened = 0, 0, 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_open, most_open, num_opened
        num_open, num_opened = num_open + 1, num_opened + 1
        most_open = max(most_open, num_open)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                reward = len(await reader.readexactly(length))
                answer = b'{"rewards":[%d],"reward_id":"r","model":"m"}' % reward
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer))
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            num_open -= 1
            writer.close()
            await writer.wait_closed()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    texts = ["x" * random.Random(i).randrange(50) for i in range(512)]
    async with AsyncRewardClient(f"http://127.0.0.1:{port}", max_connections=16) as client:
        results = await asyncio.gather(*(client.score_texts([text]) for text in texts))
    listener.close()
    await listener.wait_closed()
    assert [result.rewards[0] for result in results] == [len('{"texts":[""]}') + len(text) for text in texts]
    assert most_open <= 16
    assert num_opened <= 32  # connections are reused, not opened per call


def test_each_event_loop_gets_its_own_pool(server: Any) -> None:
    client = AsyncRewardClient("http://rm", transport=httpx.MockTransport(server))

    async def once() -> float | None:
        return (await client.score("p", ["a"])).rewards[0]

    assert [asyncio.run(once()) for _ in range(3)] == [1.0] * 3
    assert len(client._pools) == 1  # those of ended loops are let go

    async def closing() -> None:
        await once()
        await client.aclose()
        await client.aclose()

    asyncio.run(closing())
    assert all(loop.is_closed() for loop in client._pools)


def test_a_cause_stays_attached() -> None:
    cause = httpx.ConnectError("refused")
    assert connection_error(cause, "http://rm/score").__cause__ is cause


async def test_an_unreachable_server_is_named_by_its_whole_address() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    for base_url, expected in (
        ("http://server:9", "http://server:9/score"),
        ("http://server:9/rm/", "server:9/rm/score"),
    ):
        transport = httpx.MockTransport(refuse)
        with (
            RewardClient(base_url, transport=transport, max_retries=0) as client,
            pytest.raises(RewardClientError, match=expected),
        ):
            client.score_texts(["a"])
        async with AsyncRewardClient(base_url, transport=transport, max_retries=0) as client_:
            with pytest.raises(RewardClientError, match=expected):
                await client_.score_texts(["a"])
