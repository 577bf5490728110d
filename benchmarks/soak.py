"""Many mixed requests from many connections: every score right, none lost, resident memory flat.

    python benchmarks/soak.py [CHECKPOINT] [--requests 10000] [--quick]

Without a checkpoint a random two-layer model with the bundled tokenizer is served in fp32, which makes 10,000 requests
a matter of minutes. The scores of a pool of texts are computed before, by plain transformers, one text at a time; the
requests mix them in all of ``/score``'s forms, whole groups and single answers, so that caches hit, miss and evict.
Memory is that of the server's whole process group. It is flat when the second half of the run, after a warm-up of a
fifth, lies less than 5 % above the first. Invariant: the exit status is 1 if any score is wrong, any request is lost or
memory grows.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import fixtures
import httpx
import processes
from fixtures import FreshTexts
from processes import Server
from transformers import AutoTokenizer

CONNECTIONS = 64


@dataclass
class Pool:
    """Prompts with their completions, and the reward of each."""

    prompts: list[str]
    completions: list[list[str]]
    rewards: list[list[float]]


@dataclass
class Tally:
    """What came back."""

    requests: Counter[str] = field(default_factory=Counter)
    scores: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    worst: float = 0.0
    memory: list[int] = field(default_factory=list)


def tiny_model(tokenizer_folder: Path) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight, std=1.0)
    folder = Path(tempfile.mkdtemp(prefix="benchmark-tiny-"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build_pool(model: Path, texts: FreshTexts, num_prompts: int, longest: int) -> Pool:
    """Prompts of 1 to ``longest`` tokens; completions from one word to half of that, some the start of another."""
    pick = texts.random
    prompts = [texts.text(pick.randint(1, longest)) for _ in range(num_prompts)]
    completions = []
    for _ in prompts:
        own = [texts.text(pick.randint(1, longest // 2)) for _ in range(pick.randint(1, 7))]
        completions.append([*own, own[0] + texts.text(3)])
    whole = [p + c + texts.end for p, own in zip(prompts, completions, strict=True) for c in own]
    scores = iter(fixtures.reference_scores(model, whole, "float32"))
    return Pool(prompts, completions, [[next(scores) for _ in own] for own in completions])


def draw_request(pool: Pool, pick: random.Random) -> tuple[str, dict[str, Any], Any]:
    """-> form, body of ``POST /score``, rewards it should answer with."""

    def group() -> tuple[int, list[int]]:
        number = pick.randrange(len(pool.prompts))
        own = range(len(pool.completions[number]))
        return number, pick.sample(own, pick.randint(1, len(own)))

    form = pick.choice(["group", "groups", "texts", "single", "single"])
    if form == "groups":
        drawn = [group() for _ in range(pick.randint(2, 4))]
        bodies = [{"prompt": pool.prompts[n], "completions": [pool.completions[n][i] for i in own]} for n, own in drawn]
        return form, {"groups": bodies}, [[pool.rewards[n][i] for i in own] for n, own in drawn]
    number, own = group()
    own = own[:1] if form == "single" else own
    expected = [pool.rewards[number][i] for i in own]
    answers = [pool.completions[number][i] for i in own]
    if form == "texts":
        return form, {"texts": [pool.prompts[number] + answer for answer in answers]}, expected
    return form, {"prompt": pool.prompts[number], "completions": answers}, expected


def flatten(rewards: Any) -> list[Any]:
    return [r for item in rewards for r in flatten(item)] if isinstance(rewards, list) else [rewards]


def _plain(number: Any) -> bool:
    return isinstance(number, float) and math.isfinite(number)


async def soak(server: Server, pool: Pool, requests: int, tolerance: float, seed: int) -> Tally:
    tally = Tally()
    numbers = iter(range(requests))
    pick = random.Random(seed)
    step = max(requests // 100, 1)
    limits = httpx.Limits(max_connections=CONNECTIONS)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:

        async def connection() -> None:
            for number in numbers:
                form, body, expected = draw_request(pool, pick)
                if number % step == 0:
                    tally.memory.append(server.resident_bytes())
                try:
                    response = await client.post("/score", json=body)
                except httpx.HTTPError as error:
                    tally.failed.append(f"{form}: {type(error).__name__}")
                    continue
                tally.requests[form] += 1
                if response.status_code != 200:
                    tally.failed.append(f"{form}: {response.status_code} {response.text[:200]}")
                    continue
                check(tally, form, response.json()["rewards"], expected, tolerance)

        await asyncio.gather(*(connection() for _ in range(CONNECTIONS)))
    return tally


def check(tally: Tally, form: str, rewards: Any, expected: Any, tolerance: float) -> None:
    got, wanted = flatten(rewards), flatten(expected)
    if len(got) != len(wanted) or not all(map(_plain, got)):
        tally.wrong.append(f"{form}: {len(got)} rewards for {len(wanted)} completions, or one is no number")
        return
    tally.scores += len(got)
    worst = max(abs(a - b) for a, b in zip(got, wanted, strict=True))
    tally.worst = max(tally.worst, worst)
    if worst > tolerance:
        tally.wrong.append(f"{form}: off by {worst:.3g}, more than {tolerance:.3g}")


def growth(memory: list[int]) -> float:
    """Median of the last 40 % of the samples over that of the 40 % before, less 1."""
    kept = memory[len(memory) // 5 :]
    return common.median(kept[len(kept) // 2 :]) / common.median(kept[: len(kept) // 2]) - 1


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", nargs="?", type=Path, default=None, help="default: a tiny random model")
    parser.add_argument("--requests", type=int, default=None, help="default 10000, with --quick 500")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--longest", type=int, default=200, help="tokens of the longest prompt")
    parser.add_argument("--server-arguments", default="", help="further arguments of rm-server")


def main() -> None:
    arguments = common.parse_arguments(__doc__.splitlines()[0], _options)
    if arguments.checkpoint is None:
        from rm_core.smollm2 import bundled_model_path

        model = tiny_model(bundled_model_path())
    else:
        model = arguments.checkpoint
    texts = FreshTexts(AutoTokenizer.from_pretrained(model), arguments.seed)
    pool = build_pool(model, texts, 20 if arguments.quick else 100, arguments.longest)
    everything = flatten(pool.rewards)
    deviation = max(float(statistics.pstdev(everything)), 1.0)
    tolerance = deviation * (1e-4 if arguments.dtype == "float32" else 0.5)
    server = processes.our_server(model, arguments.threads, arguments.dtype, arguments.server_arguments.split())
    requests = arguments.requests or (500 if arguments.quick else 10_000)
    try:
        server.start()
        began = time.perf_counter()
        tally = asyncio.run(soak(server, pool, requests, tolerance, arguments.seed))
        seconds = time.perf_counter() - began
    finally:
        server.stop()
    lost = requests - sum(tally.requests.values())
    grown = growth(tally.memory)
    good = not tally.wrong and not tally.failed and not lost and grown < 0.05
    result = {
        "benchmark": "soak",
        "workload": f"{requests} requests of mixed form from {CONNECTIONS} connections",
        "ours": {"requests_per_s": round(requests / seconds, 1), "scores": tally.scores, "forms": dict(tally.requests)},
        "peer": None,
        "ratio": None,
        "ceiling_fraction": None,
        "good": good,
        "lost": lost,
        "failed": len(tally.failed),
        "wrong": len(tally.wrong),
        "examples": (tally.wrong + tally.failed)[:5],
        "worst_difference": tally.worst,
        "tolerance": tolerance,
        "memory_mib": [round(value / 2**20) for value in tally.memory[:: max(len(tally.memory) // 10, 1)]],
        "memory_growth": round(grown, 4),
        "ready_seconds": round(server.ready_seconds, 1),
    }
    common.finish(result, [], arguments)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
