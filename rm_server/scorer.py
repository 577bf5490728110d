"""Tensors: score a batch on the worker thread, whatever happens there. The only file that runs the model.

Invariant: every sequence that goes in comes out with a finite reward or an error of its own, in order; an exception,
running out of memory, or a NaN costs nobody but the sequence that causes it. The charges of a batch add up to the
tokens that its successful forwards computed. Where not even one token can be scored, the batch fails soon.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rm_server.errors import InternalError, NonFiniteRewardError, OverloadedError, ServerError, describe_exception
from rm_server.groups import TOKEN_BYTES, SpreadReward, ids_of
from rm_server.planner import BatchCost, Counting

if TYPE_CHECKING:
    from rm_core.chat import Renderer
    from rm_core.checkpoint import CheckpointRecord
    from rm_core.passes import Scored
    from rm_core.prefix_cache import PrefixCache

RECOVERY_FORWARDS = 16
"""Forwards that must succeed under lowered limits before they are doubled again."""
SMALLEST_PIECE = 64
"""A sequence that does not fit memory is tried in pieces down to this many tokens."""
SMALLEST_CACHE = 1 << 20
"""Running out of memory lowers the cache's budget to this many bytes at most."""
SMALLEST_LIMIT = 512
"""A batch that does not fit memory lowers the token limit no further: what it saved would be little, and recovery would
take hundreds of forwards."""
MAX_FAILED_ALONE = 8
"""So many sequences fail alone, and none succeeds, before one token is tried to see whether anything works at all."""

_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "std::bad_alloc",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)


class Scorer(Protocol):
    """What computes rewards: ``rm_core.model.RewardModel``, or a test's fake."""

    def score_batch(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        max_tokens: int | None = None,
        cache: "PrefixCache | None" = None,
        read_from: Sequence[int | None] | None = None,
    ) -> "Scored":
        """Rewards of N sequences in forward passes of at most ``max_tokens`` tokens, and what each of them cost."""


class ServedModel(Scorer, Protocol):
    """What the server needs to know of a model beside its scores."""

    def leave_device(self) -> int:
        """Give the device's memory back; returns the bytes freed. It scores nothing until ``return_to_device``."""

    def return_to_device(self) -> None:
        """Be ready to score again."""

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
    def num_heads(self) -> int: ...
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
    def token_rewards_off(self) -> str | None: ...
    @property
    def renderer(self) -> "Renderer": ...
    @property
    def record(self) -> "CheckpointRecord | None": ...


@dataclass
class ScoredBatch:
    """``outcomes``: one reward or error for each sequence; the rest is what the forwards took."""

    outcomes: list[float | ServerError] = field(default_factory=list)
    charges: list[int] = field(default_factory=list)
    """Tokens computed for each sequence; what several share is divided among them."""
    cached_tokens: int = 0
    """Tokens that were not computed, because the prefix cache held them."""
    num_evicted: int = 0
    """Beginnings that the cache dropped to make room."""
    num_forwards: int = 0
    num_failures: int = 0
    num_out_of_memory: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    """For the log: type and place of each exception, and how often it came."""
    token_rewards: dict[bytes, np.ndarray] = field(default_factory=dict)
    """fp32 [n] at the last n tokens of a sequence, of those for which they were wanted."""

    @property
    def computed_tokens(self) -> int:
        """Sum of the charges."""
        return sum(self.charges)


