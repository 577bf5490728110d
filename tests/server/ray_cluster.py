"""A Ray cluster of its own for one test module, and Ray Serve's command line on it. Nothing of Ray is imported here.

Invariant: every process that was started is gone when the context ends; no port and no folder is shared with anybody.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).resolve().parents[2]
SECONDS_TO_START = 300

HEAD = """
import json, sys, ray
from ray import serve
from ray.util import list_named_actors
found = ray.init(num_cpus=8, include_dashboard=sys.argv[2] == "dashboard", object_store_memory=80_000_000,
                 _temp_dir=sys.argv[1], log_to_driver=False, configure_logging=False)
print(found.address_info["gcs_address"], found.dashboard_url, flush=True)
for line in sys.stdin:
    command, _, name = line.strip().partition(" ")
    names = [actor["name"] for actor in list_named_actors(all_namespaces=True) if "#Scorer#" in actor["name"]]
    if command == "start":
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": int(name)})
    if command == "kill":
        ray.kill(ray.get_actor(names[0], namespace="serve"), no_restart=True)
    applications = serve.status().applications
    print(json.dumps({
        "replicas": names,
        "applications": {name: [found.status, found.message] for name, found in applications.items()},
        "deployments": {name: {key: [value.status, value.replica_states] for key, value in found.deployments.items()}
                        for name, found in applications.items()},
    }), flush=True)
serve.shutdown()
ray.shutdown()
"""


class Cluster:
    """What a test does with the cluster."""

    def __init__(self, head: "subprocess.Popen[str]", directory: Path, environment: dict[str, str]) -> None:
        self._head, self._directory = head, directory
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        assert head.stdout is not None
        address, _, dashboard = head.stdout.readline().strip().partition(" ")
        assert address, "the cluster did not start"
        self.environment = {**environment, "RAY_ADDRESS": address, "RAY_DASHBOARD_ADDRESS": f"http://{dashboard}"}

    def ask(self, command: str = "status") -> dict[str, Any]:
        """`status`; `start PORT`: the proxy, without an application; `kill`: end a replica at once."""
        assert self._head.stdin is not None
        assert self._head.stdout is not None
        print(command, file=self._head.stdin, flush=True)
        return dict(json.loads(self._head.stdout.readline()))

    def deploy(self, *applications: dict[str, Any]) -> None:
        """Run `serve run` with a config file, and wait until all of it runs."""
        self.submit(*applications)
        self.until(self.is_running)

    def submit(self, *applications: dict[str, Any]) -> None:
        """Run `serve run` with a config file."""
        config = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "applications": list(applications),
        }
        file = self._directory / "serve.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        self.run(["serve", "run", "--non-blocking", str(file)])

    def run(self, command: list[str], **environment: str) -> None:
        """Run a command of Ray's to its end."""
        with self.running(command, **environment) as process:
            said, _ = process.communicate()
        assert process.returncode == 0, said

    @contextmanager
    def running(self, command: list[str], **environment: str) -> "Iterator[subprocess.Popen[str]]":
        """Run a command of Ray's beside the test. What it says can be read from its stdout."""
        process = subprocess.Popen(
            # Who runs the tests in the background may have SIGINT ignored, which processes inherit.
            ["env", "--default-signal=INT", str(Path(sys.executable).parent / command[0]), *command[1:]],
            env={**self.environment, **environment},
            cwd=self._directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()

    def is_running(self) -> bool:
        """Every application runs with all its replicas. AssertionError where one failed."""
        status = self.ask()
        states = dict(status["applications"].values())
        assert "DEPLOY_FAILED" not in states, states
        return set(states) == {"RUNNING"} and all(
            state == "HEALTHY" and set(replicas) == {"RUNNING"}
            for found in status["deployments"].values()
            for state, replicas in found.values()
        )

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something. Fails when the cluster ends, or after minutes."""
        for _ in range(SECONDS_TO_START * 4):
            if condition():
                return
            try:
                raise AssertionError(f"the cluster ended with {self._head.wait(timeout=0.25)}")
            except subprocess.TimeoutExpired:
                continue
        raise AssertionError(f"it never happened: {self.ask()}")

    def samples(self, name: str, prefix: str = "") -> dict[str, float]:
        """A metric's value for each replica."""
        lines = httpx.get(f"{self.url}{prefix}/metrics", timeout=60).text.splitlines()
        found = {}
        for line in lines:
            if line.startswith(f"{name}{{"):
                labels, value = line.removeprefix(name).rsplit(" ", 1)
                found[labels] = float(value)
        return found


@contextmanager
def cluster(*, dashboard: bool = False) -> Iterator[Cluster]:
    """A head node, in a folder whose name is short enough for Ray's sockets."""
    directory = Path(tempfile.mkdtemp(prefix="rs", dir="/tmp"))
    environment = {
        **os.environ,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD, str(directory), "dashboard" if dashboard else "alone"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        cwd=directory,
    )
    try:
        yield Cluster(head, directory, environment)
    finally:
        assert head.stdin is not None
        head.stdin.close()
        try:
            head.wait(timeout=60)
        finally:
            head.kill()
            head.wait()
            assert head.stdout is not None
            head.stdout.close()
            shutil.rmtree(directory, ignore_errors=True)
