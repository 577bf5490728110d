"""Run by test_real_clients in TRL's environment: GRPOTrainer trains a tiny policy on a sync and an async reward function.

Reads {"url", "policy", "prompts": [messages], "reward_id"} from stdin, writes what each reward function saw and gave.
"""

import json
import sys
import tempfile
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from rm_client import trl_reward_function

job = json.load(sys.stdin)
tokenizer = AutoTokenizer.from_pretrained(job["policy"])
options = {"reward_id": job["reward_id"], "eos_token_ids": [tokenizer.eos_token_id]}
plain = trl_reward_function(job["url"], name="plain", **options)
waiting = trl_reward_function(job["url"], name="waiting", asynchronous=True, **options)
seen: dict[str, list[Any]] = {"plain": [], "waiting": []}


def record(name: str, prompts: Any, completions: Any, ids: Any, rewards: list[float | None]) -> list[float | None]:
    finished = [len(row) > 0 and row[-1] == tokenizer.eos_token_id for row in ids]
    seen[name] += [list(row) for row in zip(prompts, completions, finished, rewards, strict=True)]
    return rewards


def sync_reward(prompts: Any, completions: Any, completion_ids: Any, **rest: Any) -> list[float | None]:
    rewards = plain(prompts=prompts, completions=completions, completion_ids=completion_ids, **rest)
    return record("plain", prompts, completions, completion_ids, rewards)


async def async_reward(prompts: Any, completions: Any, completion_ids: Any, **rest: Any) -> list[float | None]:
    rewards = await waiting(prompts=prompts, completions=completions, completion_ids=completion_ids, **rest)
    return record("waiting", prompts, completions, completion_ids, rewards)


with tempfile.TemporaryDirectory() as folder:
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["policy"]),
        processing_class=tokenizer,
        reward_funcs=[sync_reward, async_reward],
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in job["prompts"]]),
        args=GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=32,
            num_generations=4,
            max_completion_length=8,
            max_steps=2,
            use_cpu=True,
            bf16=False,
            report_to="none",
            logging_steps=1,
            disable_tqdm=True,
            save_strategy="no",
            seed=1,
        ),
    )
    print("STARTED", flush=True)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
print("RESULT " + json.dumps({"seen": seen, "logged": logged}))
