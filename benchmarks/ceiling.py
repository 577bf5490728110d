"""The matmul ceiling: the model's own linear layers with their distinct weights on packed rows, and nothing else.

    python benchmarks/ceiling.py [--quick]                 the rate by row count, and what our forward reaches of it

The serving benchmarks keep one of these as a process beside the servers (``CeilingProcess``) and ask it next to every
round, since the rate moves with the machine's neighbours. Invariant: the ceiling is the best of the ways a linear layer
can be called here and of the row counts tried, so no fraction of it is flattered.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import fixtures
import processes

ROWS = (1024, 2048, 3072, 4096)


def linear_layers(model: Path, device: str) -> list[Any]:
    """All linear layers of the backbone in bf16, embeddings and head left out: they are what every token passes."""
    import torch
    from transformers import AutoModelForSequenceClassification

    fixtures.quiet_transformers()
    network = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.bfloat16).to(device)
    backbone = getattr(network, network.base_model_prefix)
    return [module for module in backbone.modules() if isinstance(module, torch.nn.Linear)]


def _plain(layers: list[Any]) -> Callable[[dict[int, Any]], None]:
    def run(inputs: dict[int, Any]) -> None:
        for layer in layers:
            layer(inputs[layer.in_features])

    return run


def _packed(layers: list[Any]) -> Callable[[dict[int, Any]], None] | None:
    """The same with weights in oneDNN's own blocked layout, where this torch offers it."""
    import torch

    if not torch.backends.mkldnn.is_available() or layers[0].weight.is_cuda:
        return None
    weights = [(layer.in_features, layer.weight.detach().to_mkldnn(), layer.bias) for layer in layers]
    call = torch.ops.mkldnn._linear_pointwise

    def run(inputs: dict[int, Any]) -> None:
        for width, weight, bias in weights:
            call(inputs[width], weight, bias, "none", [], "")

    return run


def measure(layers: list[Any], ways: dict[str, Any], rows: tuple[int, ...], repeats: int) -> dict[str, Any]:
    """Best median rate over ways and row counts. -> tokens_per_s, gflops, rows, way, by_rows."""
    import torch

    device = layers[0].weight.device
    flops_per_token = 2 * sum(layer.weight.numel() for layer in layers)
    by_rows: dict[str, float] = {}
    with torch.inference_mode():
        for count in rows:
            widths = {layer.in_features for layer in layers}
            inputs = {width: torch.randn(count, width, dtype=torch.bfloat16, device=device) for width in widths}
            for name, way in ways.items():
                way(inputs)
                seconds = common.median([_timed(way, inputs, device) for _ in range(repeats)])
                by_rows[f"{count}/{name}"] = round(count / seconds, 1)
    best = max(by_rows, key=by_rows.__getitem__)
    return {
        "tokens_per_s": by_rows[best],
        "gflops": round(by_rows[best] * flops_per_token / 1e9, 1),
        "rows": int(best.split("/")[0]),
        "way": best.split("/")[1],
        "by_rows": by_rows,
    }


def _timed(way: Callable[[dict[int, Any]], None], inputs: dict[int, Any], device: Any) -> float:
    import torch

    began = time.perf_counter()
    way(inputs)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def all_ways(layers: list[Any]) -> dict[str, Any]:
    packed = _packed(layers)
    return {"plain": _plain(layers)} | ({"packed": packed} if packed else {})


class CeilingProcess:
    """A ceiling measurement that waits in its own process, with the environment our server runs in."""

    def __init__(self, model: Path, threads: int, device: str) -> None:
        command = [sys.executable, __file__, "--model", str(model), "--device", device, "--threads", str(threads)]
        self.process = subprocess.Popen(
            [*command, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=processes.cpu_environment(threads),
        )

    def tokens_per_second(self, repeats: int = 3) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{repeats}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the ceiling process ended; its message is above")
        return float(json.loads(line)["tokens_per_s"])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def work(layers: list[Any], ways: dict[str, Any]) -> None:
    """Answer one line of JSON to each line of stdin (how often to repeat), until stdin closes."""
    for line in sys.stdin:
        print(json.dumps(measure(layers, ways, ROWS[1:], int(line))), flush=True)


def our_forward(model: Path, device: str, rows: int, rounds: int, seed: int) -> tuple[float, int]:
    """Our forward on groups of 8 answers (128 tokens to a prompt of 512) in one call of about ``rows`` tree tokens."""
    import random

    from rm_core.model import RewardModel

    reward_model = RewardModel.load(str(model), dtype="bfloat16", device=device)
    number = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [number.randrange(100, reward_model.vocab_size) for _ in range(count)]

    times, tokens = [], 0
    for _ in range(rounds + 1):
        sequences = []
        for _ in range(max(1, rows // 1536)):
            prompt = ids(512)
            sequences += [prompt + ids(128) for _ in range(8)]
        tokens = max(1, rows // 1536) * 1536
        began = time.perf_counter()
        reward_model.score_ids(sequences)
        times.append(time.perf_counter() - began)
    return tokens / common.median(times[1:]), tokens


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=None, help="one-label classifier; default: the bundled SmolLM2")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)


def main() -> None:
    arguments = common.parse_arguments(__doc__.splitlines()[0], _options)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    torch.set_num_threads(arguments.threads)
    model = fixtures.prepare_model(arguments.model)
    layers = linear_layers(model, arguments.device)
    ways = all_ways(layers)
    if arguments.worker:
        work(layers, ways)
        return
    found = measure(layers, ways, ROWS[:2] if arguments.quick else ROWS, 2 if arguments.quick else 7)
    rate, tokens = our_forward(
        model, arguments.device, 1536 if arguments.quick else 3072, 2 if arguments.quick else 7, arguments.seed
    )
    rows = [{"rows/way": key, "tokens/s": value} for key, value in found["by_rows"].items()]
    result = {
        "benchmark": "ceiling",
        "workload": f"{tokens} tree tokens: 8 answers of 128 to each prompt of 512",
        "ours": round(rate, 1),
        "peer": None,
        "ratio": None,
        "unit": "tree tokens/s",
        "ceiling": found,
        "ceiling_fraction": round(rate / found["tokens_per_s"], 3),
    }
    common.finish(result, rows, arguments)


if __name__ == "__main__":
    main()
