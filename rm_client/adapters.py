"""Reward functions with the signatures that policy trainers call. None of the trainers is imported.

Invariant: an item without a reward is ``None`` where the trainer takes that (TRL, ms-swift), and an exception where it
does not (verl, OpenRLHF); it is never 0, and a failure of the whole request is always an exception.

| trainer | what to give it |
|---|---|
| TRL, ``reward_funcs`` | rm_client.trl.trl_reward_function |
| verl, ``reward.custom_reward_function`` | ``path: pkg://rm_client.adapters``, ``name: verl_compute_score``,
  ``reward_kwargs: {url: http://...}`` |
| verl, batch manager | the same with ``name=verl_compute_score_batch`` |
| ms-swift, plugin file | ``orms["betterthan"] = functools.partial(MsSwiftReward, "http://...")`` |
| OpenRLHF, ``--reward.remote_url file.py`` | in the file: ``reward_func = OpenRLHFReward("http://...")`` |
| an own loop | ``score = AsyncRewardFunction("http://...")``; ``await score(prompts, completions)`` |
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rm_client.answers import Row, ServerInfo
from rm_client.batches import answer_start, group_by_prompt
from rm_client.calls import Completion, Text
from rm_client.lazy import LazyClient

_shared: dict[tuple[Any, ...], LazyClient] = {}


class AsyncRewardFunction:
    """``await f(prompts, completions)`` -> N rewards, None where an item failed. Picklable.

    ``client``: arguments of AsyncRewardClient (``api_key``, ``reward_id``, ``timeout``, ...).
    """

    def __init__(self, url: str, **client: Any) -> None:
        self._client = LazyClient(url, client)

    async def __call__(
        self, prompts: Sequence[Text], completions: Sequence[Completion], references: Sequence[Any] | None = None
    ) -> Row:
        batch = group_by_prompt(prompts, completions, references=references)
        return batch.flat((await self._client.asynchronous().score_groups(batch.groups, on_error="none")).rewards)


async def verl_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    url: str,
    api_key: str | None = None,
    reward_id: str | None = None,
    prompt_key: str = "question",
    chat: bool = True,
    send_reference: bool = False,
    reward_router_address: Any = None,
    reward_model_tokenizer: Any = None,
) -> dict[str, float]:
    """verl's ``compute_score`` (reward loop): one item a call, many calls at once on one event loop.

    verl hands over the answer without its prompt, so the prompt must be a column of ``extra_info``: ``prompt_key``
    names it (text, or messages). ``chat``: a text is one user message, as verl's own preprocessing makes it; False:
    prompt and answer are raw text. ``send_reference``: pass ``ground_truth`` on to the server's verifiers.
    ``reward_router_address`` and ``reward_model_tokenizer`` are verl's own and not used.
    Returns ``{"score": reward}``. Raises for an item without a reward; note that verl's rate-limited manager turns
    any exception into a reward of 0.0, and its naive manager does not.
    """
    group = _verl_group(solution_str, ground_truth, extra_info, prompt_key, chat, send_reference)
    result = await _client(url, api_key, reward_id).asynchronous().score_groups([group])
    return {"score": _certain(result.rewards[0][0])}


def verl_compute_score_batch(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any]],
    *,
    url: str,
    api_key: str | None = None,
    reward_id: str | None = None,
    prompt_key: str = "question",
    chat: bool = True,
    send_reference: bool = False,
) -> list[dict[str, float]]:
    """verl's batch reward manager: the whole batch in one request. Arguments as verl_compute_score."""
    columns = zip(solution_strs, ground_truths, extra_infos, strict=True)
    groups = [_verl_group(text, truth, extra, prompt_key, chat, send_reference) for text, truth, extra in columns]
    batch = group_by_prompt(
        [group["prompt"] for group in groups],
        [group["completions"][0] for group in groups],
        references=[group.get("reference") for group in groups],
    )
    result = _client(url, api_key, reward_id).blocking().score_groups(batch.groups)
    return [{"score": _certain(reward)} for reward in batch.flat(result.rewards)]


class MsSwiftReward:
    """An ms-swift ``ORM``: ``f(completions, messages=..., **columns)`` -> N rewards, None where an item failed.

    ms-swift makes it as ``orms[name](args=args)``, so register ``functools.partial(MsSwiftReward, url)``. The prompt
    is ``messages`` without the last one, which holds the completion; ``is_truncated`` marks unfinished answers;
    ``reference_column`` names the column for the server's verifiers.
    """

    def __init__(self, url: str, args: Any = None, *, reference_column: str | None = None, **client: Any) -> None:
        self.args = args
        self._reference_column = reference_column
        self._client = LazyClient(url, client)

    def __call__(self, completions: Sequence[str], **columns: Any) -> Row:
        if "messages" not in columns:
            raise ValueError("ms-swift handed over no 'messages' column, so the prompts of the completions are unknown")
        cut = columns.get("is_truncated")
        batch = group_by_prompt(
            [conversation[:-1] for conversation in columns["messages"]],
            completions,
            references=None if self._reference_column is None else column(columns, self._reference_column),
            finished=None if cut is None else [not value for value in cut],
        )
        return batch.flat(self._client.blocking().score_groups(batch.groups, on_error="none").rewards)


