"""Run by test_real_clients in OpenRLHF's environment: its own executor fetches a reward for each conversation.

Reads {"endpoints": {name: [url or file]}, "tokenizer", "items": [{"prompt", "response"}]} from stdin, writes what the
executor stored, by name.
"""

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

from openrlhf.utils.agent import SingleTurnAgentExecutor
from transformers import AutoTokenizer


class Engine:
    """In place of vLLM: generates the response that the conversation has."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids

    async def generate(self, prompt_ids: list[int], *_: Any, **__: Any) -> Any:
        output = SimpleNamespace(token_ids=self.token_ids, finish_reason="stop", logprobs=None, text="")
        return SimpleNamespace(outputs=[output])


async def main() -> None:
    job = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
    sampling = SimpleNamespace(max_tokens=256, logprobs=None)

    async def fetch(executor: Any, item: dict[str, str]) -> dict[str, Any]:
        ids = tokenizer(item["response"], add_special_tokens=False)["input_ids"]
        return await executor.execute(item["prompt"], "label", sampling, 4096, tokenizer, Engine(ids))

    print("STARTED", flush=True)
    answers = {}
    for name, endpoints in job["endpoints"].items():
        executor = SingleTurnAgentExecutor(endpoints)
        outputs = await asyncio.gather(*(fetch(executor, item) for item in job["items"]))
        answers[name] = [
            {
                "reward": float(output["reward"][0]),
                "score": float(output["scores"][0]),
                "logs": sorted(output["extra_logs"]),
            }
            for output in outputs
        ]
    print("RESULT " + json.dumps(answers))


asyncio.run(main())
