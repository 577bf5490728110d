"""Worker processes for verifiers, with hard limits.

A thread for each worker hands it one answer at a time and waits for the value until the part's time is up. The workers
are forked by one process that has the libraries loaded (``nursery.py``), so a replacement is there in milliseconds.

Invariant: every submitted answer gets a value or an error of its own; a worker that hangs is killed, one that dies is
replaced, and neither costs another answer anything but time.
"""

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import orjson

from rm_server.errors import (
    DrainingError,
    InvalidRequestError,
    OverloadedError,
    ServerError,
    VerifierFailedError,
    VerifierTimeoutError,
)
from rm_server.verifiers import nursery
from rm_server.verifiers.answers import Answer
from rm_server.verifiers.parts import CodePart, VerifierPart

MEMORY_MB = 2048
"""Address space of a worker."""
START_SECONDS = 120
_NURSERY = "from rm_server.verifiers.nursery import main; main()"


class VerifierSetupError(ValueError):
    """The verifiers cannot be started; one line that says what is missing."""


class VerifierPool:
    """Runs the verifiers of a recipe. ``start`` before the first ``submit``; ``close`` ends every process."""

    def __init__(self, parts: Mapping[str, VerifierPart], num_workers: int) -> None:
        self.parts = dict(parts)
        self.num_workers = num_workers
        self.num_replaced = 0
        """Workers that were killed at their limit or died."""
        self.versions: dict[str, str] = {}
        """What a value depends on beside the options, once started."""
        self.on_replaced: Callable[[], None] = lambda: None
        self.on_done: Callable[[str, float], None] = lambda part, seconds: None
        """Called on the pool's threads, as ``on_replaced`` is: part, and seconds with a worker."""
        memory = [part.memory_mb + 256 for part in self.parts.values() if isinstance(part, CodePart)]
        self._memory_mb = max([MEMORY_MB, *memory])
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="rm-verifier")
        self._nursery: _Nursery | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self) -> None:
        """Start the processes; blocks for the seconds that loading the libraries takes. Raises VerifierSetupError."""
        self._nursery = _Nursery(self.parts, self._memory_mb)
        self.versions = self._nursery.versions
        for _ in range(self.num_workers):
            self._idle.put(self._new_worker())

    def submit(self, part: str, answer: Answer) -> "Future[float]":
        """Verify one answer. The future gives a finite-or-not float, or raises ServerError; it can be cancelled while
        it waits for a worker."""
        try:
            return self._threads.submit(self._run, part, answer)
        except RuntimeError:
            closed: Future[float] = Future()
            closed.set_exception(_shutting_down())
            return closed

    def check(self) -> None:
        """Prove that workers can still be made, by making one. Raises ServerError."""
        self._retire(self._new_worker(), counts=False)

    def close(self) -> None:
        """End every process now; what is submitted and not done raises DrainingError or is cancelled."""
        with self._lock:
            self._is_closed = True
            if self._nursery is not None:
                self._nursery.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ on the pool's threads

    def _run(self, part: str, answer: Answer) -> float:
        worker = self._idle.get()  # never waits: there are as many as threads
        start = time.monotonic()
        try:
            reply = None
            while reply is None:
                worker, is_fresh = (worker, False) if worker is not None else (self._new_worker(), True)
                try:
                    reply = worker.ask(part, answer, self.parts[part].timeout_seconds)
                except TimeoutError:
                    self._retire(worker)
                    worker = None
                    seconds = self.parts[part].timeout_seconds
                    raise VerifierTimeoutError(f"{part}: took longer than its limit of {seconds:g} s") from None
                except (EOFError, OSError):
                    self._retire(worker)
                    worker = None
                    if is_fresh:  # not a death that only this answer's turn brought to light
                        raise VerifierFailedError(f"{part}: its process died on this answer") from None
            if reply["last"] and worker is not None:
                self._retire(worker, counts="error" in reply)
                worker = None
            return _value(part, reply, self._memory_mb)
        finally:
            self._idle.put(worker)
            self.on_done(part, time.monotonic() - start)

    def _new_worker(self) -> "_Worker":
        with self._lock:
            if self._is_closed:
                raise _shutting_down()
            assert self._nursery is not None, "this is a bug: the pool was not started"
            try:
                return self._nursery.new_worker()
            except OSError:  # the nursery itself died: killed from outside, or out of memory
                self._nursery.close()
            try:
                self._nursery = _Nursery(self.parts, self._memory_mb)
                return self._nursery.new_worker()
            except (OSError, VerifierSetupError):
                raise OverloadedError("the verifiers' processes cannot be started at the moment", 5) from None

    def _retire(self, worker: "_Worker", *, counts: bool = True) -> None:
        """End a worker; the next answer gets a new one."""
        worker.connection.close()
        with self._lock:
            if self._is_closed:
                raise _shutting_down()
            worker.nursery.end_worker(worker)
            self.num_replaced += counts
        if counts:
            self.on_replaced()