class OpenRLHFReward:
    """OpenRLHF's custom reward function: ``f(queries, prompts, labels)`` -> rewards, scores and extra_logs.

    ``queries`` are whole templated texts with their special tokens in them, and are scored as such (one that does not
    stop at an end token as unfinished), like the server's own ``/get_reward``. ``rewards`` are the raw logits;
    ``scores`` lie in (0, 1), as OpenRLHF's filter of groups wants them: the logistic function of the reward,
    standardised with the mean and spread that `/info` states; of a server with verifiers only, the reward itself, held
    between 0 and 1. All are float32 tensors [N].
    ``send_label``: pass ``labels`` on to the server's verifiers. Verifiers read the answer without its prompt.
    """

    def __init__(self, url: str, *, send_label: bool = False, **client: Any) -> None:
        self._client = LazyClient(url, client)
        self._send_label = send_label
        self._info: ServerInfo | None = None

    def __call__(
        self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any], **_: Any
    ) -> dict[str, Any]:
        import torch

        client = self._client.blocking()
        if self._info is None:
            self._info = client.info()
        row: Row
        if self._send_label or _has_verifiers(self._info):
            references = labels if self._send_label else None
            batch = group_by_prompt(*_split_queries(queries, prompts), references=references)
            groups = client.score_groups(batch.groups, text_as="templated")
            row = batch.flat(groups.rewards)
            truncated = None if groups.truncated is None else batch.flat(groups.truncated)
        else:
            result = client.score_texts(queries, text_as="templated")
            row, truncated = result.rewards, result.truncated
        rewards = [_certain(reward) for reward in row]
        return {
            "rewards": torch.tensor(rewards, dtype=torch.float32),
            "scores": torch.tensor([_score(reward, self._info) for reward in rewards], dtype=torch.float32),
            "extra_logs": {
                "rm_reward": torch.tensor(rewards, dtype=torch.float32),
                "rm_truncated": torch.tensor(truncated or [False] * len(rewards), dtype=torch.float32),
            },
        }


def column(columns: Mapping[str, Any], name: str) -> Sequence[Any]:
    """A data set column by name; ValueError that lists what there is where it is missing."""
    if name not in columns:
        there = ", ".join(sorted(columns)) or "none"
        raise ValueError(f"reference_column {name!r}: the trainer handed over no such column; there are: {there}")
    values: Sequence[Any] = columns[name]
    return values


def _client(url: str, api_key: str | None, reward_id: str | None) -> LazyClient:
    """One client per server for all calls of this process."""
    key = (url, api_key, reward_id)
    return _shared.setdefault(key, LazyClient(url, {"api_key": api_key, "reward_id": reward_id}))


def _verl_group(
    solution: str, truth: Any, extra: Mapping[str, Any] | None, prompt_key: str, chat: bool, send_reference: bool
) -> dict[str, Any]:
    prompt = (extra or {}).get(prompt_key)
    if prompt is None:
        there = ", ".join(sorted(extra or {})) or "none"
        raise ValueError(
            f"extra_info has no {prompt_key!r} (it has: {there}), and verl hands the prompt over in no other place: "
            "write the prompt there when the data set is made, or name its key with reward_kwargs.prompt_key"
        )
    if not isinstance(prompt, str):
        prompt = list(prompt)
    elif chat:
        prompt = [{"role": "user", "content": prompt}]
    group = {"prompt": prompt, "completions": [solution]}
    return {**group, "reference": truth} if send_reference else group


def _split_queries(queries: Sequence[str], prompts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Each query as what stands up to the end of its prompt (a BOS may be in front of it), and the answer."""
    before, answers = [], []
    for i, (query, prompt) in enumerate(zip(queries, prompts, strict=True)):
        at = answer_start(query, prompt) if prompt else None
        if at is None:
            raise ValueError(f"queries[{i}] does not hold prompts[{i}], so its answer cannot be told from its prompt")
        before.append(query[:at])
        answers.append(query[at:])
    return before, answers


def _has_verifiers(info: ServerInfo) -> bool:
    """Whether the server's reward has a part that reads the answer's text."""
    parts = (info.raw.get("recipe") or {}).get("parts", {})
    return any(part.get("kind") != "model" for part in parts.values())


def _score(reward: float, info: ServerInfo) -> float:
    """The reward for OpenRLHF's filter, which drops a group whose mean score is 0 or 1."""
    if info.raw.get("recipe") is not None and info.raw.get("model_reward_id") is None:
        return min(max(reward, 0.0), 1.0)  # verifiers: 0 is failed, 1 is passed, and a filter must see them as such
    standardised = (reward - (info.reward_mean or 0.0)) / (info.reward_std or 1.0)
    return min(max(0.5 * (1.0 + math.tanh(0.5 * standardised)), 1e-6), 1 - 1e-6)  # however extreme the reward


def _certain(reward: float | None) -> float:
    assert reward is not None  # this is a bug: on_error="raise" leaves no hole
    return reward
