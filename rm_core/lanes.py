"""Score a batch in lanes: several forward passes at once, each on cores of its own, instead of one on all of them.

Threads that work on one product wait for each other after each of a layer's dozen steps, and whatever takes a core from
one of them (a tokenizer, the event loop, a neighbour) stops all. Lanes wait once, at the end of the batch.

Invariant: what shares a prefix stays together, so lanes compute the same tokens as one pass, and the token budget is
divided among them, so they hold no more memory. A large group's common beginning is computed first, by all threads, and
known to every lane; what of it is not a multiple of MIN_SHARED tokens each answer computes for itself.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np
import torch

from rm_core import kernels
from rm_core.network import RewardNetwork
from rm_core.passes import Scored, score_in_passes, units_of
from rm_core.prefix_cache import Key, PrefixCache, usable_length
from rm_core.tree import shared_length

TOKENS_OF_LANE = 2048
"""A lane gets at least this much of the budget: smaller passes read the weights too often."""
_TOGETHER = 0.85
"""What all threads in one pass do of what they do in lanes, beside a server's other threads (alone, nearly as much)."""
TOKENS_TO_SPLIT = 2048
"""A group whose answers are less is not worth a pass for its beginning alone."""
_AGAIN = 0.1
"""Nor is one in which this share would be computed again: lanes gain little more."""


