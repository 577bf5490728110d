"""Policy: how a request is cut into the parts in which it is admitted and tokenised. No asyncio, no clock.

Invariant: every input is in exactly one part, in order, and a part holds at least one.
"""

from collections.abc import Sequence

from rm_server.groups import Item
from rm_server.inputs import ItemInput
from rm_server.settings import ServerSettings

PART_BATCHES = 4
PART_ITEMS = 512
"""A part of a request is at most this many batches of tokens and this many items."""


class PartCutter:
    """Cuts by tokens, which it estimates from characters with a ratio that it learns."""

    def __init__(self, settings: ServerSettings) -> None:
        self._max_tokens = PART_BATCHES * settings.max_batch_tokens
        self._max_estimate = settings.max_queued_tokens
        self._tokens_per_character = 0.3

    def next_part(self, inputs: Sequence[ItemInput], start: int, max_length: int) -> tuple[int, int]:
        """Where the part that begins at ``start`` ends, and the tokens it is thought to have.

        No item counts for more than ``max_length``: over it, it will be refused or cut. An estimate beyond the whole
        room would have to wait until the room is empty, and everybody else behind it.
        """
        total, stop = 0, start
        while stop < len(inputs) and stop - start < PART_ITEMS:
            item = inputs[stop]
            size = item.size if item.ids is not None else int(item.size * self._tokens_per_character) + 8
            size = min(size, max_length)
            if stop > start and total + size > self._max_tokens:
                break
            total, stop = total + size, stop + 1
        return stop, min(total, self._max_estimate)

    def learn(self, part: Sequence[ItemInput], items: Sequence[Item]) -> None:
        """Compare a part with the items that it became. What was refused or truncated teaches nothing."""
        characters = sum(item.size for item in part if item.ids is None)
        if characters and len(items) == len(part) and not any(item.request.truncated[item.slot] for item in items):
            ratio = sum(item.num_tokens for item in items) / characters
            self._tokens_per_character += 0.05 * (min(ratio, 2.0) - self._tokens_per_character)
