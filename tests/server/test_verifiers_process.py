"""Servers with a recipe as processes: no torch where no model is, no process left behind, mistakes in one line."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.server.recipes import QUICK

WITHOUT_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "peft", "datasets"):
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)
sys.meta_path.insert(0, NoTorch())
from rm_server.cli import main
import atexit
atexit.register(lambda: print("torch" in sys.modules, flush=True))
main(sys.argv[1:])
"""


def children_of(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found += [int(folder.name), *children_of(int(folder.name))]
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_process_with_verifiers_only_needs_no_torch_and_leaves_no_process(tmp_path: Path, number: int) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(QUICK.replace("timeout_seconds: 1}", "timeout_seconds: 600}"))
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_TORCH, "--recipe", str(path), "--port", "0", "--grace-seconds", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("rm-server ready on http://"), process.communicate(timeout=60)
        url = line.split()[-1]
        answer = httpx.post(f"{url}/score", json={"prompt": "?", "completions": ["aaa", "aab"]}, timeout=60).json()
        assert answer["rewards"] == [1.0, 0.0]
        children = children_of(process.pid)
        assert len(children) >= 2
        body = json.dumps({"prompt": "?", "completions": ["a" * 100 + "b"], "deadline_ms": 500})
        hung = httpx.post(f"{url}/score", content=body, timeout=60)
        assert hung.json()["error"]["type"] == "deadline_exceeded"  # and its worker is still busy
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    if number == signal.SIGTERM:
        assert (process.returncode, out) == (0, "False\n"), err
    assert "Traceback" not in err
    while any(is_running(pid) for pid in children):
        pass


def is_running(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_process_whose_recipe_is_wrong_says_so_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("parts: {a: {kind: maths}}\nreward: a\n")
    result = subprocess.run(
        [sys.executable, "-m", "rm_server.cli", "--recipe", str(path), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"rm-server: error: {path}: parts.a.kind: must be one of model, math,")
    assert result.stderr.count("\n") == 1
