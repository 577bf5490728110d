"""What every benchmark needs: fresh texts, servers that start and stop, load, interleaved rounds, one JSON line last.

Invariant: no text is ever sent twice to the same server, so neither a cache nor de-duplication can win for free.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import os
import platform
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

REPOSITORY = Path(__file__).resolve().parent.parent
Score = float | None


def parse_arguments(description: str, add: Callable[[argparse.ArgumentParser], None]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: does it work, not how fast is it")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one for every run, printed in the JSON")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of every side")
    add(parser)
    arguments = parser.parse_args()
    if arguments.seed is None:
        arguments.seed = int.from_bytes(os.urandom(4), "little")
    return arguments


def cpu_environment(threads: int, **extra: str) -> dict[str, str]:
    """The environment of every process under test: same threads, no hub, no leftovers from the caller's PYTHONPATH."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return environment | extra


# ---- texts -----------------------------------------------------------------------------------------------------------


class FreshTexts:
    """English-looking texts of an exact token count, new at every call: words that are one token each with their space.

    The vocabulary keeps a text's count the same wherever it is cut or joined, since each word starts at a space.
    """

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.random = random.Random(seed)
        self.end = tokenizer.eos_token
        candidates = [t[1:] for t in tokenizer.get_vocab() if t[:1] == "\u0120" and t[1:].isascii() and len(t) > 3]
        words = sorted(word for word in candidates if word.isalpha() and word.islower())
        ids = tokenizer([f" {word}" for word in words], add_special_tokens=False).input_ids
        self.words = [word for word, own in zip(words, ids, strict=True) if len(own) == 1]
        probe = self.text(500)
        if len(self.words) < 2000 or len(tokenizer(probe, add_special_tokens=False).input_ids) != 500:
            raise SystemExit(
                "this tokenizer does not spell a word and its leading space as one token; use another model"
            )

    def text(self, num_tokens: int) -> str:
        return "".join(f" {word}" for word in self.random.choices(self.words, k=num_tokens))


@dataclass(frozen=True)
class Group:
    """One prompt with its answers; an answer of n tokens is n - 1 words and the end token that every side adds."""

    prompt: str
    completions: list[str]

    def texts(self, end: str) -> list[str]:
        return [f"{self.prompt}{completion}{end}" for completion in self.completions]


def fresh_groups(texts: FreshTexts, num_groups: int, prompt: int, answer: int, group: int = 8) -> list[Group]:
    return [Group(texts.text(prompt), [texts.text(answer - 1) for _ in range(group)]) for _ in range(num_groups)]


# ---- the reward model that every server loads ------------------------------------------------------------------------


def quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def prepare_model(directory: Path | None) -> Path:
    """A plain one-label sequence classifier (bf16 safetensors) of the bundled SmolLM2 with a fixed head.

    The head's values are bf16, so that a server which keeps it in fp32 and one which keeps it in bf16 hold the same.
    """
    if directory is not None and (directory / "config.json").is_file():
        return directory
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from rm_core.smollm2 import bundled_model_path, cache_directory

    target = directory or cache_directory() / "benchmark-reward-model"
    if (target / "config.json").is_file():
        return target
    quiet_transformers()
    base = bundled_model_path()
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.bfloat16)
    hidden = model.config.hidden_size
    head = torch.randn(1, hidden, generator=torch.Generator().manual_seed(0)) * hidden**-0.5
    model.score.weight.data = head.to(torch.bfloat16)
    staging = Path(tempfile.mkdtemp(dir=target.parent))
    model.save_pretrained(staging)
    AutoTokenizer.from_pretrained(base).save_pretrained(staging)
    staging.rename(target)
    return target


# ---- processes -------------------------------------------------------------------------------------------------------


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

    def resident_bytes(self) -> int:
        assert self.process is not None
        return sum(_resident(pid) for pid in _group_members(self.process.pid))


def _group_members(group: int) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(ProcessLookupError, OSError):
                if os.getpgid(int(entry)) == group:
                    yield int(entry)


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


