"""Which tokens' rewards are wanted beside those of whole sequences, and what was read of them so far.

A reward is read from a token's hidden state, so a token whose reward is wanted has to go through the model: what stands
before it may be taken from a cache, it itself may not.

Invariant: every wanted token is read once and in order, in whichever pass it is computed; the last one's value is the
sequence's reward.
"""

from collections.abc import Sequence

import numpy as np

from rm_core.prefix_cache import Key, usable_length


class TokenReads:
    """Belongs to one call that scores. ``first[i]``: where in ``sequences[i]`` reading begins; None: not wanted.

    Raises ValueError for a place outside of its sequence.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], first: Sequence[int | None]) -> None:
        self._asked: list[tuple[Key, int] | None] = []
        self._first: dict[Key, int] = {}
        for ids, place in zip(sequences, first, strict=True):
            if place is None:
                self._asked.append(None)
                continue
            if not 0 <= place < len(ids):
                raise ValueError(f"read_from: {place} is no place in a sequence of {len(ids)} tokens")
            key = tuple(ids)
            self._asked.append((key, place))
            self._first[key] = min(place, self._first.get(key, place))
        self._next = dict(self._first)
        self._values: dict[Key, list[np.ndarray]] = {key: [] for key in self._first}

    def __contains__(self, ids: Key) -> bool:
        return ids in self._first

    def next_place(self, ids: Key) -> int:
        """The first place of a wanted sequence that was not read yet."""
        return self._next[ids]

    def usable(self, length: int, ids: Key) -> int:
        """How many of ``length`` known tokens at the beginning of ``ids`` need not be computed."""
        return usable_length(min(length, self._next[ids]), ids) if ids in self._next else length

    def add(self, ids: Key, rewards: np.ndarray) -> None:
        """Note the rewards, fp32 [n], at the next ``n`` places."""
        self._values[ids].append(rewards)
        self._next[ids] += len(rewards)

    def token_rewards(self) -> list[np.ndarray | None]:
        """For each sequence, in the order of the call: fp32 [length − first], or None."""
        read = {ids: np.concatenate(parts) for ids, parts in self._values.items()}
        return [None if asked is None else read[asked[0]][asked[1] - self._first[asked[0]] :] for asked in self._asked]
