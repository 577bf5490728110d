"""Reward functions for TRL's ``reward_funcs`` (GRPOTrainer, RLOOTrainer, and the asynchronous GRPO trainer).

Invariant: one finite float or None per completion, in TRL's order; a failed item is None (TRL leaves it out of its
group), and a request that failed as a whole is an exception, for training on nothing must not look like training.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

from rm_client.adapters import column
from rm_client.answers import GroupsResult, Row
from rm_client.batches import Batch, group_by_prompt
from rm_client.calls import Completion, Text
from rm_client.lazy import LazyClient


class TRLRewardFunction:
    """See trl_reward_function."""

    def __init__(
        self,
        url: str,
        *,
        name: str,
        reference_column: str | None,
        eos_token_ids: Sequence[int] | None,
        options: dict[str, Any],
        client: dict[str, Any],
    ) -> None:
        self.__name__ = name  # TRL logs the reward under this name
        self._reference_column = reference_column
        self._eos = None if eos_token_ids is None else frozenset(eos_token_ids)
        self._options = options
        self._client = LazyClient(url, client)

    def __call__(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Any,
    ) -> Row:
        """N prompts and N completions (texts or messages) -> N rewards. One request for the whole batch."""
        batch = self._batch(prompts, completions, completion_ids, columns)
        return self._rewards(batch, self._client.blocking().score_groups(batch.groups, **self._options), columns)

    def _batch(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]] | None,
        columns: dict[str, Any],
    ) -> Batch:
        finished = None
        if self._eos is not None and completion_ids is not None:
            finished = [len(ids) > 0 and int(ids[-1]) in self._eos for ids in completion_ids]
        references = None if self._reference_column is None else column(columns, self._reference_column)
        return group_by_prompt(prompts, completions, references=references, finished=finished)

    def _rewards(self, batch: Batch, result: GroupsResult, columns: dict[str, Any]) -> Row:
        rewards = batch.flat(result.rewards)
        log_metric: Callable[[str, float], None] | None = columns.get("log_metric")
        if log_metric is not None and rewards:
            # At every call, also when nothing failed: a metric that only some processes have is averaged wrongly.
            log_metric(f"{self.__name__}/failed", sum(reward is None for reward in rewards) / len(rewards))
        return rewards


class AsyncTRLRewardFunction(TRLRewardFunction):
    """See trl_reward_function."""

    async def __call__(  # type: ignore[override]  # TRL tells the two apart by iscoroutinefunction(f.__call__)
        self,
        prompts: Sequence[Text],
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Any,
    ) -> Row:
        """As TRLRewardFunction, awaited."""
        batch = self._batch(prompts, completions, completion_ids, columns)
        result = await self._client.asynchronous().score_groups(batch.groups, **self._options)
        return self._rewards(batch, result, columns)


@overload
def trl_reward_function(url: str, *, asynchronous: Literal[False] = False, **rest: Any) -> TRLRewardFunction: ...
@overload
def trl_reward_function(url: str, *, asynchronous: Literal[True], **rest: Any) -> AsyncTRLRewardFunction: ...
def trl_reward_function(
    url: str,
    *,
    api_key: str | None = None,
    reward_id: str | None = None,
    asynchronous: bool = False,
    name: str = "reward_model",
    reference_column: str | None = None,
    eos_token_ids: Sequence[int] | None = None,
    text_as: Literal["raw", "chat", "templated"] | None = None,
    truncation: Literal["error", "left"] | None = None,
    **client: Any,
) -> TRLRewardFunction | AsyncTRLRewardFunction:
    """A reward function that scores on the server at ``url``: ``GRPOTrainer(reward_funcs=trl_reward_function(url))``.

    ``reward_id``: pin, so that a run stops when the reward model is exchanged under it. ``asynchronous``: return an
    ``async def`` callable, which TRL runs together with the other asynchronous rewards. ``name``: under which TRL logs
    it. ``reference_column``: the data set column that goes to the server's verifiers as ``reference``.
    ``eos_token_ids``: with them, a completion whose ids do not end in one is scored as unfinished (cut by its length
    limit) instead of as if it had ended there. ``client``: more arguments of RewardClient (``timeout``, ...).

    The result can be pickled; connections are opened when it is first called in a process, and reused.
    """
    kind = AsyncTRLRewardFunction if asynchronous else TRLRewardFunction
    options = {"on_error": "none", "text_as": text_as, "truncation": truncation}
    return kind(
        url,
        name=name,
        reference_column=reference_column,
        eos_token_ids=eos_token_ids,
        options=options,
        client={"api_key": api_key, "reward_id": reward_id, **client},
    )
