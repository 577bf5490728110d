"""GRPO in plain PyTorch against a running reward server: no critic, no trainer library.

    rm-server runs/quickstart/checkpoint &
    python examples/grpo.py                          # SmolLM2-135M with LoRA, CPU or GPU
    python examples/grpo.py --quick --model FOLDER   # a few seconds, to see that everything works

Each step: sample G answers to each of B prompts, have the server score them, make each reward relative to its group,
and take one or more steps on the clipped loss plus a k3 penalty towards the model that it started from. Before and
after, answers to prompts that were never trained on are scored; the difference comes with a paired bootstrap interval.

Writes metrics.jsonl, result.json, grpo.png and the adapter to --out; the last line on stdout is the result as JSON.

Invariant: the reward model is frozen. Its ``reward_id`` is pinned at the start, so the run stops if it is exchanged; it
lives in another process, so no gradient can reach it.
"""

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grpo_shared import Prompt, command, compare, evaluate, load_policy, log_probs, read_prompts, sample, score

from rm_client import RewardClient, grpo_advantage_report, grpo_loss
from rm_core.hardware import choose_compute


def train_step(
    policy: Any, tokenizer: Any, optimizer: Any, client: RewardClient, prompts: Sequence[Prompt], args: Any
) -> dict[str, float]:
    """Sample, score, and update ``--updates`` times on what was sampled. Returns the step's numbers."""
    started = time.perf_counter()
    answers = sample(policy, tokenizer, prompts, args.group_size, args.max_new_tokens, args.temperature)
    sampled = time.perf_counter()
    result = score(client, answers, args.group_size)
    scored = time.perf_counter()
    shape = (len(prompts), args.group_size, -1)
    report = grpo_advantage_report(result.rewards)
    advantages = torch.tensor(report.advantages, dtype=torch.float32, device=answers.ids.device)
    with torch.no_grad(), policy.disable_adapter():
        reference = log_probs(policy, answers, args.temperature)
    old = None
    for _ in range(args.updates):
        new = log_probs(policy, answers, args.temperature)
        # At the first update the policy is still the one that sampled.
        old = new.detach() if old is None else old
        loss, stats = grpo_loss(
            new.view(shape),
            old.view(shape),
            reference.view(shape),
            advantages=advantages,
            clip_eps=args.clip,
            kl_coeff=args.kl,
            aggregation="grpo",
            mask=answers.mask.view(shape),
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in policy.parameters() if p.requires_grad], 1.0)
        optimizer.step()
    known = [reward for row in result.rewards for reward in row if reward is not None]
    return {
        "reward": float(np.mean(known)) if known else float("nan"),
        "missing": float(answers.mask.shape[0] - len(known)),
        "kl": stats.kl,
        "loss": stats.loss,
        "clip_fraction": stats.clip_fraction,
        "length": float(answers.mask.sum(1).float().mean()),
        "finished": float(np.mean(answers.finished)),
        "sample_seconds": round(sampled - started, 3),
        "score_seconds": round(scored - sampled, 3),
        "seconds": round(time.perf_counter() - started, 3),
    }


def run(args: Any, client: RewardClient, reward_id: str) -> dict[str, Any]:
    """Evaluate, train, evaluate. Returns what result.json holds."""
    started = time.perf_counter()
    (args.out / "metrics.jsonl").unlink(missing_ok=True)
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    compute = choose_compute(args.dtype, args.device)
    print(f"policy on {compute.device}, {compute.reason}")
    policy, tokenizer = load_policy(args.model, args.lora_rank, compute.dtype, compute.device)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=args.lr, weight_decay=0.0)
    prompts = read_prompts(args.prompts, None)
    held_out = read_prompts(args.held_out, args.eval_prompts)
    seen = {json.dumps(prompt) for prompt in prompts}
    if any(json.dumps(prompt) in seen for prompt in held_out):
        raise ValueError("a held-out prompt is also a training prompt")

    before = evaluate(policy, tokenizer, client, held_out, args)
    print(f"start: reward {before.rewards.mean():+.3f} on {len(held_out)} held-out prompts, {before.length:.0f} tokens")
    torch.manual_seed(args.seed)
    history: list[dict[str, float]] = []
    order: list[Prompt] = []
    for step in range(1, args.steps + 1):
        while len(order) < args.prompts_per_step:
            order += random.sample(prompts, len(prompts))
        chosen, order = order[: args.prompts_per_step], order[args.prompts_per_step :]
        history.append({"step": step, **train_step(policy, tokenizer, optimizer, client, chosen, args)})
        with (args.out / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(history[-1]) + "\n")
        print("  ".join(f"{name} {history[-1][name]:.3g}" for name in ("step", "reward", "kl", "length", "seconds")))
    after = evaluate(policy, tokenizer, client, held_out, args)

    policy.save_pretrained(args.out / "adapter")
    plot(history, args.out / "grpo.png")
    return compare(before, after, args, client, reward_id, started) | {"steps": args.steps}


def plot(history: Sequence[dict[str, float]], path: Path) -> None:
    """Reward, KL and length over the steps, in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.2), constrained_layout=True)
    titles = {"reward": "mean reward of the step", "kl": "k3 to the start, nats a token", "length": "tokens an answer"}
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        values = [entry[name] for entry in history]
        axis.plot([entry["step"] for entry in history], values, marker=".", linewidth=1)
        axis.set_title(title)
        axis.set_xlabel("step")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    return command("grpo", __doc__ or "", argv, run)


if __name__ == "__main__":
    sys.exit(main())
