"""What every benchmark needs: its arguments, medians, one table and one JSON line last.

Invariant: the last line of stdout is the result as JSON; everything else that is said goes before it or to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent


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
