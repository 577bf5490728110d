"""Kill a small run with SIGKILL at random moments, resume it each time, and compare it with the unbroken run.

    python scripts/kill_and_resume.py --kills 20

Invariant: the run is a process of its own, and nothing but the signal ends it. The last line printed is JSON.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent


def write_data(directory: Path) -> tuple[Path, Path]:
    """A training and an evaluation file of small random pairs."""
    draw = random.Random(0)

    def words(low: int, high: int) -> str:
        return " ".join("".join(draw.choices("abcdefgh", k=4)) for _ in range(draw.randint(low, high)))

    files = []
    for name, count in (("train", 96), ("eval", 12)):
        rows = [{"prompt": f"{name} {i}? ", "chosen": words(1, 8), "rejected": words(1, 8)} for i in range(count)]
        files.append(directory / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return files[0], files[1]


def write_config(path: Path, base: str, data: tuple[Path, Path]) -> Path:
    """Dropout, warm-up, a schedule, evaluations and a save every few steps: everything that has a state."""
    config: dict[str, Any] = {
        "run": {"name": "run", "output_dir": str(path.parent)},
        "model": {"base": base, "dtype": "float32", "max_length": 96},
        "lora": {"r": 4, "dropout": 0.2},
        "data": {"train": [str(data[0])], "eval": [str(data[1])]},
        "train": {"batch_size": 4, "epochs": 5, "max_tokens": 1024, "learning_rate": 1e-3, "warmup_ratio": 0.1,
                  "schedule": "cosine", "eval_every": 7, "save_every": 3, "early_stopping_patience": 1000},
    }  # fmt: skip
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    return path


def start(config: Path, *, resume: bool) -> "subprocess.Popen[bytes]":
    """Start ``rm-train fit`` on its own."""
    command = [sys.executable, "-m", "rm_train.cli", "fit", str(config), *(["--resume"] if resume else [])]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(config: Path, *, resume: bool) -> None:
    """Run to the end; RuntimeError with what the run said where it failed."""
    with start(config, resume=resume) as process:
        _, err = process.communicate()
    if process.returncode:
        raise RuntimeError(f"exit {process.returncode}: {err.decode()[-2000:]}")


def kill_at(config: Path, metrics: Path, size: int, delay: float) -> bool:
    """Kill the run ``delay`` seconds after its metrics file has so many bytes. Whether it was still alive then."""
    with start(config, resume=False) as process:
        while process.poll() is None and (metrics.stat().st_size if metrics.exists() else 0) < size:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.002)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=delay)
        alive = process.poll() is None
        process.kill()
        _, err = process.communicate()
    if not alive and process.returncode:
        raise RuntimeError(f"exit {process.returncode}: {err.decode()[-2000:]}")
    return alive


def differences(run: Path, expected: Path) -> list[str]:
    """What differs between two finished runs, wall-clock fields aside; empty where they are the same to the bit."""
    found = []
    lines, wanted = ([_without_clock(line) for line in _lines(directory)] for directory in (run, expected))
    if lines != wanted:
        found.append(f"metrics: {len(lines)} lines for {len(wanted)}, or other values")
    for name in sorted({file.name for file in (expected / "checkpoint").glob("*.safetensors")}):
        tensors, right = load_file(run / "checkpoint" / name), load_file(expected / "checkpoint" / name)
        if set(tensors) != set(right) or any(not torch.equal(tensors[key], right[key]) for key in right):
            found.append(f"weights: {name}")
    for name in ("evaluation.jsonl",):
        if (run / name).read_bytes() != (expected / name).read_bytes():
            found.append(name)
    return found


def _lines(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]  # a killed run may leave half a line behind the last break


def _without_clock(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "seconds"}


def prove(base: str, kills: int, seed: int, directory: Path) -> dict[str, Any]:
    """Kill ``kills`` runs once each, at a random point of the run; each must end as the unbroken one.

    The point is a number of bytes in the metrics file, from none to all, and up to a tenth of a second more: it falls
    between steps, within one, into a save, or into the writing of the checkpoint, however busy the machine is.
    """
    data = write_data(directory)
    whole = directory / "whole"
    whole.mkdir()
    config = write_config(whole / "config.yaml", base, data)
    finish(config, resume=False)
    total = (whole / "run" / "metrics.jsonl").stat().st_size
    draw = random.Random(seed)
    outcomes: list[dict[str, Any]] = []
    for number in range(kills):
        folder = directory / f"killed-{number}"
        folder.mkdir()
        config = write_config(folder / "config.yaml", base, data)
        run = folder / "run"
        alive = kill_at(config, run / "metrics.jsonl", draw.randint(0, total), draw.uniform(0.0, 0.1))
        reached = len(_lines(run)) if (run / "metrics.jsonl").exists() else 0
        saved = (run / "resume.pt").exists()
        finish(config, resume=(run / "config.json").exists())
        outcomes.append({"killed": alive, "lines": reached, "saved": saved, "wrong": differences(run, whole / "run")})
        print(f"kill {number + 1}/{kills} after {reached} lines: {outcomes[-1]['wrong'] or 'same to the bit'}",
              file=sys.stderr)  # fmt: skip
    return {
        "kills": sum(outcome["killed"] for outcome in outcomes),
        "identical": sum(not outcome["wrong"] for outcome in outcomes),
        "of": kills,
        "lines_of_the_unbroken_run": len(_lines(whole / "run")),
        "outcomes": outcomes,
    }


def tiny_base(directory: Path) -> str:
    """The tests' random two-layer model."""
    sys.path.insert(0, str(ROOT))
    from tests.conftest import save_base

    return str(save_base(directory / "base"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base", help="base model; the tests' random one where it is left out")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        result = prove(given.base or tiny_base(directory), given.kills, given.seed, directory)
    print(json.dumps(result))
    sys.exit(result["identical"] != result["of"])


if __name__ == "__main__":
    main()
