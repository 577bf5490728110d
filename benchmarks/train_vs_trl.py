"""Our trainer against TRL's RewardTrainer: same base, same pairs, LoRA r16 on all linear layers, 8 pairs a step.

    python benchmarks/train_vs_trl.py DATA.jsonl... --trl-python PYTHON [--pairs 400 --rounds 1 --eval-pairs 200]

Both run as processes of this script, one after the other, the order alternating from round to round, each round on
other pairs. TRL gets its best setting here: bf16 weights, no gradient checkpointing, no tokenising, and batches of like
length, cut as its length-grouped sampler cuts them from windows of 50 batches. Its pad token is one that no text ends
with. We shuffle the same pairs. Pairs over the length limit are left out on both sides, because TRL drops them.

Pairs/s leave out each run's first step, which warms up; ``whole`` counts it. Peak memory is the process's own largest
resident set. The ceiling of a training step is one forward and one input-gradient pass of the linear layers over the
tokens of each pair's tree. Invariant: both sides train on the same set of pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import processes
import yaml
from ceiling import CeilingProcess

BATCH = 8
WINDOW = 50 * BATCH


@dataclass(frozen=True)
class Pair:
    """One row of the file with its ids on our renderer's terms."""

    row: dict[str, Any]
    chosen: list[int]
    rejected: list[int]

    @property
    def longest(self) -> int:
        return max(len(self.chosen), len(self.rejected))

    @property
    def tree_tokens(self) -> int:
        shared = next((i for i, (a, b) in enumerate(zip(self.chosen, self.rejected, strict=False)) if a != b), None)
        same = shared if shared is not None else min(len(self.chosen), len(self.rejected))
        return len(self.chosen) + len(self.rejected) - same


@dataclass
class Run:
    """What one side did in one round."""

    steps: list[dict[str, float]]
    peak_bytes: int
    wall_seconds: float
    rewards: list[float]

    @property
    def steady(self) -> float:
        return BATCH * (len(self.steps) - 1) / sum(step["seconds"] for step in self.steps[1:])

    @property
    def whole(self) -> float:
        return BATCH * len(self.steps) / sum(step["seconds"] for step in self.steps)

    @property
    def losses(self) -> list[float]:
        return [round(step["loss"], 4) for step in self.steps]


def read_pairs(path: Path, base: Path, max_length: int, shuffle: random.Random, limit: int) -> list[Pair]:
    """Up to ``limit`` of the file's pairs, in shuffled order, that fit both sides' length limit."""
    from transformers import AutoTokenizer

    from rm_core.chat import Renderer

    renderer = Renderer.for_tokenizer(AutoTokenizer.from_pretrained(base))
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    shuffle.shuffle(rows)
    pairs: list[Pair] = []
    for row in rows:
        chosen, rejected, truncated = renderer.render_pair(
            row.get("prompt"), row["chosen"], row["rejected"], max_length=max_length
        )
        if not truncated and chosen != rejected:
            pairs.append(Pair(row, chosen, rejected))
        if len(pairs) == limit:
            break
    return pairs


def length_grouped(pairs: Sequence[Pair], shuffle: random.Random) -> list[list[Pair]]:
    """Batches of like length out of windows, in shuffled order: what a length-grouped sampler does with a whole set."""
    batches = []
    for start in range(0, len(pairs), WINDOW):
        window = sorted(pairs[start : start + WINDOW], key=lambda pair: -pair.longest)
        batches += [window[at : at + BATCH] for at in range(0, len(window) - BATCH + 1, BATCH)]
    shuffle.shuffle(batches)
    return batches


def write_rows(path: Path, pairs: Sequence[Pair]) -> Path:
    path.write_text("".join(json.dumps(pair.row, ensure_ascii=False) + "\n" for pair in pairs), encoding="utf-8")
    return path


def write_ids(path: Path, pairs: Sequence[Pair]) -> Path:
    lines = (json.dumps({"chosen_ids": pair.chosen, "rejected_ids": pair.rejected}) + "\n" for pair in pairs)
    path.write_text("".join(lines))
    return path


def run_process(command: Sequence[str], environment: dict[str, str], log: Path) -> tuple[int, float]:
    """Run to the end. -> peak resident bytes of the process (or of its largest child), wall seconds."""
    began = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with {process.returncode}:\n{log.read_text(errors='replace')[-3000:]}")
    return usage.ru_maxrss * 1024, time.perf_counter() - began


