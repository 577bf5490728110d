"""Two processes over gloo train as one does: the same losses, the right evaluation, one checkpoint."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rm_core.checkpoint import read_record
from rm_core.model import RewardModel
from rm_train.config import dump_resolved
from rm_train.fit import fit
from rm_train.state import STATE_FILE, ResumeError
from tests.train.runs import (
    RUN_FILES,
    Quiet,
    assert_same_training,
    make_config,
    metric_lines,
    text_rows,
    weights_of,
    write_rows,
)

pytestmark = pytest.mark.slow

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start_two(*arguments: object, module: str = "rm_train.cli") -> list[subprocess.Popen[str]]:
    """Start both processes as torchrun does, but as children of this one: killing torchrun would leave them running."""
    shared = {**ENVIRONMENT, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]


def start_two_nodes(*arguments: object) -> list[subprocess.Popen[str]]:
    """Two torchruns with one process each, which find each other as those of two machines do (docs/scale.md)."""
    meet = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv_id", "job1", "--rdzv_backend", "c10d"]
    meet += ["--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    return [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *meet, "-m", "rm_train.cli", *map(str, arguments)],
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]


def wait_for_state(run: Path, process: subprocess.Popen[str]) -> None:
    while not (run / STATE_FILE).exists():
        with pytest.raises(subprocess.TimeoutExpired):  # or it ended before its first save
            process.wait(timeout=0.01)


def assert_finish(processes: list[subprocess.Popen[str]]) -> None:
    assert [process.wait(timeout=300) for process in processes] == [0, 0]


def config_file(directory: Path, base: Path, **sections: Any) -> tuple[Path, Any]:
    """Nine training pairs in steps of four (the last step has one: a process without a pair), nine held out; weights,
    and passes so small that the processes need different numbers of them."""
    directory.mkdir(exist_ok=True)
    rows = [{**row, "weight": 0.5 + 0.25 * number} for number, row in enumerate(text_rows(9))]
    pairs = write_rows(directory / "train.jsonl", rows)
    held_out = write_rows(directory / "eval.jsonl", text_rows(9, seed=3))
    settings = {"epochs": 2, "eval_every": 2, "max_tokens": 128, **sections.pop("train", {})}
    config = make_config(base, directory, pairs, held_out, model={"max_length": 64}, train=settings, **sections)
    path = directory / "config.yaml"
    path.write_text(dump_resolved(config))
    return path, config


def test_two_processes_equal_one(tiny_base: Path, tmp_path: Path) -> None:
    path, _ = config_file(tmp_path / "two", tiny_base)
    done = subprocess.run(
        [*TORCHRUN, "-m", "rm_train.cli", "fit", str(path)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    two = tmp_path / "two" / "runs" / "run"
    one = fit(config_file(tmp_path / "one", tiny_base)[1], Quiet()).directory

    lines, expected = metric_lines(two), metric_lines(one)
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    assert [line.get("pairs") for line in lines if "pairs" in line] == [4, 4, 1, 4, 4, 1]
    for line, wanted in zip(lines, expected, strict=True):
        # how many tokens are computed depends on how a step is cut; nothing else may
        wanted.pop("computed_tokens", None), line.pop("computed_tokens", None)
        assert line == pytest.approx(wanted, abs=1e-5, rel=1e-4)
    found, wanted_weights = weights_of(two / "checkpoint"), weights_of(one / "checkpoint")
    for name, tensor in wanted_weights.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-5, rtol=1e-3)

    assert sorted(file.name for file in two.iterdir()) == RUN_FILES
    assert done.stdout.count("checkpoint: ") == 1, "one process speaks"
    records = read_record(two / "checkpoint"), read_record(one / "checkpoint")
    assert records[0] is not None
    assert records[1] is not None
    assert records[0].num_eval == 18
    assert records[0].metrics["accuracy"]["value"] == records[1].metrics["accuracy"]["value"]
    assert RewardModel.load(str(two / "checkpoint"), dtype="float32").kind == "adapter"


def test_two_processes_killed_resume_to_the_same_bits(tiny_base: Path, tmp_path: Path) -> None:
    """Dropout draws other numbers in each process, and each goes on with its own."""
    sections: dict[str, Any] = {"lora": {"dropout": 0.3}, "train": {"save_every": 2, "epochs": 4}}
    whole, _ = config_file(tmp_path / "whole", tiny_base, **sections)
    assert_finish(start_two("fit", whole))

    path, config = config_file(tmp_path / "killed", tiny_base, **sections)
    run = tmp_path / "killed" / "runs" / "run"
    processes = start_two("fit", path)
    try:
        wait_for_state(run, processes[0])
    finally:
        for process in processes:
            process.kill()
            process.wait()
    with pytest.raises(ResumeError, match="number of processes was 2 and is now 1"):
        fit(config, Quiet(), resume=True)
    assert_finish(start_two("fit", path, "--resume"))
    expected = tmp_path / "whole" / "runs" / "run"
    assert metric_lines(run) == metric_lines(expected)
    weights, wanted = weights_of(run / "checkpoint"), weights_of(expected / "checkpoint")
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds torchrun's children in Linux' /proc")
def test_nodes_that_met_equal_one_process_and_resume_after_one_lost_its_process(
    tiny_base: Path, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {"train": {"save_every": 2, "epochs": 4}}
    expected = fit(config_file(tmp_path / "one", tiny_base, **sections)[1], Quiet()).directory

    path, _ = config_file(tmp_path / "two", tiny_base, **sections)
    run = tmp_path / "two" / "runs" / "run"
    nodes = start_two_nodes("fit", path)
    try:
        wait_for_state(run, nodes[0])
        (worker,) = Path(f"/proc/{nodes[1].pid}/task/{nodes[1].pid}/children").read_text().split()
        os.kill(int(worker), signal.SIGKILL)
        said = [node.communicate(timeout=300)[1] for node in nodes]
    finally:
        for node in nodes:
            node.terminate()
            node.wait()
    assert [node.returncode for node in nodes] == [1, 1], "both end, and say so"
    assert "Signal 9 (SIGKILL)" in said[1]
    assert not (run / "checkpoint").exists()

    nodes = start_two_nodes("fit", path, "--resume")
    said = [node.communicate(timeout=300)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert_same_training(run, expected)
