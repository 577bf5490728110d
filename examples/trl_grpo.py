"""GRPO with TRL's GRPOTrainer against a running reward server: the same prompts, model and evaluation as grpo.py.

    rm-server runs/quickstart/checkpoint &
    python examples/trl_grpo.py                          # needs trl, peft and datasets beside betterthan
    python examples/trl_grpo.py --quick --model FOLDER

The reward function pins the ``reward_id``, sends each batch in one request, and marks answers that were cut by the
length limit. Writes result.json to --out; the last line on stdout is the result as JSON.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from grpo_shared import command, compare, evaluate, load_policy, read_prompts

from rm_client import RewardClient, trl_reward_function
from rm_core.hardware import choose_compute

Rows = list[dict[str, Any]]


def train(policy: Any, tokenizer: Any, args: Any, reward: Any, rows: Rows) -> Rows:
    """Run GRPOTrainer on the policy; returns its log. ``rows``: ``prompt`` and the reward function's columns."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    on_cpu = policy.device.type == "cpu"
    config = GRPOConfig(
        output_dir=str(args.out / "trl"),
        per_device_train_batch_size=args.prompts_per_step * args.group_size,
        num_generations=args.group_size,
        max_completion_length=args.max_new_tokens,
        max_steps=args.steps,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        beta=args.kl,
        epsilon=args.clip,
        temperature=args.temperature,
        loss_type="grpo",
        use_cpu=on_cpu,
        bf16=policy.dtype == torch.bfloat16,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=args.seed,
    )
    trainer = GRPOTrainer(
        model=policy,
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows),
        args=config,
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def run(
    args: Any, client: RewardClient, reward_id: str, train_rows: Rows, held_out: Rows, reference_column: str | None
) -> dict[str, Any]:
    """Evaluate, train, evaluate. Returns what result.json holds."""
    started = time.perf_counter()
    torch.manual_seed(args.seed)
    compute = choose_compute(args.dtype, args.device)
    policy, tokenizer = load_policy(args.model, args.lora_rank, compute.dtype, compute.device)
    reward = trl_reward_function(
        args.server,
        api_key=args.api_key,
        reward_id=reward_id,
        eos_token_ids=[tokenizer.eos_token_id],
        reference_column=reference_column,
    )
    prompts = [row["prompt"] for row in held_out]
    references = None if reference_column is None else [row[reference_column] for row in held_out]
    before = evaluate(policy, tokenizer, client, prompts, args, references)
    print(f"start: reward {before.rewards.mean():+.3f} on {len(prompts)} held-out prompts, {before.length:.0f} tokens")
    torch.manual_seed(args.seed)
    history = train(policy, tokenizer, args, reward, train_rows)
    after = evaluate(policy, tokenizer, client, prompts, args, references)
    return compare(before, after, args, client, reward_id, started) | {"steps": len(history)}


def trl_command(
    name: str,
    about: str,
    argv: Sequence[str] | None,
    rows_of: Callable[[Any], tuple[Rows, Rows]],
    reference_column: str | None = None,
) -> int:
    """The command line of this example and of rlvr_math.py: ``rows_of`` gives training and held-out rows."""

    def work(args: Any, client: RewardClient, reward_id: str) -> dict[str, Any]:
        return run(args, client, reward_id, *rows_of(args), reference_column)

    return command(name, about, argv, work)


def demo_rows(args: Any) -> tuple[Rows, Rows]:
    """The prompts of --prompts and --held-out."""
    files = (read_prompts(args.prompts, None), read_prompts(args.held_out, args.eval_prompts))
    train_rows, held_out = ([{"prompt": prompt} for prompt in prompts] for prompts in files)
    return train_rows, held_out


def main(argv: Sequence[str] | None = None) -> int:
    return trl_command("trl_grpo", __doc__ or "", argv, demo_rows)


if __name__ == "__main__":
    sys.exit(main())
