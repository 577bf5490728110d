"""The whole line in a few minutes: train, evaluate, serve, score a group of answers, stop. ``make demo`` runs it.

    python examples/demo.py [--config configs/quickstart.yaml]
    python examples/demo.py --checkpoint runs/quickstart/checkpoint       serve and score only

Invariant: it does nothing but run three commands that a reader can run, and it ends with 0 only when all three did.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
LOG = Path("runs") / "demo-server.log"
READY = "rm-server ready on "
START_SECONDS = 300
STOP_SECONDS = 60

console = Console(highlight=False, soft_wrap=True)


class DemoError(Exception):
    """A command failed. What it printed is on the screen or in the log; the text says which one it was."""


def main() -> int:
    arguments = _arguments()
    started = time.monotonic()
    os.chdir(ROOT)
    Path("runs").mkdir(exist_ok=True)
    try:
        checkpoint = arguments.checkpoint or _train(arguments.config)
        with _server(checkpoint) as url:
            _run([sys.executable, "examples/score_group.py", url], shown=f"python examples/score_group.py {url}")
    except DemoError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    console.print(f"\nDone in {time.monotonic() - started:.0f} s. To go on alone (`. .venv/bin/activate` first):\n")
    if arguments.checkpoint is None:
        console.print(f"  rm-train fit {arguments.config}", markup=False)
    console.print(f"  rm-server {checkpoint}", markup=False)
    console.print("  python examples/score_group.py", markup=False)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on the demo pairs, evaluate, serve, and score a group.")
    parser.add_argument("--config", default="configs/quickstart.yaml", help="what to train (default: %(default)s)")
    parser.add_argument("--checkpoint", help="serve this one instead of training")
    return parser.parse_args()


def _train(config: str) -> str:
    """Run the config, evaluation on the held-out pairs included; returns the checkpoint's directory."""
    command = [_command("rm-train"), "fit", config]
    _run(command, shown=f"rm-train fit {config}")
    run = _resolved_run(config)
    metrics = json.loads((run / "checkpoint" / "reward_model.json").read_text(encoding="utf-8"))["metrics"]
    console.print(
        f"Held-out accuracy {metrics['accuracy']['value']:.1%}; "
        f"bag of words {metrics['bag_of_words']:.1%}, the longer answer {metrics['longer_wins']:.1%}."
    )
    return str(run / "checkpoint")


def _resolved_run(config: str) -> Path:
    from rm_train.config_file import load_config

    run = load_config(config).run
    return Path(run.output_dir) / run.name


@contextmanager
def _server(checkpoint: str) -> Iterator[str]:
    """``rm-server`` on a free port, its log in a file; stopped by SIGTERM, after which it must end with 0."""
    command = [_command("rm-server"), checkpoint, "--port", "0"]
    _show(f"rm-server {checkpoint} --port 0          # its log: {LOG}")
    with LOG.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            url = _wait_for_url(process)
            console.print(f"{READY}{url}")
            yield url
            process.send_signal(signal.SIGTERM)
            if code := process.wait(STOP_SECONDS):
                raise DemoError(f"rm-server ended with {code} on SIGTERM; see {LOG}")
            console.print("rm-server stopped.")
        except subprocess.TimeoutExpired:
            raise DemoError(f"rm-server did not stop within {STOP_SECONDS} s of SIGTERM; see {LOG}") from None
        finally:
            process.kill()
            process.wait()


def _wait_for_url(process: "subprocess.Popen[str]") -> str:
    """Read the start-up line. A server that says nothing for too long is killed, which ends the reading."""
    assert process.stdout is not None
    watchdog = threading.Timer(START_SECONDS, process.kill)
    watchdog.start()
    try:
        line = next((line for line in process.stdout if line.startswith(READY)), None)
    finally:
        watchdog.cancel()
    if line is None:
        code = process.wait()
        tail = "".join(LOG.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)[-15:])
        raise DemoError(f"rm-server did not start (exit {code}); the end of {LOG}:\n{tail}")
    return line.removeprefix(READY).strip()


def _run(command: list[str], shown: str) -> None:
    _show(shown)
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise DemoError(f"`{shown}` ended with {done.returncode}; its message is above")


def _command(name: str) -> str:
    """A command of this environment, whether or not the environment is activated."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise DemoError(f"{path} is not there: run `make setup`, or install the project with its extra `all`")
    return str(path)


def _show(command: str) -> None:
    console.print(f"\n[bold]$ {command}[/bold]")


if __name__ == "__main__":
    sys.exit(main())