class Lanes:
    """Threads that each score with their own share of the caller's. Their number follows from the token budget."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._shape = (0, 0)

    def score(
        self,
        network: RewardNetwork,
        sequences: Sequence[Sequence[int]],
        max_tokens: int,
        cache: PrefixCache | None,
    ) -> Scored:
        """As ``score_in_passes``, under whose conditions it is called."""
        num_lanes = min(torch.get_num_threads(), max_tokens // TOKENS_OF_LANE)
        if num_lanes < 2:
            return score_in_passes(network, sequences, max_tokens, cache)
        units = units_of(sequences, cache)
        lanes, together = divide([tokens for _, tokens in units], num_lanes, max_tokens // num_lanes)
        begun = [
            (units[number][0], ids) for number in together if (ids := _beginning(sequences, *units[number], cache))
        ]
        first = None
        if begun:
            own = PrefixCache(2**62) if cache is None else None
            cache = cache if own is None else own
            first = score_in_passes(network, [ids for _, ids in begun], max_tokens, cache)
            if own is not None:
                own.max_bytes = 0  # it holds the beginnings, and none of the answers' keys and values
            units = units_of(sequences, cache)
            lanes, together = divide([tokens for _, tokens in units], num_lanes, max_tokens // num_lanes)
        if any(lanes):
            scored = self._score(network, sequences, max_tokens, cache, units, lanes, together)
        else:
            scored = score_in_passes(network, sequences, max_tokens, cache)
        return scored if first is None else _with_beginnings(scored, begun, first, sequences)

    def _score(
        self,
        network: RewardNetwork,
        sequences: Sequence[Sequence[int]],
        max_tokens: int,
        cache: PrefixCache | None,
        units: Sequence[tuple[list[int], int]],
        lanes: Sequence[Sequence[int]],
        together: Sequence[int],
    ) -> Scored:
        budget = max_tokens // len(lanes)

        def members(numbers: Sequence[int]) -> list[int]:
            return [index for number in numbers for index in units[number][0]]

        def run(indices: list[int], budget: int) -> Scored:
            with torch.inference_mode():  # it is a thread's own
                return score_in_passes(network, [sequences[index] for index in indices], budget, cache)

        parts = [members(lane) for lane in lanes if lane]
        pool = self._threads(len(lanes))
        running = [pool.submit(run, part, budget) for part in parts]
        wait(running)  # all of them, also where one fails: nothing goes on behind the caller's back
        results = _results(running)
        if together:
            parts.append(members(together))
            results.append(run(parts[-1], max_tokens))
        return _merged(parts, results, len(sequences))

    def _threads(self, num_lanes: int) -> ThreadPoolExecutor:
        shape = num_lanes, torch.get_num_threads() // num_lanes
        if self._pool is None or self._shape != shape:
            self._pool = ThreadPoolExecutor(num_lanes, "rm-lane", initializer=_own_threads, initargs=shape[1:])
            self._shape = shape
        return self._pool


def _beginning(
    sequences: Sequence[Sequence[int]], indices: Sequence[int], tokens: int, cache: PrefixCache | None
) -> Key | None:
    """What the sequences of a unit of ``tokens`` have in common, where it pays to compute that first."""
    distinct = sorted({tuple(sequences[index]) for index in indices})
    shared = shared_length(distinct[0], distinct[-1])
    length = usable_length(shared, distinct[0])
    again = (shared - length) * (len(distinct) - 1)
    if cache is not None and (cache.known_length(distinct[0]) or not cache.has_room_for(length)):
        return None
    if not length or tokens - shared < TOKENS_TO_SPLIT or again > _AGAIN * (tokens - shared):
        return None
    return distinct[0][:length]


def _with_beginnings(
    scored: Scored, begun: Sequence[tuple[Sequence[int], Key]], first: Scored, sequences: Sequence[Sequence[int]]
) -> Scored:
    """The costs with those of the beginnings, which this batch put into the cache itself: they are no hits."""
    computed, not_cached = scored.computed_tokens.copy(), 0
    for (indices, ids), tokens in zip(begun, first.computed_tokens, strict=True):
        computed[list(indices)] += tokens / len(indices)
        not_cached += len(ids) * len({tuple(sequences[index]) for index in indices})
    cached_tokens = first.cached_tokens + max(scored.cached_tokens - not_cached, 0)
    return replace(scored, computed_tokens=computed, cached_tokens=cached_tokens)


def _results(running: "list[Future[Scored]]") -> list[Scored]:
    """Of lanes that have ended; raises what one of them raised.

    Empties the list: the exception's traceback holds the caller's frame, which holds the list. With the exception in it
    this would be a cycle, and the failed forward's tensors would stay until the collector comes by.
    """
    results = []
    while running:
        results.append(running.pop(0).result())
    return results


def _own_threads(num_threads: int) -> None:
    """Have this thread's products run on so many threads. torch's own call would change the number everywhere."""
    torch.get_num_threads()  # torch sets a new thread's number at its first use, over what was said before
    kernels.load().use_threads(num_threads)


def divide(tokens: Sequence[int], num_lanes: int, max_tokens: int) -> tuple[list[list[int]], list[int]]:
    """Divide units of work, given by their tokens: the numbers of each lane's, and of those that all threads compute
    together afterwards, since they exceed a lane's budget or would leave the other lanes waiting."""
    lanes: list[list[int]] = [[] for _ in range(num_lanes)]
    loads = [0] * num_lanes
    together = [number for number, count in enumerate(tokens) if count > max_tokens]
    for number in sorted(set(range(len(tokens))) - set(together), key=lambda number: -tokens[number]):
        lane = loads.index(min(loads))
        lanes[lane].append(number)
        loads[lane] += tokens[number]
    while True:
        fullest = loads.index(max(loads))
        if not lanes[fullest]:
            break
        smallest = lanes[fullest][-1]
        fewer = [load - tokens[smallest] if lane == fullest else load for lane, load in enumerate(loads)]
        if max(fewer) + tokens[smallest] / num_lanes / _TOGETHER >= max(loads):
            break
        together.append(lanes[fullest].pop())
        loads = fewer
    return lanes, together


def _merged(parts: Sequence[Sequence[int]], results: Sequence[Scored], num_sequences: int) -> Scored:
    """The results of parts, each sequence's at its place."""
    rewards, computed = np.zeros(num_sequences, dtype=np.float32), np.zeros(num_sequences)
    heads = None
    for part, result in zip(parts, results, strict=True):
        rewards[part], computed[part] = result.rewards, result.computed_tokens
        if result.heads is not None:
            if heads is None:
                heads = np.zeros((num_sequences, result.heads.shape[1]), dtype=np.float32)
            heads[part] = result.heads
    return Scored(rewards, computed, sum(result.cached_tokens for result in results), heads)
