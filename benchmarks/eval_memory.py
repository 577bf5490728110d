"""Memory of ``rm-train eval`` while many pairs pass through: it must not grow with their number.

    python benchmarks/eval_memory.py [--pairs 100000]

A random two-layer model and short pairs, written to a temporary file; the resident memory is read at each tenth of the
way. Invariant: the measured code is the command's own (``evaluate_data`` and the report). The last line is JSON.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def resident_mib() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def write_pairs(path: Path, count: int) -> None:
    """Pairs of some tens of bytes, one category in ten."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            row = {
                "prompt": f"{number}? ",
                "chosen": "a" * draw.randint(3, 20),
                "rejected": "b" * draw.randint(3, 20),
                "category": f"c{number % 10}",
            }
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=100_000)
    given = parser.parse_args()
    from rm_core.model import RewardModel
    from rm_train.console import ConsoleReporter
    from rm_train.evaluate import evaluate_data, report_of
    from tests.conftest import save_classifier

    seen: list[tuple[int, float]] = []

    class Watching(ConsoleReporter):
        """The command's own progress, with the memory noted at each tenth."""

        def count(self, title: str, about: int | None = None) -> Any:
            import contextlib

            @contextlib.contextmanager
            def watching() -> Any:
                done = 0
                with ConsoleReporter.count(self, title, about) as advance:

                    def noted(amount: int) -> None:
                        nonlocal done
                        done += amount
                        advance(amount)
                        if done >= (len(seen) + 1) * given.pairs // 10:
                            seen.append((done, round(resident_mib(), 1)))

                    yield noted

            return watching()

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_pairs(directory / "pairs.jsonl", given.pairs)
        model = RewardModel.load(str(save_classifier(directory / "model")), dtype="float32", device="cpu", verify=False)
        begun = time.monotonic()
        found = evaluate_data(model, [str(directory / "pairs.jsonl")], max_tokens=4096, limit=None, reporter=Watching())
        scored = time.monotonic() - begun
        report = report_of(model, found)
    first = seen[0][1]
    print(
        json.dumps(
            {
                "pairs": report["pairs"],
                "seconds": round(scored, 1),
                "resident_mib_by_pairs": seen,
                "grown_mib_from_first_tenth_to_last": round(seen[-1][1] - first, 1),
                "resident_mib_after_report": round(resident_mib(), 1),
            }
        )
    )


if __name__ == "__main__":
    main()
