"""The tree stores every shared run once and gives every sequence back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rm_core.tree import build_tree, count_tokens, shared_length

# Few distinct ids and short lengths, so that prefixes, duplicates and nested branches are common.
sequences_strategy = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


@given(sequences_strategy, st.integers(1, 6))
@settings(max_examples=400, deadline=None)
def test_every_path_gives_its_sequence_back(sequences, min_shared):
    tree = build_tree(sequences, min_shared)
    for index, ids in enumerate(sequences):
        path = list(tree.path(index))
        read = np.concatenate([tree.ids[segment.start : segment.end] for segment in path])
        positions = np.concatenate([tree.positions[segment.start : segment.end] for segment in path])
        assert read.tolist() == ids  # the sequence ends with its segment
        assert positions.tolist() == list(range(len(ids)))
        assert tree.last[index] == path[-1].end - 1


@given(sequences_strategy, st.integers(1, 6))
@settings(max_examples=400, deadline=None)
def test_segments_are_laid_out_depth_first_without_gaps(sequences, min_shared):
    tree = build_tree(sequences, min_shared)
    start = 0
    for index, segment in enumerate(tree.segments):
        assert segment.start == start
        start = segment.end
        assert segment.parent < index
        if segment.parent >= 0:
            parent = tree.segments[segment.parent]
            assert parent.end <= segment.start < segment.end <= parent.end_of_descendants
            assert segment.position == parent.position + parent.length
        else:
            assert segment.position == 0
        inside = [s.end for s in tree.segments[index:] if _descends(tree, s, segment)]
        assert segment.end_of_descendants == max(inside)
    assert start == tree.num_tokens


def _descends(tree, segment, ancestor):
    while segment is not ancestor and segment.parent >= 0:
        segment = tree.segments[segment.parent]
    return segment is ancestor


@given(sequences_strategy)
@settings(max_examples=300, deadline=None)
def test_with_every_run_shared_the_row_holds_each_distinct_prefix_once(sequences):
    prefixes = {tuple(ids[: length + 1]) for ids in sequences for length in range(len(ids))}
    assert count_tokens(sequences, min_shared=1) == len(prefixes)
    assert build_tree(sequences, min_shared=1).num_input_tokens == sum(map(len, sequences))


def test_a_group_costs_its_prompt_once():
    prompt = list(range(100))
    group = [[*prompt, 1000 + answer, *range(20)] for answer in range(8)]
    tree = build_tree(group)
    assert tree.num_tokens == 100 + 8 * 21
    assert tree.num_input_tokens == 8 * 121
    assert [segment.parent for segment in tree.segments] == [-1] + [0] * 8


def test_short_shared_runs_are_repeated():
    pair = [[1, 2, 3, 4], [1, 2, 3, 5]]
    assert build_tree(pair, min_shared=4).num_tokens == 8
    assert build_tree(pair, min_shared=3).num_tokens == 5


def test_a_prefix_of_another_sequence_and_duplicates_cost_nothing():
    long = list(range(50))
    tree = build_tree([long, long[:30], long, long[:30]])
    assert tree.num_tokens == 50
    assert tree.last.tolist() == [49, 29, 49, 29]


def test_trees_nest():
    system = list(range(40))
    prompts = [[*system, 100 + p, *range(200, 220)] for p in range(2)]
    answers = [[*prompt, 300 + a, *range(30)] for prompt in prompts for a in range(3)]
    tree = build_tree(answers)
    assert tree.num_tokens == 40 + 2 * 21 + 6 * 31
    assert [s.parent for s in tree.segments] == [-1, 0, 1, 1, 1, 0, 5, 5, 5]


def test_thousands_of_nested_prefixes_do_not_overflow_the_stack():
    sequences = [list(range(length)) for length in range(1, 3001)]
    assert build_tree(sequences, min_shared=1).num_tokens == 3000


def test_an_empty_sequence_is_refused():
    with pytest.raises(ValueError, match="empty"):
        build_tree([[1], []])


def test_shared_length_of_prefixes():
    assert shared_length([1, 2, 3], [1, 2, 4, 5]) == 2
    assert shared_length([1], [1, 2]) == 1
    assert shared_length([2], [1]) == 0
