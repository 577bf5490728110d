"""Worker processes: hard limits, replacement, and nothing left behind."""

import json
import os
import signal
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rm_server.errors import DrainingError, InvalidRequestError, VerifierFailedError, VerifierTimeoutError
from rm_server.verifiers import nursery
from rm_server.verifiers.answers import Answer
from rm_server.verifiers.nursery import answer as answer_of
from rm_server.verifiers.parts import LengthPart, MathPart, RegexPart
from rm_server.verifiers.pool import VerifierPool
from rm_server.verifiers.sandbox import SandboxError

TOWER = "9^{9^{9^{9}}}"


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    pool = VerifierPool(
        {
            "answer": MathPart(kind="math", timeout_seconds=1.5),
            "patience": MathPart(kind="math", timeout_seconds=60),
            "format": RegexPart(kind="regex", pattern="(a|aa)+$", timeout_seconds=1.5),
            "length": LengthPart(kind="length", maximum=3, timeout_seconds=60),
        },
        num_workers=2,
    )
    pool.start()
    yield pool
    pool.close()


def test_value_of_each_part(pool: VerifierPool) -> None:
    assert pool.submit("patience", Answer("so \\boxed{0.5}", "\\frac{1}{2}")).result(60) == 1.0
    assert pool.submit("patience", Answer("so \\boxed{0.6}", "\\frac{1}{2}")).result(60) == 0.0
    assert pool.submit("format", Answer("aaa")).result(60) == 1.0
    assert pool.submit("length", Answer("four")).result(60) == 0.0


def test_power_tower_ends_at_the_limit_and_costs_only_its_item(pool: VerifierPool) -> None:
    before = pool.num_replaced
    tower = pool.submit("answer", Answer(f"\\boxed{{{TOWER}}}", 1))
    others = [pool.submit("patience", Answer(f"${i}$", i)) for i in range(20)]
    assert [other.result(60) for other in others] == [1.0] * 20
    with pytest.raises(VerifierTimeoutError, match=r"answer: took longer than its limit of 1\.5 s"):
        tower.result(60)
    assert pool.num_replaced == before + 1
    assert pool.submit("patience", Answer("$3$", 3)).result(60) == 1.0


def test_pattern_that_backtracks_for_ever_ends_at_the_limit(pool: VerifierPool) -> None:
    with pytest.raises(VerifierTimeoutError):
        pool.submit("format", Answer("a" * 100 + "b")).result(60)


def test_worker_killed_from_outside_is_replaced_and_its_answer_verified(pool: VerifierPool) -> None:
    workers = [worker.pid for worker in list(pool._idle.queue) if worker is not None]
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    futures = [pool.submit("length", Answer("abc")) for _ in range(8)]
    assert [future.result(60) for future in futures] == [1.0] * 8


def test_answer_that_kills_its_process_twice_is_an_error_of_its_own(pool: VerifierPool) -> None:
    before = children_of(pool)
    future = pool.submit("patience", Answer(f"${TOWER}$", 1))
    for _ in range(2):
        busy = until_one_is_busy(pool)
        os.kill(busy, signal.SIGKILL)
        while busy in children_of(pool):
            pass
    with pytest.raises(VerifierFailedError, match="patience: its process died on this answer"):
        future.result(60)
    assert pool.submit("patience", Answer("$1$", 1)).result(60) == 1.0
    assert len(before) == 2


def children_of(pool: VerifierPool) -> set[int]:
    """The living workers."""
    assert pool._nursery is not None
    nursery = pool._nursery._process.pid
    children = Path(f"/proc/{nursery}/task/{nursery}/children").read_text().split()
    return {int(pid) for pid in children if state_of(int(pid)) not in ("Z", "X")}


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def until_one_is_busy(pool: VerifierPool) -> int:
    """The number of a worker that has computed for a tenth of a second without a pause."""
    while True:
        for pid in children_of(pool):
            try:
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if stat[0] == "R" and int(stat[11]) + int(stat[12]) >= 10:
                return pid


def test_memory_limit_recursion_and_any_exception_are_errors_in_words() -> None:
    task = {"text": "secret", "reference": None, "finished": True}

    def raising(error: Exception) -> dict[str, Any]:
        def verify(answer: Answer) -> float:
            raise error

        return answer_of(verify, task)

    assert raising(MemoryError("secret")) == {"error": "memory", "message": ""}
    assert raising(RecursionError("secret")) == {"error": "recursion", "message": ""}
    assert raising(KeyError("secret")) == {"error": "raised", "message": "KeyError"}
    assert raising(SandboxError("no walls")) == {"error": "sandbox", "message": "no walls"}


@pytest.mark.parametrize(
    ("share", "value", "replies"),
    [
        (0.7, 0.0, [{"value": 0.0, "last": False}, {"value": 0.0, "last": True}]),
        (0.9, 0.0, [{"error": "memory", "message": "", "last": True}]),
        (0.9, 1.0, [{"value": 1.0, "last": True}]),
    ],
)
def test_0_that_used_up_the_memory_is_an_error_and_ends_its_worker(
    monkeypatch: pytest.MonkeyPatch, share: float, value: float, replies: list[dict[str, Any]]
) -> None:
    limit = 1 << 30
    monkeypatch.setattr(nursery, "MAX_TASKS", 2)
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)
    monkeypatch.setattr("resource.getrusage", lambda _: SimpleNamespace(ru_maxrss=int(share * limit / 1024)))
    ours, theirs = Pipe()
    task = {"part": "x", "text": "", "reference": 1, "finished": True, "seconds": 60}
    for _ in range(2):
        ours.send_bytes(json.dumps(task).encode())
    nursery.work(theirs, {"x": lambda answer: value}, limit)
    assert [json.loads(ours.recv_bytes()) for _ in replies] == replies
    assert not ours.poll()


def test_reference_that_is_not_there_is_the_callers_error(pool: VerifierPool) -> None:
    with pytest.raises(InvalidRequestError, match=r"patience: reference: is required"):
        pool.submit("patience", Answer("$1$")).result(60)
    with pytest.raises(InvalidRequestError, match=r"patience: reference: must be a text, a number, or a list"):
        pool.submit("patience", Answer("$1$", {"a": 1})).result(60)


def test_closing_ends_every_process_and_every_wait() -> None:
    pool = VerifierPool({"answer": MathPart(kind="math", timeout_seconds=600)}, num_workers=2)
    pool.start()
    pids = [worker.pid for worker in list(pool._idle.queue) if worker is not None]
    assert len(pids) == 2
    futures = [pool.submit("answer", Answer(f"${TOWER}$", 1)) for _ in range(5)]
    while sum(future.running() for future in futures) != 2:
        pass
    pool.close()
    for future in futures:
        assert future.cancelled() or isinstance(future.exception(30), DrainingError)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert isinstance(pool.submit("answer", Answer("$1$", 1)).exception(30), DrainingError)


def test_parent_of_the_workers_that_was_killed_is_replaced() -> None:
    pool = VerifierPool({"length": LengthPart(kind="length", timeout_seconds=60)}, num_workers=2)
    pool.start()
    try:
        assert pool._nursery is not None
        nursery = pool._nursery._process.pid
        workers = children_of(pool)
        os.kill(nursery, signal.SIGKILL)
        while any(state_of(pid) not in ("Z", "X") for pid in workers):
            pass
        assert [pool.submit("length", Answer("abc")).result(120) for _ in range(3)] == [1.0] * 3
        pool.check()
        assert pool._nursery._process.pid != nursery
    finally:
        pool.close()
    with pytest.raises(DrainingError):
        pool.check()
