"""The audit log: one line for every reward that was answered, without any text, from which a run can be checked later.

A line is a JSON object: ``time`` (UTC), ``request_id``, ``index`` (place among the request's items, counted from 0 over
all groups), ``ids`` (``sha256:`` over the token ids that were scored, each as 4 bytes, big-endian), ``tokens``,
``reward_id``, ``dtype`` and ``reward``; with a recipe also ``components``, its parts. Items that got an error have no
line. Where no model scores (a recipe of verifiers only), ``ids`` is null and ``tokens`` 0.

Invariant: a request never waits for the disk and never fails because of it; what could not be written is counted and
logged; a file holds whole lines only.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import orjson

from rm_server.groups import Request
from rm_server.scorer import ServedModel
from rm_server.settings import SettingsError

logger = logging.getLogger("rm_server")

MAX_WAITING_RECORDS = 262_144
"""Records that may wait for the disk; beyond it they are lost and counted."""
MAX_LINE_BYTES = 4096
COMPLAINT_SECONDS = 60.0
"""A disk that fails is logged this often at most."""
_Batch = list[bytes]


def ids_digest(key: bytes) -> str:
    """What the log says of a sequence. ``key``: its token ids as big-endian uint32."""
    return "sha256:" + hashlib.sha256(key).hexdigest()


class AuditLog:
    """Appends to one file from one thread. Raises SettingsError where the file cannot be opened at the start."""

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        count: Callable[[str, int], None] = lambda outcome, records: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._count = count
        self._clock = clock
        self._complained_at: float | None = None
        self._waiting = 0
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._file = -1
        try:
            self._open()
        except BlockingIOError:
            raise SettingsError(f"audit_log: {path} is written by another server") from None
        except OSError as error:
            raise SettingsError(f"audit_log: {path} cannot be written: {error.strerror or error}") from None
        self._thread = threading.Thread(target=self._run, name="rm-audit", daemon=True)
        self._thread.start()

    def record(self, request_id: str | None, model: ServedModel, request: Request) -> None:
        """Note the rewards of one settled request. Does not wait."""
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        common = {"time": now, "request_id": request_id}
        scored_by = {"reward_id": model.reward_id, "dtype": model.dtype}
        lines = []
        for index, reward in enumerate(request.rewards):
            if reward is None:
                continue
            ids, tokens = request.digests.get(index, (None, 0))
            entry: dict[str, Any] = {**common, "index": index, "ids": ids, "tokens": tokens, **scored_by}
            entry["reward"] = reward
            if request.components is not None:
                entry["components"] = {name: values[index] for name, values in request.components.items()}
            lines.append(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))
        if not lines:
            return
        with self._lock:
            has_room = self._waiting + len(lines) <= MAX_WAITING_RECORDS
            self._waiting += len(lines) if has_room else 0
        if has_room:
            self._queue.put(lines)
        else:
            self._lose(len(lines), f"the disk is {MAX_WAITING_RECORDS} records behind")

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Write what waits and close the file; give up on a disk that takes longer."""
        self._queue.put(None)
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            logger.error("the audit log was not finished within %g s", timeout_seconds)

    def _run(self) -> None:
        while (lines := self._queue.get()) is not None:
            try:
                self._write(lines)
            except OSError as error:
                self._lose(len(lines), error.strerror or type(error).__name__)
            else:
                self._count("written", len(lines))
            with self._lock:
                self._waiting -= len(lines)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, lines: _Batch) -> None:
        data = memoryview(b"".join(lines))
        if self._file < 0:
            self._open()
        size = os.fstat(self._file).st_size
        if size and size + len(data) > self._max_bytes:
            self._rotate()
            size = 0
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, size)  # these records are counted as lost
            os.close(self._file)
            self._file = -1
            raise

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = os.fstat(file).st_size
            start = max(size - MAX_LINE_BYTES, 0)
            tail = os.pread(file, MAX_LINE_BYTES, start)
            if not tail.endswith(b"\n"):
                os.ftruncate(file, start + tail.rfind(b"\n") + 1)  # a crash or a full disk left half a line
        except OSError:
            os.close(file)
            raise
        self._file = file

    def _rotate(self) -> None:
        """Move the full file to ``PATH.N``, N one above the highest there, and begin a new one."""
        prefix = f"{self._path.name}."
        taken = [name.removeprefix(prefix) for name in os.listdir(self._path.parent) if name.startswith(prefix)]
        number = max((int(suffix) for suffix in taken if suffix.isdecimal()), default=0) + 1
        os.rename(self._path, f"{self._path}.{number}")
        os.close(self._file)
        self._file = -1
        self._open()

    def _lose(self, num_records: int, reason: str) -> None:
        self._count("lost", num_records)
        now = self._clock()
        if self._complained_at is None or now - self._complained_at >= COMPLAINT_SECONDS:
            self._complained_at = now
            logger.error("the audit log lost %d records: %s: %s", num_records, self._path, reason)
