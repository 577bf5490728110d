"""Ten times more work than the server can do: who is answered, who is refused, and how fast.

    python benchmarks/overload.py [CHECKPOINT] [--seconds 60] [--factor 10] [--prompt 80] [--answer 48] [--quick]

First the unloaded maximum: a closed loop of 64 connections. Then an open loop sends ``factor`` times as many tokens a
second, in requests of mixed sizes with a deadline, and beside them requests that can never fit. Counted are the answers
in time, the refusals and when they came, and the useful throughput (tokens of answers that came in time, each prompt
counted once) as a share of the unloaded maximum: the mean of before and after, for a machine that changes its speed.
Short texts are the hard case: a refusal costs the same whatever it refuses.
Invariant: the exit status is 1 if a request hangs, an accepted one is answered late, in part, or ``deadline_exceeded``,
one that can never fit waits 50 ms at p99, or the useful throughput falls below 90 % of the maximum.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import Process, Queue
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import common
import fixtures
import httpx
import processes
from fixtures import FreshTexts
from processes import Server
from transformers import AutoTokenizer

CONNECTIONS = 64
SIZES = (1, 1, 1, 2, 4, 8, 32)
GRACE_SECONDS = 1.0
IMPOSSIBLE_ITEMS = 40_000


@dataclass
class Tally:
    """What came back, and after how long."""

    kinds: Counter[str] = field(default_factory=Counter)
    useful_tokens: int = 0
    """Of answers that came while the overload lasted."""
    late: list[float] = field(default_factory=list)
    refused_at: list[float] = field(default_factory=list)
    never_fits: list[float] = field(default_factory=list)
    broken: int = 0
    """Requests that were let in and not answered whole by their deadline."""
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Work:
    """Groups of mixed size; no text comes twice."""

    texts: FreshTexts
    prompt: int
    answer: int
    """Tokens of a prompt and of an answer."""

    def draw(self) -> dict[str, Any]:
        size = self.texts.random.choice(SIZES)
        completions = [self.texts.text(self.answer - 1) for _ in range(size)]
        return {"prompt": self.texts.text(self.prompt), "completions": completions}

    def tokens_of(self, num_answers: int) -> int:
        """The prompt counted once: under overload more small groups get in, which share less."""
        return self.prompt + num_answers * self.answer


async def measure_maximum(server: Server, work: Work, seconds: float) -> float:
    """Tokens a second of a closed loop that keeps the server busy."""
    done = 0
    async with new_client(server) as client:
        end = time.perf_counter() + seconds

        async def connection() -> None:
            nonlocal done
            while time.perf_counter() < end:
                body = work.draw()
                await processes.post_json(client, "/score", body)
                if time.perf_counter() < end:
                    done += work.tokens_of(len(body["completions"]))

        await asyncio.gather(*(connection() for _ in range(CONNECTIONS)))
    return done / seconds


def list_impossible(server: Server) -> list[tuple[bytes, int]]:
    """Bodies that can never fit, whatever the load, and the status that each has to get."""
    longest = httpx.get(f"{server.url}/info").json()["max_length"]
    return [
        (json.dumps(body).encode(), status)
        for body, status in (
            ({"input_ids": [[1]] * IMPOSSIBLE_ITEMS}, 413),
            ({"input_ids": [[1] * (longest + 1)]}, 422),
            ({"texts": ["word " * (16 * longest)]}, 422),
        )
    ]


async def overload(
    server: Server, work: Work, bodies: Sequence[tuple[bytes, int]], seconds: float, deadline: float
) -> Tally:
    """Send these bodies, evenly over the time, whatever comes back."""
    tally = Tally()
    answers: Queue[Any] = Queue()
    impossible = Process(target=ask_the_impossible, args=(server.url, list_impossible(server), seconds, answers))
    impossible.start()
    connections = Connections(server)
    begin = time.perf_counter()

    async def send(body: bytes, size: int) -> None:
        start = time.perf_counter()
        try:
            status, answer = await connections.post(body)
        except OSError as error:
            tally.wrong.append(type(error).__name__)
            return
        took = time.perf_counter() - start
        if status == 200:
            scored = sum(reward is not None for reward in answer["rewards"])
            tally.kinds["answered" if scored == size else "answered in part"] += 1
            tally.broken += scored != size
            if start + took < begin + seconds:
                tally.useful_tokens += work.tokens_of(scored) if scored else 0
            if took > deadline + GRACE_SECONDS:
                tally.late.append(took)
            return
        error = answer["error"]
        tally.kinds[error["type"]] += 1
        tally.broken += error["type"] == "deadline_exceeded"  # who was not let in is told "overloaded"
        tally.refused_at.append(took)
        if not error["retryable"] or took > deadline + GRACE_SECONDS:
            tally.wrong.append(f"{status} {error['type']} after {took:.1f} s")

    tasks: list[asyncio.Task[None]] = []
    sent = 0
    while (now := time.perf_counter() - begin) < seconds:
        for body, size in bodies[sent : int(len(bodies) * now / seconds)]:
            tasks.append(asyncio.create_task(send(body, size)))
            sent += 1
        await asyncio.sleep(0.01)
    await asyncio.gather(*tasks)
    connections.close()
    for took, status, wanted in answers.get(timeout=30):
        tally.never_fits.append(took)
        if status != wanted:
            tally.wrong.append(f"{status} for a request that can never fit")
    impossible.join()
    return tally


def ask_the_impossible(url: str, bodies: Sequence[tuple[bytes, int]], seconds: float, answers: Queue[Any]) -> None:
    """Twice a second, one after the other; puts (seconds taken, status, wanted status) of each.

    In a process of its own: it measures the server's delay, not that of the client that makes the overload.
    """
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port)
    begin, results = time.perf_counter(), []
    for body, wanted in itertools.cycle(bodies):
        start = time.perf_counter()
        if start >= begin + seconds:
            break
        connection.request("POST", "/score", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        results.append((time.perf_counter() - start, response.status, wanted))
        time.sleep(0.5)
    answers.put(results)


class Connections:
    """Kept-alive connections for POST /score, as trainers keep theirs, with as little work as it takes: httpx looks at
    each of its connections for every request, which a thousand of them make slower than the server."""

    def __init__(self, server: Server) -> None:
        self._address = urlsplit(server.url)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, body: bytes) -> tuple[int, Any]:
        """Status and decoded answer. Raises OSError where the connection ends without one."""
        address = self._address
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
        head = f"POST /score HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        try:
            answer_head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(answer_head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
            content = await reader.readexactly(length)
        except asyncio.IncompleteReadError:
            writer.close()
            raise ConnectionResetError("the server closed the connection without an answer") from None
        if b"connection: close" in answer_head:
            writer.close()
        else:
            self._idle.append((reader, writer))
        return int(answer_head.split(None, 2)[1]), json.loads(content)

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


def new_client(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=300, limits=httpx.Limits(max_connections=None))


def main() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("checkpoint", nargs="?", type=Path, help="default: the bundled model with a fixed head")
        parser.add_argument("--seconds", type=float, default=60.0, help="how long the overload lasts")
        parser.add_argument("--factor", type=float, default=10.0, help="offered work, in unloaded maxima")
        parser.add_argument("--prompt", type=int, default=80, help="tokens of a prompt")
        parser.add_argument("--answer", type=int, default=48, help="tokens of an answer")
        parser.add_argument("--deadline", type=float, default=10.0, help="seconds a caller waits")

    arguments = common.parse_arguments(__doc__ or "", add)
    seconds = 10.0 if arguments.quick else arguments.seconds
    model = fixtures.prepare_model(arguments.checkpoint)
    texts = FreshTexts(AutoTokenizer.from_pretrained(model), arguments.seed)
    work = Work(texts, arguments.prompt, arguments.answer)
    server = processes.our_server(model, arguments.threads, "auto")
    with processes.running(server), processes.awake(server):
        asyncio.run(measure_maximum(server, work, seconds / 4))  # warm, and the server learns its rate
        maximum = asyncio.run(measure_maximum(server, work, seconds / 2))
        common.say(f"unloaded maximum: {maximum:.0f} tokens/s")
        rate = arguments.factor * maximum
        bodies = []
        tokens = 0.0
        while tokens < rate * seconds:
            body = work.draw()
            tokens += work.tokens_of(len(body["completions"]))
            content = json.dumps(body | {"deadline_ms": arguments.deadline * 1000}).encode()
            bodies.append((content, len(body["completions"])))
        tally = asyncio.run(overload(server, work, bodies, seconds, arguments.deadline))
        after = asyncio.run(measure_maximum(server, work, seconds / 2))
    useful = tally.useful_tokens / seconds
    ratio = useful / statistics.mean((maximum, after))
    p99 = statistics.quantiles(tally.never_fits, n=100, method="inclusive")[98]
    failed = bool(tally.wrong or tally.late or tally.broken or ratio < 0.9 or p99 > 0.05)
    result = {
        "workload": f"overload x{arguments.factor:g} for {seconds:g} s, {work.prompt} + {work.answer} tokens",
        "maximum_tokens_per_second": round(maximum),
        "useful_tokens_per_second": round(useful),
        "useful_ratio": round(ratio, 3),
        "afterwards_tokens_per_second": round(after),
        "answers": dict(tally.kinds),
        "late": len(tally.late),
        "broken": tally.broken,
        "wrong": tally.wrong[:10],
        "never_fits_p99_ms": round(p99 * 1000, 1),
        "refused_median_s": round(statistics.median(tally.refused_at), 2) if tally.refused_at else None,
        "deadline_s": arguments.deadline,
        "ok": not failed,
    }
    common.finish(result, [], arguments)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
