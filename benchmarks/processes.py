"""Servers under test, each in processes of its own, and the load on them.

Invariant: only the server that is being measured runs; when the benchmark ends, none is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from common import say


def cpu_environment(threads: int, **extra: str) -> dict[str, str]:
    """The environment of every process under test: same threads, no hub, no leftovers from the caller's PYTHONPATH."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return environment | extra


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """A server under test in its own process group, so that it can be paused, measured and ended as a whole."""

    name: str
    command: Sequence[str]
    port: int
    ready_path: str
    environment: dict[str, str]
    start_limit_s: float = 900
    ready_seconds: float = 0.0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    log: Path = field(default_factory=lambda: Path(tempfile.mkstemp(suffix=".log", prefix="benchmark-")[1]))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Server:
        say(f"starting {self.name}: {shlex.join(self.command)}  (log {self.log})")
        began = time.perf_counter()
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                self.command, stdout=output, stderr=output, env=self.environment, start_new_session=True
            )
        while time.perf_counter() - began < self.start_limit_s:
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} ended with {self.process.returncode}:\n{self.log_tail()}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.url + self.ready_path, timeout=5).status_code == 200:
                    self.ready_seconds = time.perf_counter() - began
                    say(f"{self.name} ready after {self.ready_seconds:.1f} s")
                    return self
            time.sleep(0.1)
        self.stop()
        raise SystemExit(f"{self.name} not ready after {self.start_limit_s:.0f} s:\n{self.log_tail()}")

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def stop(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        if self.process is None or self.process.returncode is not None:
            return
        if not self._ended_within(30):
            self.signal(signal.SIGKILL)
        # What is left of the group (a worker that outlived its parent) ends too. The leader is reaped only afterwards:
        # until then its number cannot become that of somebody else's process.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _ended_within(self, seconds: float) -> bool:
        assert self.process is not None
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return True
            time.sleep(0.05)
        return False

    def cpu_seconds(self) -> float:
        """What the server's processes have computed so far, in user and system mode."""
        assert self.process is not None
        return sum(_cpu_seconds(pid) for pid in _group_members(self.process.pid))

    def resident_bytes(self) -> int:
        assert self.process is not None
        return sum(_resident(pid) for pid in _group_members(self.process.pid))


def _group_members(group: int) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(ProcessLookupError, OSError):
                if os.getpgid(int(entry)) == group:
                    yield int(entry)


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Start each server alone and pause it, so that an idle one's threads never disturb the one being measured."""
    try:
        for server in servers:
            server.start()
            server.signal(signal.SIGSTOP)
        yield
    finally:
        for server in servers:
            server.stop()


@contextlib.contextmanager
def awake(server: Server) -> Iterator[None]:
    server.signal(signal.SIGCONT)
    try:
        yield
    finally:
        server.signal(signal.SIGSTOP)


def our_server(model: Path, threads: int, dtype: str, extra: Sequence[str] = ()) -> Server:
    """`rm-server` of this environment; BETTERTHAN_SERVER_COMMAND replaces its first word (to try another build)."""
    port = free_port()
    script = os.environ.get("BETTERTHAN_SERVER_COMMAND") or str(Path(sys.executable).with_name("rm-server"))
    command = [*shlex.split(script), str(model), "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, *extra]
    return Server("ours", command, port, "/ready", cpu_environment(threads), start_limit_s=120)


def metadata_stub(distribution: str, version: str) -> Path:
    """A folder that makes ``importlib.metadata`` see a distribution of that name, and holds nothing else."""
    folder = Path(tempfile.mkdtemp(prefix="benchmark-stub-"))
    info = folder / f"{distribution}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    return folder


@dataclass
class Outcome:
    """One round on one side: scores in the order of the jobs, wall seconds, tokens as the server counted them."""

    scores: list[list[float]]
    seconds: float
    tokens: int
    computed_tokens: int | None = None

    def flat(self) -> list[float]:
        return [score for scores in self.scores for score in scores]


Reply = tuple[list[float], int, int]  # scores, tokens, computed tokens
Post = Callable[[httpx.AsyncClient, Any], Awaitable[Reply]]


def drive(server: Server, jobs: Sequence[Any], post: Post, connections: int) -> Outcome:
    """Closed loop: each connection sends its next job, in the list's order, once its last one was answered."""

    async def all_jobs() -> Outcome:
        replies: list[Reply | None] = [None] * len(jobs)
        numbers = iter(range(len(jobs)))
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        async with httpx.AsyncClient(base_url=server.url, timeout=900, limits=limits) as client:

            async def connection() -> None:
                for number in numbers:
                    replies[number] = await post(client, jobs[number])

            began = time.perf_counter()
            await asyncio.gather(*(connection() for _ in range(min(connections, len(jobs)))))
            seconds = time.perf_counter() - began
        done = [reply for reply in replies if reply is not None]
        assert len(done) == len(jobs)
        tokens, computed = sum(reply[1] for reply in done), sum(reply[2] for reply in done)
        return Outcome([reply[0] for reply in done], seconds, tokens, computed)

    with awake(server):
        return asyncio.run(all_jobs())


async def post_json(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=body)
    if response.status_code != 200:
        raise SystemExit(f"{client.base_url}{path} answered {response.status_code}: {response.text[:500]}")
    answer: dict[str, Any] = response.json()
    if answer.get("errors"):
        raise SystemExit(f"{client.base_url}{path} answered with errors: {answer['errors'][:3]}")
    return answer


def peer_versions(python: str, packages: Sequence[str]) -> dict[str, str]:
    code = "import importlib.metadata as m, json, sys; print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))"
    answer: dict[str, str] = json.loads(subprocess.check_output([python, "-c", code, *packages], text=True))
    return answer


def required_python(value: str | None, variable: str) -> str:
    python = value or os.environ.get(variable)
    if not python or not Path(python).is_file():
        raise SystemExit(
            f"name the peer's python by its flag or {variable} (benchmarks/README.md says how to set it up)"
        )
    return python
