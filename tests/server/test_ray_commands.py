"""The two commands of docs/scale.md that start replicas on Ray Serve, each on a cluster of its own."""

import asyncio
import shlex
import signal
from pathlib import Path

import httpx
import pytest
import yaml

from rm_client import RewardClient
from rm_core.model import RewardModel
from tests.server.conftest import running
from tests.server.ray_cluster import ROOT, Cluster, cluster

pytest.importorskip("ray", reason="the package ray[serve] is not installed")
pytestmark = pytest.mark.slow

TEXTS = ["2 + 2 = 4", "5"]
NUMBERS = {"RM_SERVER_DTYPE": "float32", "RM_SERVER_DEVICE": "cpu"}


def documented(beginning: str, **replaced: str) -> list[str]:
    """The words of the page's only command that begins so, with its paths replaced."""
    lines = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith(beginning)]
    for old, new in replaced.items():
        assert old in line
        line = line.replace(old, new)
    return shlex.split(line)


def assert_two_replicas_score(ray: Cluster, checkpoint: Path) -> None:
    assert len(ray.samples("rm_ready")) == 2
    wanted = asyncio.run(scores_of_one_server(checkpoint))
    with RewardClient(ray.url) as client:
        assert client.score_texts(TEXTS).rewards == pytest.approx(wanted, abs=1e-3)


def is_served(ray: Cluster) -> bool:
    """Whether anything answers at the port."""
    try:
        return httpx.get(f"{ray.url}/health").status_code == 200
    except httpx.HTTPError:
        return False


async def scores_of_one_server(checkpoint: Path) -> list[float]:
    async with running(RewardModel.load(str(checkpoint), dtype="float32", device="cpu")) as (client, _):
        answer = await client.post("/score", json={"texts": TEXTS})
        return list(answer.json()["rewards"])


def test_serve_run_with_arguments_serves_until_it_is_interrupted(tiny_checkpoint: Path) -> None:
    command = documented("serve run ", **{"runs/quickstart/checkpoint": str(tiny_checkpoint)})
    assert command[2:] == ["rm_server.ray_app:app", f"checkpoint={tiny_checkpoint}", "num_replicas=2"]
    with cluster() as ray:
        ray.ask(f"start {ray.port}")
        with ray.running(command, **NUMBERS) as process:
            ray.until(lambda: process.poll() is not None or ray.is_running())
            assert process.poll() is None, process.communicate()[0]
            assert_two_replicas_score(ray, tiny_checkpoint)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=120)
        assert not is_served(ray)


@pytest.mark.long
def test_serve_deploy_hands_the_file_to_a_running_cluster(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The file as it is, but for the checkpoint, the port, and the GPUs."""
    config = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text(encoding="utf-8"))
    (application,) = config["applications"]
    application["args"] |= {"checkpoint": str(tiny_checkpoint), "num_gpus": 0, "device": "cpu", "dtype": "float32"}
    application["deployments"][0]["user_config"]["checkpoint"] = str(tiny_checkpoint)
    file = tmp_path / "serve.yaml"
    with cluster(dashboard=True) as ray:
        config["http_options"]["port"] = ray.port
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        ray.run(documented("serve deploy ", **{"deploy/ray/serve.yaml": str(file)}))
        ray.until(lambda: ray.is_running())
        assert httpx.get(f"{ray.url}/ready", timeout=60).status_code == 200
        assert_two_replicas_score(ray, tiny_checkpoint)
        ray.run(["serve", "shutdown", "--yes"])
        ray.until(lambda: not is_served(ray))
