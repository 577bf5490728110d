"""Time of our forward against computed tokens: answers 1 to 64, prompts 64 to 4,096 tokens, answers 16 to 1,024 tokens.

    python benchmarks/scaling.py [--quick]

Each point is one group with fresh random ids, scored by the code the server runs, several times and in an order that is
shuffled anew in every round, so that a slow minute hits all points alike. The number to watch is the slope over the
group size: milliseconds per computed token from the small half of the sizes to the large half, which should not grow.
Invariant: computed tokens are counted as P + G·R, not by the code under test.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import fixtures
import numpy as np

GROUPS = (1, 2, 4, 8, 16, 32, 64)
PROMPTS = (64, 256, 1024, 4096)
ANSWERS = (16, 64, 256, 1024)
Point = tuple[str, int, int, int]


def points(quick: bool) -> list[Point]:
    """(sweep, answers, prompt tokens, answer tokens); where a sweep holds still it is at 8, 512, 128."""
    if quick:
        return [("G", group, 64, 16) for group in (1, 2, 4, 8)] + [("P", 2, 128, 16), ("R", 2, 64, 64)]
    sweeps = [("G", group, 512, 128) for group in GROUPS]
    sweeps += [("P", 8, prompt, 128) for prompt in PROMPTS]
    return sweeps + [("R", 8, 512, answer) for answer in ANSWERS]


def slope(tokens: Sequence[int], seconds: Sequence[float]) -> float:
    """Least-squares milliseconds per computed token."""
    return float(np.polyfit(tokens, seconds, 1)[0]) * 1e3


def summary(rows: Sequence[dict[str, Any]], sweep: str) -> dict[str, Any]:
    own = [row for row in rows if row["sweep"] == sweep]
    tokens, seconds = [row["computed"] for row in own], [row["seconds"] for row in own]
    whole = slope(tokens, seconds)
    found = {"ms_per_token": round(whole, 4)}
    if len(own) > 3:
        middle = len(own) // 2
        small, large = slope(tokens[: middle + 1], seconds[: middle + 1]), slope(tokens[middle:], seconds[middle:])
        residuals = np.array(seconds) - np.polyval(np.polyfit(tokens, seconds, 1), tokens)
        found |= {
            "small_half": round(small, 4),
            "large_half": round(large, 4),
            "slope_change": round(large / small - 1, 3),
            "r_squared": round(1 - float(residuals.var() / np.var(seconds)), 4),
        }
    return found


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=None, help="one-label classifier; default: the bundled SmolLM2")
    parser.add_argument("--rounds", type=int, default=None, help="default 5, with --quick 2")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="bfloat16")


def main() -> None:
    arguments = common.parse_arguments(__doc__.splitlines()[0], _options)
    # As rm-server has it: before torch is loaded.
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}
    import torch

    from rm_core.model import RewardModel

    torch.set_num_threads(arguments.threads)
    model = RewardModel.load(
        str(fixtures.prepare_model(arguments.model)), dtype=arguments.dtype, device=arguments.device
    )
    number = random.Random(arguments.seed)

    def ids(count: int) -> list[int]:
        return [number.randrange(100, model.vocab_size) for _ in range(count)]

    all_points = points(arguments.quick)
    seconds: dict[Point, list[float]] = {point: [] for point in all_points}
    for round_number in range(-1, arguments.rounds or (2 if arguments.quick else 5)):
        for point in number.sample(all_points, len(all_points)):
            _, group, prompt, answer = point
            shared = ids(prompt)
            sequences = [shared + ids(answer) for _ in range(group)]
            began = time.perf_counter()
            model.score_ids(sequences)
            if round_number >= 0:
                seconds[point].append(time.perf_counter() - began)
        common.say(f"round {round_number + 1} done")
    rows = [
        {
            "sweep": point[0],
            "answers": point[1],
            "prompt": point[2],
            "answer": point[3],
            "computed": point[2] + point[1] * point[3],
            "padded": point[1] * (point[2] + point[3]),
            "seconds": common.median(times),
            "ms/token": 1e3 * common.median(times) / (point[2] + point[1] * point[3]),
        }
        for point, times in seconds.items()
    ]
    sweeps = {sweep: summary(rows, sweep) for sweep in ("G", "P", "R")}
    result = {
        "benchmark": "scaling",
        "workload": "one group; sweeps over answers (G), prompt tokens (P), answer tokens (R)",
        "ours": sweeps,
        "peer": None,
        "ratio": None,
        "ceiling_fraction": None,
        "linear_within_10_percent": abs(sweeps["G"]["slope_change"]) <= 0.1,
        "points": [{key: round(v, 5) if isinstance(v, float) else v for key, v in row.items()} for row in rows],
    }
    common.finish(result, rows, arguments)


if __name__ == "__main__":
    main()
