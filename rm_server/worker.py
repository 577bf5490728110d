"""Threads that do one kind of work for the event loop, and since when they have been at it.

Invariant: work that has begun is under way until it ends, whoever still waits for it: a thread cannot be stopped.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Worker:
    """Runs work in order. ``on_stall`` is called, on the event loop, for each that takes ``stall_seconds``."""

    def __init__(
        self,
        name: str,
        *,
        stall_seconds: float,
        on_stall: Callable[[], None],
        clock: Callable[[], float],
        num_threads: int = 1,
    ) -> None:
        self.executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        """For work that may take its time."""
        self._stall_seconds = stall_seconds
        self._on_stall = on_stall
        self._clock = clock
        self._begun: dict[int, float] = {}
        self._num_given = 0

    @property
    def busy_seconds(self) -> float:
        """How long the oldest work under way has been running; 0 when there is none."""
        begun = next(iter(tuple(self._begun.values())), None)
        return 0.0 if begun is None else self._clock() - begun

    async def run(self, work: Callable[[], T]) -> T:
        """The result of ``work``. Where the waiting task is cancelled, work that has not begun is dropped."""
        loop = asyncio.get_running_loop()
        self._num_given += 1
        number = self._num_given

        def on_thread() -> T:
            self._begun[number] = self._clock()
            try:
                return work()
            finally:
                self._begun.pop(number, None)

        job: _Job[T] = _Job(number, self.executor.submit(on_thread))
        ended = loop.create_future()
        # Not wrap_future: it leaves a cycle of a dozen objects, and what they hold, to the garbage collector.
        job.future.add_done_callback(partial(_tell, loop, ended))
        job.timer = loop.call_later(self._stall_seconds, self._watch, loop, job)
        try:
            await ended
            return job.future.result()
        finally:
            if job.future.cancel() or job.future.done():  # else the thread is still at it, and is watched
                job.timer.cancel()
            del job

    def _watch(self, loop: asyncio.AbstractEventLoop, job: "_Job[Any]") -> None:
        if job.future.done():
            return
        seconds = self._clock() - self._begun.get(job.number, self._clock())
        if seconds >= self._stall_seconds:
            self._on_stall()
        else:
            job.timer = loop.call_later(self._stall_seconds - seconds, self._watch, loop, job)

    def close(self) -> None:
        """Take no more work; what is under way is not waited for."""
        self.executor.shutdown(wait=False, cancel_futures=True)


@dataclass
class _Job(Generic[T]):
    number: int
    future: "Future[T]"
    timer: asyncio.TimerHandle = field(init=False)


def _tell(loop: asyncio.AbstractEventLoop, ended: "asyncio.Future[None]", future: "Future[Any]") -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(_end, ended, future.cancelled())


def _end(ended: "asyncio.Future[None]", is_cancelled: bool) -> None:
    if is_cancelled:
        ended.cancel()
    elif not ended.done():
        ended.set_result(None)
