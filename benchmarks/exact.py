"""The price of ``rm-server --exact``: texts/s with and without it, over HTTP, on the same model and texts.

    python benchmarks/exact.py [--rounds 5] [--quick]

Workload A (groups of 8 answers of 128 tokens to a prompt of 512, where sharing saves most) and lone texts of 128 tokens
(where there is nothing to share). With ``--exact`` each sequence is a forward of its own, so it is the same to the bit
whatever is asked beside it. Invariant: no price without scores that agree within bf16 noise.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import common
import fixtures
import processes
from fixtures import FreshTexts
from serve_vs_vllm import post_ours
from transformers import AutoTokenizer

CONNECTIONS = 12


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=None, help="one-label classifier; default: the bundled SmolLM2")
    parser.add_argument("--rounds", type=int, default=None, help="counted rounds; default 5, with --quick 1")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="bfloat16")


def main() -> None:
    arguments = common.parse_arguments(__doc__ or "", _options)
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    model = fixtures.prepare_model(arguments.model)
    texts = FreshTexts(AutoTokenizer.from_pretrained(model), arguments.seed)
    shared = processes.our_server(model, arguments.threads, arguments.dtype)
    exact = processes.our_server(model, arguments.threads, arguments.dtype, ["--exact"])
    sizes = {"groups of 8, 512 + 128": (512, 128, 8, 6), "lone texts, 1 + 127": (1, 127, 1, 48)}
    rows = []
    with processes.running(shared, exact):
        noise = fixtures.bfloat16_noise(model, texts, 4 if arguments.quick else 16)
        for name, (prompt, answer, group, count) in sizes.items():
            prices, pairs = [], []
            for number in range(-1, rounds):
                groups = fixtures.fresh_groups(texts, 2 if arguments.quick else count, prompt, answer, group)
                sides = [("shared", shared), ("exact", exact)]
                outcomes = {
                    side: processes.drive(server, groups, post_ours, CONNECTIONS)
                    for side, server in (sides if number % 2 == 0 else sides[::-1])
                }
                pairs += list(zip(outcomes["shared"].flat(), outcomes["exact"].flat(), strict=True))
                if number >= 0:
                    prices.append(outcomes["exact"].seconds / outcomes["shared"].seconds)
            found = fixtures.agreement([a for a, _ in pairs], [b for _, b in pairs])
            fixtures.demand_agreement(found, "with and without --exact", noise)
            rows.append({"workload": name, "times as long with --exact": round(common.median(prices), 2)})
    common.finish({"benchmark": "exact", "workload": "A and lone texts", "rows": rows}, rows, arguments)


if __name__ == "__main__":
    main()
