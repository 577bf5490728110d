"""Other trainers' forms: what each client sends as items to score, and the rewards in the shape that it reads.

Invariant: a reward is raw unless the protocol's own default says otherwise and the caller did not switch it off.
"""

import base64
import math
import struct
import sys
import time
from dataclasses import replace
from typing import Any

from rm_server.errors import InvalidRequestError
from rm_server.inputs import ItemInput
from rm_server.logs import new_request_id
from rm_server.protocol_call import Call, Outcome
from rm_server.protocol_schema import (
    OpenRLHFRequest,
    RewardUrlRequest,
    ScoreEvaluationRequest,
    SGLangClassifyRequest,
    VllmClassifyRequest,
    classify_form,
    list_inputs_of,
)
from rm_server.schema import parse_as

LLAMA_FACTORY_DEADLINE_MS = 3_600_000.0
"""LLaMA-Factory's client waits without limit and never tries again, so it is kept waiting rather than refused."""


async def openrlhf(call: Call, data: Any) -> dict[str, Any]:
    """`{"query", "prompts", "labels"}` -> `{"rewards", "scores", "extra_logs"}`, lists of N."""
    request = parse_as(OpenRLHFRequest, data)
    inputs = call.policy_texts(request.query, "query")
    inputs = for_verifiers(inputs, request.prompts, request.labels, wants_answers=call.has_verifiers)
    outcome = await call.score(inputs)
    record = outcome.model.record
    mean, std = (0.0, 1.0) if record is None else (record.reward_mean, record.reward_std or 1.0)
    return {
        "rewards": outcome.rewards,
        "scores": [
            # Verifiers' rewards are 0 for failed and 1 for passed already, and a filter must see them as such.
            between_0_and_1((reward - mean) / std) if call.has_model else min(max(reward, 0.0), 1.0)
            for reward in outcome.rewards
        ],
        "extra_logs": {
            "rm_reward": outcome.rewards,
            "rm_finished": [float(call.is_finished(item, outcome.model)) for item in inputs],
            "rm_truncated": [float(flag) for flag in outcome.truncated],
            # Logged by name; a part that was not needed for one of the rewards has no number there.
            **{f"rm_{name}": values for name, values in outcome.components.items() if None not in values},
        },
    }


def for_verifiers(
    inputs: list[ItemInput], prompts: list[Any] | None, labels: list[Any] | None, *, wants_answers: bool
) -> list[ItemInput]:
    """Add what a recipe's verifiers want beside the whole text: the answer without its prompt, and the reference.

    ``wants_answers``: there are verifiers. Raises InvalidRequestError where the answer cannot be told from its prompt.
    """
    for name, column in (("prompts", prompts), ("labels", labels)):
        if column and inputs and len(column) != len(inputs):
            raise InvalidRequestError(f"{name}: there are {len(column)} of them for {len(inputs)} texts in query")
    added = []
    for i, item in enumerate(inputs):
        if wants_answers and prompts:
            item = replace(item, answer=_answer_after(item.completion, prompts[i], i))
        added.append(replace(item, reference=labels[i]) if labels else item)
    return added


def _answer_after(query: Any, prompt: Any, i: int) -> str:
    from rm_client.batches import answer_start  # not at start-up: it brings the HTTP client along

    at = answer_start(query, prompt) if isinstance(query, str) and isinstance(prompt, str) else None
    if at is None:
        raise InvalidRequestError(
            f"prompts[{i}]: query[{i}] does not begin with it, so the answer cannot be told from the prompt"
        )
    return str(query[at:])


async def reward_url(call: Call, data: Any) -> Any:
    """`{"prompt", "response", "label"}` -> a number, or an object where the URL says ``form=object``."""
    request = parse_as(RewardUrlRequest, data)
    finished = True if call.options.finished == "always" else None
    prompt = request.prompt or None
    item = ItemInput(
        "response",
        request.response,
        prompt,
        "prompt",
        finished=finished,
        reference=request.label,
        is_templated=True,
    )
    outcome = await call.score([item])
    if call.options.form == "number":
        return outcome.rewards[0]
    return {
        "score": outcome.rewards[0],
        "finished": call.is_finished(item, outcome.model),
        "truncated": outcome.truncated[0],
        "reward_id": outcome.model.reward_id,
        **(
            {"components": {name: values[0] for name, values in outcome.components.items()}}
            if outcome.components
            else {}
        ),
    }