@dataclass(frozen=True, eq=False)
class _Worker:
    """One worker process, as its thread sees it."""

    nursery: "_Nursery"
    connection: "Connection[Any, Any]"
    pid: int

    def ask(self, part: str, answer: Answer, seconds: float) -> dict[str, Any]:
        """Raises TimeoutError when the time is up, EOFError or OSError where the process died, InvalidRequestError."""
        task = {"part": part, "text": answer.text, "reference": answer.reference, "finished": answer.finished}
        try:
            content = orjson.dumps({**task, "seconds": seconds})
        except orjson.JSONEncodeError:  # it writes 254 levels; json would write more than the worker can read
            raise InvalidRequestError(f"{part}: reference: is nested too deeply") from None
        self.connection.send_bytes(content)
        if not self.connection.poll(seconds):
            raise TimeoutError
        reply: dict[str, Any] = json.loads(self.connection.recv_bytes())
        return reply


class _Nursery:
    """The process that forks workers. Its methods are called under the pool's lock, one at a time."""

    def __init__(self, parts: Mapping[str, VerifierPart], memory_mb: int) -> None:
        """Raises VerifierSetupError."""
        dumped = {name: part.model_dump(mode="json", by_alias=True) for name, part in parts.items()}
        self._control, theirs = socket.socketpair()
        self._control.settimeout(START_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _NURSERY, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},  # a fork wants one thread
            )
        ready = self._set_up(json.dumps({"parts": dumped, "memory_mb": memory_mb}).encode())
        if "problem" in ready:
            self.close()
            raise VerifierSetupError(f"the verifiers cannot be started: {ready['problem']}")
        self.versions: dict[str, str] = ready["versions"]

    def _set_up(self, setup: bytes) -> dict[str, Any]:
        assert self._process.stdin is not None, "this is a bug: stdin is a pipe"
        try:
            with self._process.stdin as stdin:
                stdin.write(setup)
            with self._control.makefile("rb", buffering=0) as reader:
                line = reader.readline()
        except TimeoutError:
            return {"problem": f"they were not ready within {START_SECONDS} s"}
        except OSError as error:
            return {"problem": str(error)}
        ready: dict[str, Any] = json.loads(line) if line else {"problem": "their process ended at once"}
        return ready

    def new_worker(self) -> _Worker:
        """Fork one. Raises OSError where the nursery is gone."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            socket.send_fds(self._control, [nursery.NEW + bytes(4)], [theirs.fileno()])
            pid = self._answer()
            return _Worker(self, Connection(ours.detach()), pid)

    def end_worker(self, worker: _Worker) -> None:
        """Kill one, and with it whatever it runs. A dead nursery has taken its workers along."""
        with contextlib.suppress(OSError):
            self._control.sendall(nursery.END + worker.pid.to_bytes(4, "big"))
            self._answer()

    def _answer(self) -> int:
        number = self._control.recv(4, socket.MSG_WAITALL)
        if len(number) < 4:
            raise ConnectionError("the verifiers' parent process is gone")
        return int.from_bytes(number, "big")

    def close(self) -> None:
        """End the nursery and all its workers."""
        self._control.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _value(part: str, reply: dict[str, Any], memory_mb: int) -> float:
    if "value" in reply:
        return float(reply["value"])
    error, message = reply["error"], reply["message"]
    raise _ERRORS[error](f"{part}: {message}" if message else part, memory_mb)


def _shutting_down() -> ServerError:
    return DrainingError("the server is shutting down", 5)


_ERRORS: dict[str, Callable[[str, int], ServerError]] = {
    "reference": lambda where, _: InvalidRequestError(where),
    "sandbox": lambda where, _: OverloadedError(where, 5),
    "memory": lambda where, mb: VerifierFailedError(f"{where}: needed more memory than its limit of {mb} MiB"),
    "recursion": lambda where, _: VerifierFailedError(f"{where}: the answer is nested too deeply"),
    "raised": lambda where, _: VerifierFailedError(f"{where}: the verifier failed on this answer"),
}