# ---- load ------------------------------------------------------------------------------------------------------------


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


# ---- numbers ---------------------------------------------------------------------------------------------------------


def agreement(ours: Sequence[float], peer: Sequence[float]) -> dict[str, float]:
    """How far two lists of scores are apart, in units of the spread of the scores."""
    deviation = statistics.pstdev(ours) or 1.0
    differences = [abs(a - b) for a, b in zip(ours, peer, strict=True)]
    return {
        "num_scores": len(differences),
        "spread": round(deviation, 4),
        "rms": round(rms_error(ours, peer), 4),
        "max_over_spread": round(max(differences) / deviation, 4),
        "correlation": round(statistics.correlation(ours, peer), 5),
    }


def demand_agreement(found: dict[str, float], names: str, noise: float) -> None:
    """Two bf16 forwards may each be as far from the truth as plain transformers in bf16, ``noise`` (rms), is; three
    times that apart is a wrong answer."""
    if found["rms"] > 3 * noise:
        raise SystemExit(f"{names} do not score alike (bf16 noise is {noise:.4f}), so no speed is reported: {found}")


def reference_scores(model: Path, texts: Sequence[str], dtype: str) -> list[float]:
    """Plain transformers, one text at a time, in a dtype of choice: what the scores should be."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    quiet_transformers()
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForSequenceClassification.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    scores = []
    with torch.inference_mode():
        for text in texts:
            ids = torch.tensor([tokenizer(text).input_ids])
            # Not the class's own pooling: with pad == eos it reads another token.
            hidden = network.model(ids).last_hidden_state[0, -1].float()
            scores.append(float(hidden @ network.score.weight[0].float()))
    return scores


def rms_error(scores: Sequence[float], reference: Sequence[float]) -> float:
    return (sum((a - b) ** 2 for a, b in zip(scores, reference, strict=True)) / len(reference)) ** 0.5


def bfloat16_noise(model: Path, texts: FreshTexts, count: int) -> float:
    """Root mean square error of plain transformers in bf16 against itself in fp32."""
    whole = [texts.text(199) + texts.end for _ in range(count)]
    return rms_error(*(reference_scores(model, whole, dtype) for dtype in ("bfloat16", "float32")))


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def say(line: str) -> None:
    """Progress goes to stderr: stdout ends with the JSON line."""
    print(line, file=sys.stderr, flush=True)


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """One aligned table; the columns are the keys of the first row."""
    columns = list(rows[0])
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    for line in [columns, ["-" * width for width in widths], *cells]:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)


def finish(result: dict[str, Any], rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Print the table and, as the last line of stdout, one JSON object."""
    if rows:
        print_table(rows)
    result |= {"quick": arguments.quick, "seed": arguments.seed, "threads": arguments.threads}
    result |= {"versions": versions(), "device": device_name(arguments.device)}
    print(json.dumps(result), flush=True)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("betterthan", "torch", "transformers", "peft"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
        found["revision"] = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    return found


def peer_versions(python: str, packages: Sequence[str]) -> dict[str, str]:
    code = "import importlib.metadata as m, json, sys; print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))"
    answer: dict[str, str] = json.loads(subprocess.check_output([python, "-c", code, *packages], text=True))
    return answer


def device_name(device: str) -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next(line for line in lines if line.startswith("flags")).split()
        name = next(line for line in lines if line.startswith("model name")).split(":", 1)[1].strip()
        kinds = [kind for kind in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if kind in flags]
        return f"{name}, {os.cpu_count()} cores, {kinds[0] if kinds else 'no avx2'}"
    return platform.processor() or platform.machine()


def required_python(value: str | None, variable: str) -> str:
    python = value or os.environ.get(variable)
    if not python or not Path(python).is_file():
        raise SystemExit(
            f"name the peer's python by its flag or {variable} (benchmarks/README.md says how to set it up)"
        )
    return python
