"""What open live pages cost: the server's own computing without and with three of them, and answers a second.

    python benchmarks/ui_cost.py [MODEL] [--pages 3] [--rounds 6] [--quick]

One server, one closed loop of groups over HTTP, every round with texts that are new. In every other round so many
streams of ``/ui/live`` are open as pages would be (a browser's own work is its own machine's). The order of the two
turns round after round, so that a drift of the machine favours neither. On a shared machine rounds differ by more than
pages cost, so the cost is counted in CPU time: with the window of rewards full and no request open, what the server
computes in ten seconds with pages, less what it computes without, as a share of its threads. ``--quick`` serves a tiny
random model. Invariant: the exit status is 1 if the pages cost 2 % or more, or if a page got no events.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import fixtures
import httpx
import processes
import soak
from fixtures import FreshTexts, Group
from processes import Server
from transformers import AutoTokenizer

CONNECTIONS = 16
MAX_COST = 0.02
IDLE_SECONDS = 10.0


async def measure(server: Server, groups: Sequence[Group], num_pages: int) -> tuple[float, float, int]:
    """Seconds, and CPU seconds of the server, for all groups (without any: for ``IDLE_SECONDS``) while ``num_pages``
    streams are open, and the fewest events that one of them got."""
    events = [0] * num_pages
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=900, limits=limits) as client:

        async def page(number: int) -> None:
            async with client.stream("GET", "/ui/live") as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    events[number] += line.startswith("data: ")

        pages = [asyncio.create_task(page(number)) for number in range(num_pages)]
        while not all(events):
            await asyncio.sleep(0.01)
            for failed in (task for task in pages if task.done()):
                failed.result()
        jobs = iter(groups)

        async def connection() -> None:
            for group in jobs:
                body: dict[str, Any] = {"prompt": group.prompt, "completions": group.completions}
                await processes.post_json(client, "/score", body)

        began, computed = time.perf_counter(), server.cpu_seconds()
        await asyncio.gather(*(connection() for _ in range(CONNECTIONS)))
        if not groups:
            await asyncio.sleep(IDLE_SECONDS)
        seconds, computed = time.perf_counter() - began, server.cpu_seconds() - computed
        for task in pages:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    return seconds, computed, min(events, default=0)


def main() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("model", nargs="?", type=Path, help="default: the bundled model with a fixed head")
        parser.add_argument("--pages", type=int, default=3, help="open live pages")
        parser.add_argument("--rounds", type=int, default=6, help="of each kind")
        parser.add_argument("--groups", type=int, default=60, help="groups of eight answers a round")

    arguments = common.parse_arguments(__doc__ or "", add)
    rounds, num_groups = (2, 40) if arguments.quick else (arguments.rounds, arguments.groups)
    if arguments.quick and arguments.model is None:
        from rm_core.smollm2 import bundled_model_path

        model = soak.tiny_model(bundled_model_path())
    else:
        model = fixtures.prepare_model(arguments.model)
    texts = FreshTexts(AutoTokenizer.from_pretrained(model), arguments.seed)
    server = processes.our_server(model, arguments.threads, "auto")
    rates: dict[int, list[float]] = {0: [], arguments.pages: []}
    shares: dict[int, list[float]] = {0: [], arguments.pages: []}
    fewest = sys.maxsize
    with processes.running(server), processes.awake(server):
        for number in range(-1, rounds):  # the first one warms up
            order = (0, arguments.pages) if number % 2 else (arguments.pages, 0)
            for pages in order:
                groups = fixtures.fresh_groups(texts, num_groups, 256, 64)
                seconds, _, events = asyncio.run(measure(server, groups, pages))
                if number >= 0:
                    rates[pages].append(8 * num_groups / seconds)
                if pages:
                    fewest = min(fewest, events)
        for number in range(3):
            for pages in (0, arguments.pages) if number % 2 else (arguments.pages, 0):
                seconds, computed, _ = asyncio.run(measure(server, [], pages))
                shares[pages].append(computed / seconds / arguments.threads)
    cost = common.median(shares[arguments.pages]) - common.median(shares[0])
    rows = [
        {"pages": pages, "answers/s": common.median(rates[pages]), "CPU without load": common.median(shares[pages])}
        for pages in rates
    ]
    failed = fewest < 1 or cost >= MAX_COST
    result = {
        "workload": f"groups of 8, 256 + 64 tokens, {arguments.pages} live pages",
        "cost": round(cost, 4),
        "rate_ratio": round(common.median([b / a for a, b in zip(*rates.values(), strict=True)]), 4),
        "rates": {str(pages): [round(rate, 2) for rate in found] for pages, found in rates.items()},
        "cpu_shares": {str(pages): [round(share, 4) for share in found] for pages, found in shares.items()},
        "fewest_events": fewest,
        "ok": not failed,
    }
    common.finish(result, rows, arguments)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
