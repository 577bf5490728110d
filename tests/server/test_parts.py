"""How requests are cut into parts, and what a part is thought to hold before anything is tokenised."""

from typing import Any

import pytest

from rm_server.inputs import ItemInput
from rm_server.parts import PART_ITEMS, PartCutter
from rm_server.schema import Message
from rm_server.settings import ServerSettings


def cutter(**settings: Any) -> PartCutter:
    return PartCutter(ServerSettings(checkpoint="x", **settings))


def test_every_input_is_in_one_part_and_a_part_is_at_most_four_batches_or_one_input() -> None:
    inputs = [ItemInput("x", ids=[1] * n) for n in (10, 40, 30, 100, 1, 1)]
    parts, start = [], 0
    while start < len(inputs):
        stop, tokens = cutter(max_batch_tokens=16).next_part(inputs, start, 512)
        parts.append((stop - start, tokens))
        start = stop
    assert parts == [(2, 50), (1, 30), (1, 100), (2, 2)]
    assert cutter().next_part([ItemInput("x", ids=[1])] * 2000, 0, 512) == (PART_ITEMS, PART_ITEMS)


@pytest.mark.parametrize("item", [ItemInput("x", "a" * 1_000_000), ItemInput("x", ids=[1] * 1_000_000)])
def test_an_over_long_input_counts_for_the_longest_sequence_and_no_more(item: ItemInput) -> None:
    assert cutter().next_part([item, item], 0, 512) == (2, 1024)


def test_tool_calls_and_names_count_as_what_they_are() -> None:
    deep: Any = "z" * 500
    for _ in range(600):
        deep = [deep]
    for extra in (
        {"tool_calls": [{"function": {"name": "f", "arguments": "z" * 500}}]},
        {"tool_calls": [{"function": deep}]},
        {"name": "z" * 500},
        {"tool_call_id": "z" * 500},
    ):
        message = Message(role="assistant", content=None, **extra)
        assert ItemInput("x", [message]).size > 500
