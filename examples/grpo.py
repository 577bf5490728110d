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

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rm_client
from rm_client import GroupsResult, RewardClient, grpo_advantage_report, grpo_loss, k3_kl
from rm_client.answers import OnError
from rm_core.hardware import choose_compute

ROOT = Path(__file__).resolve().parent.parent
Prompt = list[dict[str, str]]


@dataclass
class Answers:
    """N answers to N prompts (a prompt stands there once for each of its answers).

    ``ids`` [N, P + T]: prompts padded on the left, answers on the right. ``attention`` [N, P + T] and ``mask`` [N, T]:
    True for what is no padding; the end token that an answer stops with counts as part of it.
    """

    prompts: list[Prompt]
    texts: list[str]
    finished: list[bool]
    ids: torch.Tensor
    attention: torch.Tensor
    mask: torch.Tensor


# ------------------------------------------------------------------ policy


def load_policy(name: str, rank: int, dtype: torch.dtype, device: torch.device | str) -> tuple[Any, Any]:
    """The base model with a fresh LoRA adapter, and its tokenizer. With the adapter off it is the reference."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    base = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device)
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(base, config), tokenizer


@torch.no_grad()
def sample(
    policy: Any, tokenizer: Any, prompts: Sequence[Prompt], size: int, max_new_tokens: int, temperature: float
) -> Answers:
    """``size`` answers to each prompt, in the prompts' order."""
    repeated = [prompt for prompt in prompts for _ in range(size)]
    texts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in repeated]
    tokenizer.padding_side = "left"
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(policy.device)
    policy.eval()
    ids = policy.generate(
        **batch,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    answers = ids[:, batch["input_ids"].shape[1] :]
    is_end = answers == tokenizer.eos_token_id
    # The first end token still counts, what is behind it does not, whatever the pad token is.
    mask = (is_end.cumsum(1) - is_end.long()) == 0
    return Answers(
        prompts=repeated,
        texts=tokenizer.batch_decode(
            [row[keep] for row, keep in zip(answers, mask, strict=True)], skip_special_tokens=True
        ),
        finished=is_end.any(1).tolist(),
        ids=ids,
        attention=torch.cat([batch["attention_mask"].bool(), mask], dim=1),
        mask=mask,
    )


def log_probs(policy: Any, answers: Answers, temperature: float) -> torch.Tensor:
    """Log-probability [N, T] of each answer's tokens under the distribution they are sampled from, in nats, fp32."""
    length = answers.mask.shape[1]
    positions = (answers.attention.long().cumsum(1) - 1).clamp(min=0)
    logits = policy(
        input_ids=answers.ids,
        attention_mask=answers.attention.long(),
        position_ids=positions,
        logits_to_keep=length + 1,
        use_cache=False,
    ).logits[:, :-1]
    chosen = answers.ids[:, -length:].unsqueeze(-1)
    return torch.log_softmax(logits.float() / temperature, dim=-1).gather(-1, chosen).squeeze(-1)


# ------------------------------------------------------------------ reward


def score(
    client: RewardClient,
    answers: Answers,
    size: int,
    references: Sequence[Any] | None = None,
    on_error: OnError = "none",
) -> GroupsResult:
    """One request for the whole batch, one group for each prompt. What was cut by its limit says so.

    ``references``: what the server's verifiers compare with, one for each prompt.
    """
    groups: list[dict[str, Any]] = []
    for start in range(0, len(answers.texts), size):
        completions = [
            {"content": text, "finished": finished}
            for text, finished in zip(
                answers.texts[start : start + size], answers.finished[start : start + size], strict=True
            )
        ]
        groups.append({"prompt": answers.prompts[start], "completions": completions})
        if references is not None:
            groups[-1]["reference"] = references[start // size]
    return client.score_groups(groups, on_error=on_error)


def read_prompts(path: Path, limit: int | None) -> list[Prompt]:
    """The distinct prompts of a file of preference pairs (JSON lines with ``prompt`` as messages or text)."""
    found: dict[str, Prompt] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        prompt = json.loads(line)["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        found.setdefault(json.dumps(messages), messages)
    return list(found.values())[:limit]


# ------------------------------------------------------------------ evaluation


@dataclass
class Evaluation:
    """Mean reward of each held-out prompt [P], and means over all its answers."""

    rewards: np.ndarray[Any, np.dtype[Any]]
    length: float
    finished: float
    kl: float
    """KL to the start, in nats an answer: k3 summed over the tokens of answers that the policy wrote."""


def evaluate(
    policy: Any,
    tokenizer: Any,
    client: RewardClient,
    prompts: Sequence[Prompt],
    args: Any,
    references: Sequence[Any] | None = None,
) -> Evaluation:
    """Sample and score answers to held-out prompts; the same random numbers each time."""
    torch.manual_seed(1234)
    rewards: list[float] = []
    lengths: list[float] = []
    finished: list[bool] = []
    kl: list[float] = []
    for start in range(0, len(prompts), args.prompts_per_step):
        part = prompts[start : start + args.prompts_per_step]
        expected = None if references is None else references[start : start + args.prompts_per_step]
        answers = sample(policy, tokenizer, part, args.eval_answers, args.max_new_tokens, args.temperature)
        rows = score(client, answers, args.eval_answers, expected, on_error="raise").rewards
        rewards += np.array(rows, dtype=np.float64).mean(axis=1).tolist()
        lengths += answers.mask.sum(1).tolist()
        finished += answers.finished
        with torch.no_grad():
            new = log_probs(policy, answers, args.temperature)
            with policy.disable_adapter():
                reference = log_probs(policy, answers, args.temperature)
        kl += (k3_kl(new, reference) * answers.mask).sum(1).tolist()
    return Evaluation(np.array(rewards), float(np.mean(lengths)), float(np.mean(finished)), float(np.mean(kl)))


def paired_bootstrap(
    before: np.ndarray[Any, np.dtype[Any]], after: np.ndarray[Any, np.dtype[Any]], draws: int = 10_000, seed: int = 0
) -> tuple[float, float, float]:
    """Mean of after − before over prompts, and its 95 % interval: prompts are drawn with replacement, pairs kept."""
    difference = after - before
    picks = np.random.default_rng(seed).integers(len(difference), size=(draws, len(difference)))
    low, high = np.percentile(difference[picks].mean(axis=1), [2.5, 97.5])
    return float(difference.mean()), float(low), float(high)


# ------------------------------------------------------------------ training


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
        raise SystemExit("grpo: error: a held-out prompt is also a training prompt")

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
    gain, low, high = paired_bootstrap(before.rewards, after.rewards)
    return {
        "reward_start": float(before.rewards.mean()),
        "reward_end": float(after.rewards.mean()),
        "gain": gain,
        "gain_interval_95": [low, high],
        "kl_end": after.kl,
        "length_start": before.length,
        "length_end": after.length,
        "finished_start": before.finished,
        "finished_end": after.finished,
        "held_out_prompts": len(held_out),
        "steps": args.steps,
        "seed": args.seed,
        "seconds": round(time.perf_counter() - started, 1),
        "reward_id": reward_id,
        "reward_id_is_unchanged": client.info().reward_id == reward_id,
    }


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


# ------------------------------------------------------------------ command line


def parse(argv: Sequence[str] | None, out: Path = Path("runs") / "grpo") -> Any:
    """The arguments; trl_grpo.py and rlvr_math.py have the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="URL of the running reward server")
    parser.add_argument("--api-key", default=None)
    parser.add_argument(
        "--model", default=None, help="policy to start from; default: the bundled SmolLM2-135M-Instruct"
    )
    parser.add_argument("--prompts", type=Path, default=ROOT / "data" / "demo_train.jsonl")
    parser.add_argument("--held-out", type=Path, default=ROOT / "data" / "demo_heldout.jsonl")
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts-per-step", type=int, default=4, help="B: groups in a step")
    parser.add_argument("--group-size", type=int, default=8, help="G: answers to a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--updates", type=int, default=1, help="optimizer steps on one sampled batch")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--kl", type=float, default=0.05, help="weight of the KL penalty")
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--eval-prompts", type=int, default=40)
    parser.add_argument("--eval-answers", type=int, default=4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of the base model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="2 steps, short answers: to see that everything works")
    args = parser.parse_args(argv)
    if args.quick:
        args.steps, args.max_new_tokens, args.prompts_per_step, args.eval_prompts = 2, 8, 2, 4
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        if args.model is None:
            from rm_core.smollm2 import bundled_model_path

            args.model = str(bundled_model_path())
        with rm_client.RewardClient(args.server, api_key=args.api_key) as client:
            reward_id = client.info().reward_id
        if reward_id is None:
            raise ValueError(f"{args.server}: /info states no reward_id, so the reward model cannot be pinned")
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "metrics.jsonl").unlink(missing_ok=True)
        with rm_client.RewardClient(args.server, api_key=args.api_key, reward_id=reward_id) as client:
            result = run(args, client, reward_id)
    except (rm_client.RewardClientError, ValueError, OSError) as error:
        print(f"grpo: error: {error}", file=sys.stderr)
        return 2
    (args.out / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
