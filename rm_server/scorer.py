"""Tensors: score a batch on the worker thread, whatever happens there. The only file that runs the model.

Invariant: every sequence that goes in comes out with a finite reward or an error of its own, in order; an exception,
running out of memory, or a NaN costs nobody but the sequence that causes it.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rm_server.errors import InternalError, NonFiniteRewardError, OverloadedError, ServerError, describe_exception
from rm_server.groups import ids_of
from rm_server.planner import BatchCost, Counting

if TYPE_CHECKING:
    from rm_core.chat import Renderer
    from rm_core.checkpoint import CheckpointRecord

RECOVERY_FORWARDS = 16
"""Forwards that must succeed under a lowered token limit before it is doubled again."""


class Scorer(Protocol):
    """What computes rewards: ``rm_core.model.RewardModel``, or a test's fake."""

    def score_ids(self, sequences: Sequence[Sequence[int]]) -> np.ndarray:
        """Rewards, float32 [N], of N sequences in one forward."""


class ServedModel(Scorer, Protocol):
    """What the server needs to know of a model beside its scores."""

    @property
    def name(self) -> str: ...
    @property
    def reward_id(self) -> str: ...
    @property
    def tokenizer_hash(self) -> str: ...
    @property
    def max_length(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def dtype_reason(self) -> str: ...
    @property
    def device(self) -> Any: ...
    @property
    def shares_prefixes(self) -> bool: ...
    @property
    def sharing_off(self) -> str | None: ...
    @property
    def renderer(self) -> "Renderer": ...
    @property
    def record(self) -> "CheckpointRecord | None": ...


@dataclass
class ScoredBatch:
    """``outcomes``: one reward or error for each sequence; the rest is what the forwards took."""

    outcomes: list[float | ServerError] = field(default_factory=list)
    num_forwards: int = 0
    num_failures: int = 0
    num_out_of_memory: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    """For the log: type and place of each exception."""


class BatchScorer:
    """Scores batches on one model. Owned by one thread; ``token_limit`` may be read from others."""

    def __init__(self, model: Scorer, max_batch_tokens: int, counting: Counting, clock: Callable[[], float]) -> None:
        self.model = model
        self.token_limit = max_batch_tokens
        self._max_batch_tokens = max_batch_tokens
        self._counting: Counting = counting
        self._clock = clock
        self._good_forwards = 0

    def score(self, keys: Sequence[bytes]) -> ScoredBatch:
        """Score the sequences of a planned batch; equal ones are computed once."""
        scored = ScoredBatch()
        start = self._clock()
        unique = list(dict.fromkeys(keys))
        by_key = dict(zip(unique, self._score(unique, scored, is_retry=False), strict=True))
        scored.outcomes = [by_key[key] for key in keys]
        scored.seconds = self._clock() - start
        return scored

    def _score(self, keys: list[bytes], scored: ScoredBatch, *, is_retry: bool) -> list[float | ServerError]:
        problem = None
        try:
            scored.num_forwards += 1
            rewards = np.asarray(self.model.score_ids([ids_of(key) for key in keys]), dtype=np.float32)
            if rewards.shape != (len(keys),):
                raise ValueError(f"the model gave rewards of shape {rewards.shape} for {len(keys)} sequences")
        except Exception as error:  # whatever a model raises must reach the waiters as an outcome
            problem = describe_exception(error)
            out_of_memory = is_out_of_memory(error)
        if problem is None:
            self._recover()
            return [_outcome(float(reward)) for reward in rewards]
        # Past the handler, so that the exception no longer keeps the failed forward's tensors alive.
        scored.problems.append(problem)
        if out_of_memory:
            return self._score_in_less_memory(keys, scored)
        scored.num_failures += 1
        if len(keys) > 1:
            half = len(keys) // 2
            parts = (keys[:half], keys[half:])
            return [outcome for part in parts for outcome in self._score(part, scored, is_retry=True)]
        if not is_retry:
            return self._score(keys, scored, is_retry=True)
        return [InternalError("the model failed on this item; the server's log says where")]

    def _score_in_less_memory(self, keys: list[bytes], scored: ScoredBatch) -> list[float | ServerError]:
        scored.num_out_of_memory += 1
        free_cached_memory()
        self._good_forwards = 0
        if len(keys) == 1:
            return [
                OverloadedError(f"not enough memory for this item of {len(ids_of(keys[0]))} tokens at the moment", 5)
            ]
        cost = BatchCost(self._counting)
        for key in keys:
            cost.add(key, cost.with_key(key))
        if cost.tokens <= self.token_limit:  # a larger one was cut before the limit was lowered
            self.token_limit = max(cost.tokens // 2, 1)
        outcomes: list[float | ServerError] = []
        for part in self._parts(keys, self.token_limit):
            outcomes += self._score(part, scored, is_retry=True)
        return outcomes

    def _parts(self, keys: list[bytes], limit: int) -> list[list[bytes]]:
        """Cut into runs that cost at most ``limit`` each, and into two at least."""
        parts: list[list[bytes]] = [[]]
        cost = BatchCost(self._counting)
        for key in keys:
            total = cost.with_key(key)
            if parts[-1] and (total > limit or len(parts[-1]) >= (len(keys) + 1) // 2):
                parts.append([])
                cost = BatchCost(self._counting)
                total = cost.with_key(key)
            cost.add(key, total)
            parts[-1].append(key)
        return parts

    def _recover(self) -> None:
        if self.token_limit >= self._max_batch_tokens:
            return
        self._good_forwards += 1
        if self._good_forwards >= RECOVERY_FORWARDS:
            self._good_forwards = 0
            self.token_limit = min(self.token_limit * 2, self._max_batch_tokens)


def _outcome(reward: float) -> float | ServerError:
    if np.isfinite(reward):
        return reward
    return NonFiniteRewardError(f"the model gave {'NaN' if np.isnan(reward) else 'infinity'} for this item")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on the CPU or on a device."""
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        words in text for words in ("out of memory", "can't allocate memory", "cannot allocate memory")
    )


def free_cached_memory() -> None:
    """Give cached device memory back, if torch is in use at all."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