def run_ours(folder: Path, base: Path, train: Sequence[Pair], held_out: Sequence[Pair], arguments: Any) -> Run:
    run_name = "ours"
    evaluate = list(held_out) or list(train[:2])
    config = {
        "run": {"name": run_name, "output_dir": str(folder / "runs"), "seed": arguments.seed % 2**31},
        "model": {"base": str(base), "dtype": arguments.dtype, "max_length": arguments.max_length},
        "lora": {"r": 16, "alpha": 32, "dropout": 0.0, "target_modules": "all-linear"},
        "data": {
            "train": [str(write_rows(folder / "train.jsonl", train))],
            "eval": [str(write_rows(folder / "eval.jsonl", evaluate))],
        },
        "train": {
            "batch_size": BATCH,
            "epochs": 1,
            "learning_rate": arguments.learning_rate,
            "schedule": "constant",
            "warmup_ratio": 0.0,
        },
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [str(Path(sys.executable).with_name("rm-train")), "fit", str(path)]
    for setting in arguments.set:
        command += ["--set", setting]
    peak, seconds = run_process(command, processes.cpu_environment(arguments.threads), folder / "ours.log")
    run = folder / "runs" / run_name
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps, before = [], 0.0
    for line in lines:
        if "loss" in line and "seconds" in line:  # the metrics file counts from the start of training
            steps.append({**line, "seconds": line["seconds"] - before})
            before = line["seconds"]
    rewards = score_held_out(run / "checkpoint", held_out, arguments) if held_out else []
    return Run(steps, peak, seconds, rewards)


def score_held_out(checkpoint: Path, held_out: Sequence[Pair], arguments: Any) -> list[float]:
    from rm_core.model import RewardModel

    model = RewardModel.load(str(checkpoint), dtype=arguments.dtype, device=arguments.device)
    sequences = [ids for pair in held_out for ids in (pair.chosen, pair.rejected)]
    rewards: list[float] = []
    for start in range(0, len(sequences), 16):
        rewards += model.score_ids(sequences[start : start + 16]).tolist()
    return rewards


def run_trl(folder: Path, base: Path, train: Sequence[Pair], held_out: Sequence[Pair], arguments: Any) -> Run:
    python = processes.required_python(arguments.trl_python, "BETTERTHAN_TRL_PYTHON")
    spec = {
        "base": str(base),
        "train": str(write_ids(folder / "train_ids.jsonl", train)),
        "eval": str(write_ids(folder / "eval_ids.jsonl", held_out)) if held_out else None,
        "output": str(folder / "trl"),
        "answer": str(folder / "trl.json"),
        "batch_size": BATCH,
        "learning_rate": arguments.learning_rate,
        "numbers": arguments.trl_numbers,
        "seed": arguments.seed % 2**31,
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    command = [python, str(Path(__file__).with_name("peer_trl.py")), str(folder / "spec.json")]
    peak, seconds = run_process(command, processes.cpu_environment(arguments.threads), folder / "trl.log")
    answer = json.loads((folder / "trl.json").read_text())
    return Run(answer["steps"], peak, seconds, answer.get("eval_rewards", []))


def wins_of(rewards: Sequence[float]) -> list[float]:
    """For each pair 1 where the chosen answer has the higher reward; a tie is half."""
    return [(c > r) + (c == r) / 2 for c, r in zip(rewards[::2], rewards[1::2], strict=True)]


def accuracy(rewards: Sequence[float]) -> float | None:
    """Share of pairs whose chosen answer has the higher reward."""
    wins = wins_of(rewards)
    return round(sum(wins) / len(wins), 4) if wins else None


def compare_pairs(ours: Sequence[float], trl: Sequence[float]) -> dict[str, int]:
    """How many held-out pairs one side gets right and the other does not: what a paired test counts."""
    both = list(zip(wins_of(ours), wins_of(trl), strict=True))
    return {"ours": sum(a > b for a, b in both), "trl": sum(b > a for a, b in both)}


def base_for_trl(base: Path, folder: Path) -> Path:
    """The base with a pad token that is not the end token, since TRL finds a text's end by the pad token."""
    target = folder / "base"
    shutil.copytree(base, target)
    config = json.loads((target / "tokenizer_config.json").read_text())
    vocabulary = json.loads((target / "tokenizer.json").read_text())["added_tokens"]
    taken = {config.get("eos_token"), config.get("bos_token")}
    config["pad_token"] = next(token["content"] for token in vocabulary if token["content"] not in taken)
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


def measure(data: Path, base: Path, scratch: Path, ceiling: CeilingProcess, arguments: Any) -> dict[str, Any]:
    shuffle = random.Random(arguments.seed)
    rounds = arguments.rounds or (1 if arguments.quick else 2)
    size = (arguments.pairs or (16 if arguments.quick else 64)) // BATCH * BATCH
    # Whole windows are read, however few batches are run: short batches out of small windows would be badly grouped.
    limit = -(-size * rounds // WINDOW) * WINDOW + arguments.eval_pairs
    pairs = read_pairs(data, base, arguments.max_length, shuffle, limit)
    held_out, rest = pairs[: arguments.eval_pairs], pairs[arguments.eval_pairs :]
    batches = length_grouped(rest, shuffle) if arguments.trl_order == "grouped" else _in_order(rest)
    if len(batches) * BATCH < size * rounds:
        raise SystemExit(f"{data}: {len(pairs)} usable pairs; lower --pairs, --rounds or --eval-pairs")
    trl_base = base_for_trl(base, scratch / data.stem)
    runs: dict[str, list[Run]] = {"ours": [], "trl": []}
    rates, tree_tokens = [], []
    for number in range(rounds):
        part = batches[number * size // BATCH : (number + 1) * size // BATCH]
        train = [pair for batch in part for pair in batch]
        folder = scratch / f"{data.stem}-{number}"
        folder.mkdir(parents=True)
        rates.append(ceiling.tokens_per_second())
        tree_tokens.append(sum(pair.tree_tokens for pair in train) / size)
        for side in ("ours", "trl") if number % 2 == 0 else ("trl", "ours"):
            if side == "ours":
                runs[side].append(run_ours(folder, base, train, held_out, arguments))
            else:
                runs[side].append(run_trl(folder, trl_base, train, held_out, arguments))
            last = runs[side][-1]
            common.say(
                f"{data.stem} round {number + 1}/{rounds} {side}: {last.steady:.2f} pairs/s ({last.whole:.2f} with the "
                f"first step), peak {last.peak_bytes / 2**30:.2f} GiB, losses {last.losses[0]} … {last.losses[-1]}"
            )
    ours, trl = runs["ours"], runs["trl"]
    ideal = [rate / (2 * tokens) for rate, tokens in zip(rates, tree_tokens, strict=True)]
    peaks = {side: common.median([run.peak_bytes for run in done]) for side, done in runs.items()}
    return {
        "workload": f"{data.stem}: {size} pairs, {BATCH} a step, {tree_tokens[0]:.0f} tree tokens a pair",
        "ours": round(common.median([run.steady for run in ours]), 3),
        "peer": round(common.median([run.steady for run in trl]), 3),
        "ratio": round(common.median([a.steady / b.steady for a, b in zip(ours, trl, strict=True)]), 3),
        "ceiling_fraction": round(common.median([run.steady / best for run, best in zip(ours, ideal, strict=True)]), 3),
        "peak_gib": {side: round(peak / 2**30, 2) for side, peak in peaks.items()},
        "peak_ratio": round(peaks["ours"] / peaks["trl"], 3),
        "whole": {side: round(common.median([run.whole for run in done]), 3) for side, done in runs.items()},
        "wall_seconds": {side: [round(run.wall_seconds, 1) for run in done] for side, done in runs.items()},
        "losses": {side: [run.losses for run in done] for side, done in runs.items()},
        "held_out_accuracy": {side: [accuracy(run.rewards) for run in done] for side, done in runs.items()},
        "held_out_only": [compare_pairs(a.rewards, b.rewards) for a, b in zip(ours, trl, strict=True)],
    }


def _in_order(pairs: Sequence[Pair]) -> list[list[Pair]]:
    return [list(pairs[at : at + BATCH]) for at in range(0, len(pairs) - BATCH + 1, BATCH)]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", nargs="+", type=Path, help="JSONL files of pairs")
    parser.add_argument("--base", type=Path, default=None, help="base model folder; default: the bundled SmolLM2")
    parser.add_argument("--pairs", type=int, default=None, help="pairs of a round; default 64, with --quick 16")
    parser.add_argument("--rounds", type=int, default=None, help="default 2, with --quick 1")
    parser.add_argument("--eval-pairs", type=int, default=0, help="held-out pairs for the accuracy after training")
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="bfloat16", help="ours")
    parser.add_argument("--set", action="append", default=[], help="further settings of rm-train fit, key.path=value")
    parser.add_argument("--trl-python", default=None, help="python of TRL's environment, or BETTERTHAN_TRL_PYTHON")
    parser.add_argument("--trl-numbers", choices=["bf16", "autocast", "fp32"], default="bf16")
    parser.add_argument("--trl-order", choices=["grouped", "random"], default="grouped")


def main() -> None:
    arguments = common.parse_arguments(__doc__.splitlines()[0], _options)
    from rm_core.smollm2 import bundled_model_path

    python = processes.required_python(arguments.trl_python, "BETTERTHAN_TRL_PYTHON")
    base = arguments.base or bundled_model_path()
    ceiling = CeilingProcess(base, arguments.threads, arguments.device)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        try:
            results = [measure(path, base, Path(scratch), ceiling, arguments) for path in arguments.data]
        finally:
            ceiling.close()
    columns = ("workload", "ours", "peer", "ratio", "ceiling_fraction", "peak_ratio")
    result = {
        "benchmark": "train_vs_trl",
        "unit": "pairs/s",
        **{column: [found[column] for found in results] for column in columns},
        "details": results,
        "trl": {"numbers": arguments.trl_numbers, "order": arguments.trl_order},
        "peer_versions": processes.peer_versions(python, ["trl", "torch", "transformers", "peft"]),
    }
    common.finish(result, [{column: found[column] for column in columns} for found in results], arguments)


if __name__ == "__main__":
    main()