async def llama_factory(call: Call, data: Any) -> dict[str, Any]:
    """`{"model", "messages": [text]}` -> `{"scores": [reward]}`."""
    request = parse_as(ScoreEvaluationRequest, data)
    inputs = call.policy_texts(request.messages, "messages")
    outcome = await call.score(inputs, cut_to=request.max_length, deadline_ms=LLAMA_FACTORY_DEADLINE_MS)
    return {
        "id": f"scoreval-{new_request_id()}",
        "object": "score.evaluation",
        "model": request.model or outcome.model.name,
        "scores": outcome.rewards,
        "finished": [call.is_finished(item, outcome.model) for item in inputs],
        "truncated": outcome.truncated,
    }


async def classify_either(call: Call, data: Any) -> Any:
    """vLLM's or SGLang's form, as the body's fields say."""
    if classify_form(data) is SGLangClassifyRequest:
        return await sglang_classify(call, parse_as(SGLangClassifyRequest, data))
    return await vllm_classify(call, parse_as(VllmClassifyRequest, data))


async def vllm_classify(call: Call, request: VllmClassifyRequest) -> dict[str, Any]:
    """One probability, or one raw reward, an item."""
    outcome = await call.score(_vllm_inputs(request), cut_to=_cut_to(request))
    values = [logistic(reward) for reward in outcome.rewards] if request.is_squashed else outcome.rewards
    return _openai_list(
        "classify",
        request,
        outcome,
        [{"label": "LABEL_0", "probs": [value], "num_classes": 1} for value in values],
    )


async def embed(call: Call, data: Any) -> dict[str, Any]:
    """One embedding of one number, the raw reward, an item."""
    request = parse_as(VllmClassifyRequest, data)
    outcome = await call.score(_vllm_inputs(request), cut_to=_cut_to(request))
    as_base64 = request.encoding_format == "base64"  # what OpenAI's client asks for, float32 little-endian
    vectors = [base64.b64encode(struct.pack("<f", r)).decode() if as_base64 else [r] for r in outcome.rewards]
    return _openai_list(
        "embd",
        request,
        outcome,
        [{"object": "embedding", "embedding": vector} for vector in vectors],
    )


async def sglang_classify(call: Call, request: SGLangClassifyRequest) -> Any:
    """One object for one text or sequence, a list of them for a list."""
    value, path = (request.text, "text") if request.text is not None else (request.input_ids, "input_ids")
    inputs = list_inputs_of(value, path)
    outcome = await call.score(inputs)
    is_single = len(inputs) == 1 and inputs[0].path == path
    names = request.rid if isinstance(request.rid, list) else [request.rid] * len(inputs)
    if len(names) != len(inputs):
        raise InvalidRequestError(f"rid: {len(names)} names for {len(inputs)} items")
    answers = [
        {"embedding": [reward], "meta_info": {"id": name or new_request_id(), "truncated": truncated}}
        for reward, truncated, name in zip(outcome.rewards, outcome.truncated, names, strict=True)
    ]
    return answers[0] if is_single else answers


def logistic(value: float) -> float:
    """1 / (1 + e^-value), without overflow."""
    return 0.5 * (1.0 + math.tanh(0.5 * value))


def between_0_and_1(value: float) -> float:
    """The logistic function, never 0 or 1: OpenRLHF drops groups whose mean is either."""
    return min(max(logistic(value), 1e-6), 1.0 - 1e-6)


def _vllm_inputs(request: VllmClassifyRequest) -> list[ItemInput]:
    if request.messages is not None:
        return [ItemInput("messages", request.messages)]
    return list_inputs_of(request.input, "input")


def _cut_to(request: VllmClassifyRequest) -> int | None:
    """How many tokens the caller wants to keep; None where it said nothing."""
    wanted = request.truncate_prompt_tokens
    if wanted is None:
        return None
    return sys.maxsize if wanted == -1 else wanted


def _openai_list(
    kind: str, request: VllmClassifyRequest, outcome: Outcome, data: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "id": f"{kind}-{request.request_id or new_request_id()}",
        "object": "list",
        "created": int(time.time()),
        "model": request.model or outcome.model.name,
        "data": [
            {"index": i, **entry, "truncated": flag}
            for i, (entry, flag) in enumerate(zip(data, outcome.truncated, strict=True))
        ],
        "usage": {"prompt_tokens": outcome.num_tokens, "total_tokens": outcome.num_tokens, "completion_tokens": 0},
    }
