"""The command as a process: start-up line, requests, SIGTERM, and what it says when it cannot start."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rm_server.settings import SettingsError

ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@contextmanager
def server(checkpoint: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running ``rm-server`` on a free port, and its URL once it says that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rm_server.cli", str(checkpoint), "--port", "0", "--dtype", "float32", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("rm-server ready on http"), process.communicate(timeout=30)
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_process_serves_and_ends_with_0_on_sigterm_having_answered_all(tiny_checkpoint: Path) -> None:
    with server(tiny_checkpoint) as (process, url):
        assert httpx.get(f"{url}/ready").status_code == 200
        reward_id = json.loads((tiny_checkpoint / "reward_model.json").read_text())["reward_id"]
        assert httpx.get(f"{url}/info").json()["reward_id"] == reward_id

        def call(number: int) -> Any:
            return httpx.post(f"{url}/score", json={"texts": [f"text {number} {i}" for i in range(40)]}, timeout=60)

        with ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(call, number) for number in range(8)]
            while "rm_requests_admitted_total 8.0" not in httpx.get(f"{url}/metrics").text:
                pass
            process.send_signal(signal.SIGTERM)
            for number, answered in enumerate(calls):
                response = answered.result()
                assert (response.status_code, len(response.json()["rewards"])) == (200, 40), number
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0
        assert out == ""
        assert "Traceback" not in err
        assert "text 1" not in err


@pytest.mark.slow
def test_process_that_cannot_start_says_why_in_one_line(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "rm_server.cli", str(tmp_path), "--port", "0"],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=120,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    assert "config.json" in result.stderr


def run_patched(patch: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, in which something was changed before."""
    code = f"import os, signal, time\nfrom rm_server import cli\n{patch}\ncli.main(['x', '--port', '0'])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=ENVIRONMENT)


@pytest.mark.parametrize("name", ["ScoringService", "create_app", "uvicorn_config", "raise_file_limit"])
def test_sigterm_before_anything_is_served_ends_the_process_with_0(name: str) -> None:
    result = run_patched(
        f"real = cli.{name}\n"
        f"cli.{name} = lambda *args, **options: (os.kill(os.getpid(), signal.SIGTERM), real(*args, **options))[1]\n"
        "cli.load_model = lambda settings: time.sleep(20)"
    )
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    assert "Traceback" not in result.stderr


def test_server_that_cannot_serve_its_socket_says_why_in_one_line() -> None:
    result = run_patched(
        "async def fail(self, sockets): raise OSError(98, 'Address already in use')\n"
        "cli._Server.startup = fail\n"
        "cli.load_model = lambda settings: time.sleep(20)"
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Address already in use" in result.stderr


def test_of_two_servers_on_one_port_the_second_is_refused() -> None:
    from rm_server.cli import _listen

    with _listen("127.0.0.1", 0) as first, pytest.raises(SettingsError, match="Address already in use"):
        _listen("127.0.0.1", first.getsockname()[1])


def test_port_in_use_is_one_line_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = subprocess.run(
            [sys.executable, "-m", "rm_server.cli", str(tmp_path), "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert result.returncode == 2
    assert result.stderr == f"rm-server: error: cannot listen on 127.0.0.1:{port}: Address already in use\n"
