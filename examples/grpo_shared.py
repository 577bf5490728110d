"""What the GRPO examples share: the policy, its answers, their rewards, the evaluation, the command line.

Invariant: a policy is judged before and after on prompts that it is never trained on, with the same random numbers.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rm_client
from rm_client import GroupsResult, RewardClient, k3_kl
from rm_client.answers import OnError

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
    total = answers.ids.shape[1]
    logits = policy(
        input_ids=answers.ids,
        attention_mask=answers.attention.long(),
        position_ids=positions,
        # A number would cut a view, for which the CPU copies the output matrix once for each row.
        logits_to_keep=torch.arange(total - length - 1, total, device=answers.ids.device),
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


def compare(
    before: Evaluation, after: Evaluation, args: Any, client: RewardClient, reward_id: str, started: float
) -> dict[str, Any]:
    """What result.json holds. ``started``: ``time.perf_counter()`` of the run's beginning."""
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
        "held_out_prompts": len(before.rewards),
        "seed": args.seed,
        "seconds": round(time.perf_counter() - started, 1),
        "reward_id": reward_id,
        "reward_id_is_unchanged": client.info().reward_id == reward_id,
    }


# ------------------------------------------------------------------ command line


def parse(argv: Sequence[str] | None, about: str, out: Path) -> Any:
    """The arguments, the same for every example."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
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


def command(
    name: str, about: str, argv: Sequence[str] | None, work: Callable[[Any, RewardClient, str], dict[str, Any]]
) -> int:
    """The command line of an example: ``work(args, client, reward_id)`` gives what result.json holds.

    The client is pinned to the ``reward_id`` that the server has at the start, so the run stops if it is exchanged.
    """
    args = parse(argv, about, out=Path("runs") / name)
    try:
        if args.model is None:
            from rm_core.smollm2 import bundled_model_path

            args.model = str(bundled_model_path())
        # Few tries: a server that is not there yet is more often a wrong address than one that restarts.
        with rm_client.RewardClient(args.server, api_key=args.api_key, max_retries=2) as client:
            reward_id = client.info().reward_id
        if reward_id is None:
            raise ValueError(f"{args.server}: /info states no reward_id, so the reward model cannot be pinned")
        args.out.mkdir(parents=True, exist_ok=True)
        with rm_client.RewardClient(args.server, api_key=args.api_key, reward_id=reward_id) as client:
            result = work(args, client, reward_id)
    except (rm_client.RewardClientError, ValueError, OSError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    (args.out / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0