class BatchScorer:
    """Scores batches on one model, with a prefix cache of its own. ``score`` belongs to one thread; the limits and
    counts may be read from others, and ``known_length`` while no ``score`` is running.

    ``counting`` says what the model shares: ``shared`` a token tree, ``padded`` nothing but equal sequences, ``alone``
    likewise, with every sequence in a forward of its own under a fixed budget, so that its reward is the same to the
    last bit whatever comes with it. ``conservative`` K: of a model with several heads, mean - K * std is the reward.
    """

    def __init__(
        self,
        model: Scorer,
        max_batch_tokens: int,
        counting: Counting,
        clock: Callable[[], float],
        cache_bytes: int = 0,
        conservative: float = 0.0,
    ) -> None:
        self.model = model
        self.token_limit = max_batch_tokens
        self.cache = _new_cache(cache_bytes) if cache_bytes and counting == "shared" else None
        self._max_batch_tokens = max_batch_tokens
        self._cache_bytes = cache_bytes
        self._conservative = conservative
        self._counting: Counting = counting
        self._clock = clock
        self._good_forwards = 0
        self._uses_cache = False
        self._read_from: Mapping[bytes, int] = {}
        self._num_failed_alone = 0
        """Sequences of this batch whose own forward failed."""
        self._has_succeeded = False
        """A forward of this batch has."""
        self._is_broken = False
        """No forward succeeds, whatever is in it: what is left of this batch fails without one."""

    def known_length(self, key: bytes) -> int:
        """Tokens at the beginning of a sequence that would come from the cache."""
        return self.cache.known_length(tuple(ids_of(key))) if self.cache is not None else 0

    def score(self, keys: Sequence[bytes], read_from: Mapping[bytes, int] | None = None) -> ScoredBatch:
        """Score the sequences of a planned batch; equal ones are computed once, and share the cost.

        ``read_from``: of some sequences, the place from which on the reward is wanted at every token.
        """
        scored = ScoredBatch()
        self._read_from = read_from or {}
        start = self._clock()
        fan_out = Counter(keys)
        unique = list(fan_out)
        self._uses_cache = self.cache is not None
        self._num_failed_alone, self._has_succeeded, self._is_broken = 0, False, False
        evicted_before = self.cache.num_evicted if self.cache is not None else 0
        costs: dict[bytes, float] = {}
        if self._counting == "alone":
            outcomes = [outcome for key in unique for outcome in self._score([key], scored, costs)]
        else:
            outcomes = self._score(unique, scored, costs)
        by_key = dict(zip(unique, outcomes, strict=True))
        scored.outcomes = [by_key[key] for key in keys]
        scored.charges = _whole_numbers([costs.get(key, 0.0) / fan_out[key] for key in keys])
        if self.cache is not None:
            scored.num_evicted = self.cache.num_evicted - evicted_before
        scored.problems = [f"{text} ({n} times)" if n > 1 else text for text, n in Counter(scored.problems).items()]
        scored.seconds = self._clock() - start
        return scored

    def release(self) -> None:
        """Let go of what is kept between batches. Only while no ``score`` is running."""
        if self.cache is not None:
            self.cache.clear()
        free_cached_memory()

    def _forward(self, keys: list[bytes], scored: ScoredBatch, costs: dict[bytes, float], limit: int) -> list[float]:
        scored.num_forwards += 1
        done = self._run(keys, limit, scored)
        rewards = np.asarray(done.rewards, dtype=np.float32)
        if rewards.shape != (len(keys),):
            raise ValueError(f"the model gave rewards of shape {rewards.shape} for {len(keys)} sequences")
        for key, computed in zip(keys, map(float, done.computed_tokens), strict=True):
            costs[key] = costs.get(key, 0.0) + computed
        scored.cached_tokens += done.cached_tokens
        self._has_succeeded = True
        if done.heads is None:
            return list(map(float, rewards))
        std = done.heads.std(axis=1)
        spread = zip(rewards - self._conservative * std, rewards, std, done.heads.min(axis=1), strict=True)
        return [SpreadReward(*map(float, values)) for values in spread]

    def _run(self, keys: list[bytes], limit: int, scored: ScoredBatch) -> "Scored":
        sequences = [ids_of(key) for key in keys]
        read_from = [self._read_from.get(key) for key in keys]
        cache = self.cache if self._uses_cache else None
        if all(place is None for place in read_from):
            return self.model.score_batch(sequences, max_tokens=limit, cache=cache)
        done = self.model.score_batch(sequences, max_tokens=limit, cache=cache, read_from=read_from)
        for key, read in zip(keys, done.token_rewards or (), strict=True):
            if read is not None:
                scored.token_rewards[key] = read
        if self._counting != "alone":
            return done
        # Reading more rows may change the last bit of the reward, which must be the same whatever is asked beside it.
        alone = self.model.score_batch(sequences, max_tokens=limit)
        for key, reward in zip(keys, alone.rewards, strict=True):
            scored.token_rewards[key] = np.append(scored.token_rewards[key][:-1], reward)
        return replace(alone, computed_tokens=alone.computed_tokens + done.computed_tokens)

    def _score(
        self, keys: list[bytes], scored: ScoredBatch, costs: dict[bytes, float], *, is_retry: bool = False
    ) -> list[float | ServerError]:
        # Alone, a long sequence is cut by a fixed budget: where it is cut must not depend on what happened before.
        limit = self._max_batch_tokens if self._counting == "alone" else self.token_limit
        if self._is_broken:
            return [_failed()] * len(keys)
        problem = None
        try:
            rewards = self._forward(keys, scored, costs, limit)
        except Exception as error:  # whatever a model raises must reach the waiters as an outcome
            problem = describe_exception(error)
            out_of_memory = is_out_of_memory(error)
        if problem is None:
            self._recover()
            return self._checked(keys, rewards, scored, costs)
        # Past the handler, so that the exception no longer keeps the failed forward's tensors alive.
        scored.problems.append(problem)
        if out_of_memory:
            return self._score_in_less_memory(keys, scored, costs)
        scored.num_failures += 1
        if len(keys) > 1:
            half = len(keys) // 2
            parts = (keys[:half], keys[half:])
            return [outcome for part in parts for outcome in self._score(part, scored, costs, is_retry=True)]
        if not is_retry:
            return self._score(keys, scored, costs, is_retry=True)
        self._num_failed_alone += 1
        if self._num_failed_alone == MAX_FAILED_ALONE and not self._has_succeeded:
            self._is_broken = not self._works()
        return [_failed()]

    def _checked(
        self, keys: list[bytes], rewards: list[float], scored: ScoredBatch, costs: dict[bytes, float]
    ) -> list[float | ServerError]:
        """The outcomes of a forward. What is not finite is computed again, alone and without the cache: where a key is
        masked by a weight of 0, its NaN reaches all the same (0 · NaN) whoever is beside it, and through the cache
        whoever comes later."""
        outcomes = [_outcome(reward) for reward in rewards]
        suspects = [place for place, reward in enumerate(rewards) if not np.isfinite(reward)]
        if len(keys) == 1 and not self._uses_cache:
            return outcomes
        uses_cache, self._uses_cache = self._uses_cache, False
        num_healed = 0
        for tried, place in enumerate(suspects):
            if tried == MAX_FAILED_ALONE and not num_healed and not self._works():
                break
            outcomes[place] = self._score([keys[place]], scored, costs)[0]
            num_healed += isinstance(outcomes[place], float)
        self._uses_cache = uses_cache
        if num_healed:
            scored.num_failures += 1
            scored.problems.append(f"{num_healed} of {len(suspects)} rewards that were not finite are finite alone")
            if self.cache is not None:
                self.cache.clear()
        return outcomes

    def _works(self) -> bool:
        """Whether the model still gives a reward for anything at all."""
        try:
            return bool(np.isfinite(self.model.score_batch([(0,)]).rewards).all())
        except Exception:  # its kind was noted for the sequences that failed
            return False

    def _score_in_less_memory(
        self, keys: list[bytes], scored: ScoredBatch, costs: dict[bytes, float]
    ) -> list[float | ServerError]:
        scored.num_out_of_memory += 1
        self._good_forwards = 0
        if self._give_up_cache():
            return self._score(keys, scored, costs, is_retry=True)
        free_cached_memory()
        if len(keys) == 1:
            return [self._score_in_pieces(keys[0], scored, costs)]
        cost = BatchCost(self._counting)
        for key in keys:
            cost.add(key, cost.with_key(key))
        if cost.tokens <= self.token_limit:  # a larger one was cut before the limit was lowered
            self.token_limit = min(self.token_limit, max(cost.tokens // 2, SMALLEST_LIMIT))
        outcomes: list[float | ServerError] = []
        for part in self._parts(keys, self.token_limit):
            outcomes += self._score(part, scored, costs, is_retry=True)
        return outcomes

    def _give_up_cache(self) -> bool:
        """Free the cache's memory for the rest of the batch, and halve its budget. False where it held nothing."""
        if self.cache is None or not self._uses_cache or self.cache.num_bytes == 0:
            return False
        self._uses_cache = False
        self.cache.clear()
        self.cache.max_bytes = max(self.cache.max_bytes // 2, min(SMALLEST_CACHE, self._cache_bytes))
        free_cached_memory()
        return True

    def _score_in_pieces(self, key: bytes, scored: ScoredBatch, costs: dict[bytes, float]) -> float | ServerError:
        """A sequence that did not fit memory: the token limit is lowered to the pieces that do, if any do."""
        num_tokens = len(key) // TOKEN_BYTES
        limit = min(self.token_limit, num_tokens) // 2
        while self._counting == "shared" and limit >= SMALLEST_PIECE:
            try:
                reward = self._forward([key], scored, costs, limit)[0]
            except Exception as error:  # as in _score
                scored.problems.append(describe_exception(error))
                if not is_out_of_memory(error):
                    scored.num_failures += 1
                    return _failed()
            else:
                self.token_limit = limit
                return _outcome(reward)
            scored.num_out_of_memory += 1
            free_cached_memory()
            limit //= 2
        return OverloadedError(f"not enough memory for this item of {num_tokens} tokens at the moment", 5)

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
        cache_is_whole = self.cache is None or self.cache.max_bytes >= self._cache_bytes
        if self.token_limit >= self._max_batch_tokens and cache_is_whole:
            return
        self._good_forwards += 1
        if self._good_forwards >= RECOVERY_FORWARDS:
            self._good_forwards = 0
            self.token_limit = min(self.token_limit * 2, self._max_batch_tokens)
            if self.cache is not None:
                self.cache.max_bytes = min(self.cache.max_bytes * 2, self._cache_bytes)


def _new_cache(num_bytes: int) -> "PrefixCache":
    from rm_core.prefix_cache import PrefixCache

    return PrefixCache(num_bytes)


def _whole_numbers(parts: Sequence[float]) -> list[int]:
    """Each part rounded up or down, so that every running total is rounded to the nearest."""
    totals = np.rint(np.cumsum(np.asarray(parts, dtype=np.float64))).astype(np.int64)
    return [int(number) for number in np.diff(totals, prepend=0)]


def _failed() -> InternalError:
    return InternalError("the model failed on this item; the server's log says where")


def _outcome(reward: float) -> float | ServerError:
    if np.isfinite(reward):
        return reward
    return NonFiniteRewardError(f"the model gave {'NaN' if np.isnan(reward) else 'infinity'} for this item")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on the CPU or on a device."""
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY)


def free_cached_memory() -> None:
    """Give cached device memory back, if torch is in use at all."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
