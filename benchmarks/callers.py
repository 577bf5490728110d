"""Throughput and waiting against the number of callers, and of replicas that share the same cores.

    python benchmarks/callers.py [CHECKPOINT] [--callers 1 4 16 32] [--replicas 1 2] [--quick]

Each caller sends a group of 8 fresh answers (512 + 128 tokens), waits for its rewards, and sends the next. Replicas are
servers of their own with an equal share of the threads; callers are divided among them. Cases take turns, in a new
order each round; figures are medians over the rounds.
Invariant: every case of a round scores the same number of groups, and no text comes twice.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common
import fixtures
import httpx
import processes
from fixtures import FreshTexts, Group
from processes import Server
from transformers import AutoTokenizer

PROMPT, ANSWER, GROUP = 512, 128, 8


async def load(servers: Sequence[Server], groups: Sequence[Group], callers: int) -> tuple[float, list[float]]:
    """Seconds for all groups, and how long each waited."""
    waits: list[float] = []
    remaining = iter(groups)
    limits = httpx.Limits(max_connections=callers)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:

        async def caller(number: int) -> None:
            url = f"{servers[number % len(servers)].url}/score"
            for group in remaining:
                begin = time.perf_counter()
                response = await client.post(url, json={"prompt": group.prompt, "completions": group.completions})
                response.raise_for_status()
                waits.append(time.perf_counter() - begin)

        begin = time.perf_counter()
        await asyncio.gather(*(caller(number) for number in range(callers)))
        return time.perf_counter() - begin, waits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", nargs="?", type=Path, help="default: the bundled model with a fixed head")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--groups", type=int, default=32, help="scored in each case of a round")
    parser.add_argument("--rounds", type=int, default=3)


def main() -> None:
    arguments = common.parse_arguments((__doc__ or "").splitlines()[0], add_arguments)
    if arguments.quick:
        arguments.callers, arguments.groups, arguments.rounds = [1, 4], 4, 1
    model = fixtures.prepare_model(arguments.checkpoint)
    texts = FreshTexts(AutoTokenizer.from_pretrained(model), arguments.seed)
    order = random.Random(arguments.seed)
    sets = {
        count: [processes.our_server(model, max(arguments.threads // count, 1), "auto") for _ in range(count)]
        for count in arguments.replicas
    }
    cases = [(count, callers) for count in sets for callers in arguments.callers if callers >= count]
    seconds: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    waits: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    with processes.running(*(server for servers in sets.values() for server in servers)):
        for number in range(-1, arguments.rounds):  # the first one warms up
            for case in order.sample(cases, len(cases)):
                servers = sets[case[0]]
                groups = fixtures.fresh_groups(texts, arguments.groups, PROMPT, ANSWER, GROUP)
                with ExitStack() as stack:
                    for server in servers:
                        stack.enter_context(processes.awake(server))
                    took, waited = asyncio.run(load(servers, groups, case[1]))
                if number >= 0:
                    seconds[case].append(took)
                    waits[case] += waited
            common.say(f"round {number + 1} done")
    rows: list[dict[str, Any]] = []
    for case in cases:
        rate = arguments.groups * GROUP / common.median(seconds[case])
        rows.append(
            {
                "replicas": case[0],
                "callers": case[1],
                "answers/s": round(rate, 2),
                "computed tokens/s": round(rate / GROUP * (PROMPT + GROUP * ANSWER)),
                "wait, median s": round(statistics.median(waits[case]), 3),
                "wait, p95 s": round(statistics.quantiles(waits[case], n=20, method="inclusive")[18], 3),
            }
        )
    workload = f"groups of {GROUP}, {PROMPT} + {ANSWER} tokens; closed loop"
    common.finish({"benchmark": "callers", "workload": workload, "ours": rows, "peer": None}, rows, arguments)


if __name__ == "__main__":
    main()
