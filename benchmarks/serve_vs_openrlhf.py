"""Our server against OpenRLHF's own ``serve_rm``, both over HTTP on loopback, with the same model and texts.

    python benchmarks/serve_vs_openrlhf.py --openrlhf-python PYTHON [--quick]

Workload A: groups of 8 answers of 128 tokens to a prompt of 512, one group a request on both sides (its client
sends one item a request, slower there). ``serve_rm`` imports flash_attn and deepspeed, which have no CPU build and
which scoring with ``sdpa`` never calls: empty modules of those names go onto its path.
Invariant: no ratio without equal scores.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import common
import fixtures
import httpx
import processes
from ceiling import CeilingProcess
from fixtures import FreshTexts, Group
from processes import Server
from serve_vs_vllm import post_ours
from transformers import AutoTokenizer

STUBS = {
    "deepspeed/__init__.py": "",
    "flash_attn/__init__.py": "",
    "flash_attn/bert_padding.py": "index_first_axis = pad_input = rearrange = unpad_input = None\n",
    "flash_attn/utils/__init__.py": "",
    "flash_attn/utils/distributed.py": "all_gather = None\n",
}


def openrlhf_server(arguments: argparse.Namespace, model: Path, python: str) -> Server:
    environment = processes.cpu_environment(arguments.threads)
    if arguments.device == "cpu":
        stubs = Path(tempfile.mkdtemp(prefix="benchmark-stubs-"))
        for name, text in STUBS.items():
            (stubs / name).parent.mkdir(parents=True, exist_ok=True)
            (stubs / name).write_text(text)
        environment["PYTHONPATH"] = str(stubs)
    port = processes.free_port()
    command = [python, "-m", "openrlhf.cli.serve_rm", "--reward.model_name_or_path", str(model)]
    command += ["--ds.attn_implementation", "sdpa", "--data.max_len", "8192", "--host", "127.0.0.1"]
    command += ["--port", str(port), *arguments.openrlhf_arguments.split()]
    return Server("openrlhf", command, port, "/docs", environment)


def post_openrlhf(end: str) -> processes.Post:
    async def post(client: httpx.AsyncClient, group: Group) -> processes.Reply:
        texts = group.texts(end)
        body: dict[str, Any] = {"query": texts, "prompts": [group.prompt] * len(texts), "labels": [""] * len(texts)}
        answer = await processes.post_json(client, "/get_reward", body)
        return answer["rewards"], 0, 0

    return post


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=None, help="one-label classifier; default: the bundled SmolLM2")
    parser.add_argument("--rounds", type=int, default=None, help="counted rounds; default 5, with --quick 1")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="bfloat16", help="ours")
    parser.add_argument("--server-arguments", default="", help="further arguments of rm-server")
    parser.add_argument("--openrlhf-python", default=None, help="its python, or BETTERTHAN_OPENRLHF_PYTHON")
    parser.add_argument(
        "--openrlhf-arguments", default="", help="further arguments of serve_rm, such as --batch_size 4"
    )


def main() -> None:
    arguments = common.parse_arguments(__doc__.splitlines()[0], _options)
    python = processes.required_python(arguments.openrlhf_python, "BETTERTHAN_OPENRLHF_PYTHON")
    prompt, answer, units, peer_units = (128, 32, 2, 2) if arguments.quick else (512, 128, 24, 6)
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    model = fixtures.prepare_model(arguments.model)
    texts = FreshTexts(AutoTokenizer.from_pretrained(model), arguments.seed)
    ours = processes.our_server(model, arguments.threads, arguments.dtype, arguments.server_arguments.split())
    peer = openrlhf_server(arguments, model, python)
    post_peer = post_openrlhf(texts.end)
    ours_rates, peer_rates, fractions, pairs = [], [], [], []
    with processes.running(ours, peer):
        noise = fixtures.bfloat16_noise(model, texts, 4 if arguments.quick else 16)
        ceiling = CeilingProcess(model, arguments.threads, arguments.device)
        for round_number in range(-1, rounds):
            groups = fixtures.fresh_groups(texts, units, prompt, answer)
            limit = ceiling.tokens_per_second(1 if round_number < 0 else 3)
            # The slow side gets a part of the round's groups: its rate needs no more, and the texts are the same ones.
            outcomes = {}
            for side in ("ours", "peer") if round_number % 2 == 0 else ("peer", "ours"):
                if side == "ours":
                    outcomes[side] = processes.drive(ours, groups, post_ours, 12)
                else:
                    outcomes[side] = processes.drive(peer, groups[:peer_units], post_peer, 2)
            own, theirs = outcomes["ours"], outcomes["peer"]
            pairs += list(zip([s for scores in own.scores[:peer_units] for s in scores], theirs.flat(), strict=True))
            if round_number < 0:
                continue
            ours_rates.append(8 * units / own.seconds)
            peer_rates.append(8 * peer_units / theirs.seconds)
            fractions.append(units * (prompt + 8 * answer) / own.seconds / limit)
            common.say(
                f"round {round_number + 1}/{rounds}: ours {ours_rates[-1]:.2f}/s, openrlhf {peer_rates[-1]:.2f}/s"
            )
        ceiling.close()
    found = fixtures.agreement([a for a, _ in pairs], [b for _, b in pairs])
    fixtures.demand_agreement(found, "ours and OpenRLHF", noise)
    result = {
        "benchmark": "serve_vs_openrlhf",
        "workload": f"A: {prompt}+{answer} tokens, 8 a request",
        "unit": "texts/s",
        "ours": round(common.median(ours_rates), 3),
        "peer": round(common.median(peer_rates), 3),
        "ratio": round(common.median([a / b for a, b in zip(ours_rates, peer_rates, strict=True)]), 3),
        "ceiling_fraction": round(common.median(fractions), 3),
        "agreement": found,
        "ready_seconds": {"ours": round(ours.ready_seconds, 1), "openrlhf": round(peer.ready_seconds, 1)},
        "peer_versions": processes.peer_versions(python, ["openrlhf", "torch", "transformers"]),
    }
    row = {key: result[key] for key in ("workload", "ours", "peer", "ratio", "ceiling_fraction")}
    common.finish(result, [row], arguments)


if __name__ == "__main__":
    main()
