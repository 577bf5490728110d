"""Run by test_real_clients in verl's environment: its RewardLoopWorker scores each conversation, without Ray.

Reads {"url", "tokenizer", "items": [{"messages", "response"}], "ways"} from stdin, writes the rewards by the way they came.
"""

import json
import sys
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl import DataProto
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker


def batch_of(items: list[dict[str, Any]], tokenizer: Any) -> DataProto:
    """Prompts padded on the left, responses on the right, as verl's rollout leaves them."""
    prompts = [tokenizer.apply_chat_template(i["messages"], tokenize=False, add_generation_prompt=True) for i in items]
    prompt_ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompts]
    response_ids = [tokenizer(i["response"], add_special_tokens=False)["input_ids"] for i in items]
    width, length = max(map(len, prompt_ids)), max(map(len, response_ids))
    pad = tokenizer.pad_token_id
    left = torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompt_ids])
    right = torch.tensor([ids + [pad] * (length - len(ids)) for ids in response_ids])
    mask = torch.tensor(
        [
            [0] * (width - len(p)) + [1] * (len(p) + len(r)) + [0] * (length - len(r))
            for p, r in zip(prompt_ids, response_ids, strict=True)
        ]
    )
    return DataProto.from_dict(
        tensors={"prompts": left, "responses": right, "attention_mask": mask},
        non_tensors={
            "raw_prompt": np.array([i["messages"] for i in items] + [None], dtype=object)[:-1],
            "data_source": np.array(["test"] * len(items), dtype=object),
            "reward_model": np.array([{"ground_truth": ""} for _ in items], dtype=object),
            "extra_info": np.array([{"question": i["messages"]} for i in items], dtype=object),
        },
    )


def worker(job: dict[str, Any], engine: str, **custom: Any) -> RewardLoopWorker:
    config = {
        "actor_rollout_ref": {"model": {"path": job["tokenizer"], "tokenizer_path": None}},
        "reward": {
            "reward_manager": {"source": "register", "name": "naive", "module": None},
            "custom_reward_function": {"path": None, "name": None, "reward_kwargs": {}} | custom,
            "reward_model": {"enable": not custom, "model_path": job["tokenizer"], "rollout": {"name": engine}},
        },
    }
    return RewardLoopWorker(OmegaConf.create(config), job["url"].removeprefix("http://"))


def main() -> None:
    job = json.load(sys.stdin)
    data = batch_of(job["items"], AutoTokenizer.from_pretrained(job["tokenizer"]))
    own = {"path": "pkg://rm_client.adapters", "name": "verl_compute_score", "reward_kwargs": {"url": job["url"]}}
    workers = {"vllm": worker(job, "vllm"), "sglang": worker(job, "sglang"), "function": worker(job, "vllm", **own)}
    print("STARTED", flush=True)
    answers = {}
    for name in job["ways"]:
        one = workers[name]
        outputs = one.loop.run_until_complete(one.compute_score_batch(data))
        answers[name] = [output["reward_score"] for output in outputs]
    print("RESULT " + json.dumps(answers))


main()
