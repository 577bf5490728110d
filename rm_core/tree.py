"""The token tree: what sequences share is stored, and computed, once. Pure; no torch.

Invariant: reading a sequence's segments from the root to its own gives the sequence back, id for id. Segments are laid
out depth first, so a segment's ancestors stand before it and its descendants right behind it, in one run.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Ids = Sequence[int]

# A shared run shorter than this is repeated in each branch: attending to it apart costs more than computing it again
# (benchmarks/scaling.py measures where).
MIN_SHARED = 16


class Segment(NamedTuple):
    """A run of tokens with one parent."""

    parent: int
    """Index of the parent segment; -1 for a root."""
    start: int
    """Where the run begins in the packed row."""
    length: int
    position: int
    """Position, within its sequences, of the run's first token: the number of tokens in its ancestors."""
    end_of_descendants: int
    """Where the run of all its descendants ends in the packed row; ``start + length`` for a leaf."""

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class TokenTree:
    """Sequences merged over their common prefixes, in one packed row without padding."""

    ids: np.ndarray
    """int64 [N]: the packed row."""
    positions: np.ndarray
    """int64 [N]: each token's position within its own sequences."""
    segments: list[Segment]
    last: np.ndarray
    """int64 [B]: where in the row each input sequence's last token stands."""
    num_input_tokens: int
    """Sum of the sequences' lengths: what would be computed without sharing."""

    @property
    def num_tokens(self) -> int:
        """N, what is computed."""
        return len(self.ids)

    def path(self, sequence: int) -> Iterator[Segment]:
        """The segments of an input sequence, root first. For tests and explanations."""
        last = int(self.last[sequence])
        index = next(i for i, segment in enumerate(self.segments) if segment.start <= last < segment.end)
        chain = []
        while index >= 0:
            chain.append(self.segments[index])
            index = chain[-1].parent
        return reversed(chain)


def build_tree(sequences: Sequence[Ids], min_shared: int = MIN_SHARED) -> TokenTree:
    """Merge the longest common prefixes of ``sequences`` (none empty).

    Identical sequences are stored once and fanned out by ``last``. Shared runs shorter than ``min_shared`` tokens are
    repeated in each branch.
    """
    order, arrays, shared = _sorted_with_shared(sequences)
    nodes = _tries(arrays, shared)
    row: list[np.ndarray] = []
    segments: list[Segment] = []
    ends: dict[int, int] = {}  # index among the distinct sequences -> where its last token stands
    for root in nodes:
        _lay_out(root, min_shared, arrays, row, segments, ends)
    ids = np.concatenate(row) if row else np.zeros(0, dtype=np.int64)
    positions = np.concatenate([np.arange(s.position, s.position + s.length) for s in segments] or [ids])
    last = np.fromiter((ends[distinct] for distinct in order), dtype=np.int64, count=len(sequences))
    return TokenTree(ids, positions, segments, last, sum(map(len, sequences)))


def count_tokens(sequences: Sequence[Ids], min_shared: int = MIN_SHARED) -> int:
    """How many tokens ``build_tree`` would lay out."""
    return build_tree(sequences, min_shared).num_tokens if len(sequences) > 1 else sum(map(len, sequences))


def shared_length(first: Ids | np.ndarray, second: Ids | np.ndarray) -> int:
    """Length of the longest common prefix."""
    a, b = np.asarray(first), np.asarray(second)
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


@dataclass
class _Node:
    """A run ``arrays[sequence][start:end]`` of a trie, with what follows it and the sequences that end with it."""

    sequence: int
    start: int
    end: int
    children: list["_Node"]
    ending: list[int]


def _sorted_with_shared(sequences: Sequence[Ids]) -> tuple[list[int], list[np.ndarray], list[int]]:
    """Distinct sequences in lexicographic order, each one's shared prefix with the one before it, and the fan-out."""
    keys = [tuple(ids) for ids in sequences]
    if not all(keys):
        raise ValueError("an empty sequence has no place in a token tree")
    distinct = {key: rank for rank, key in enumerate(sorted(set(keys)))}
    arrays = [np.asarray(key, dtype=np.int64) for key in distinct]
    shared = [0] + [shared_length(a, b) for a, b in itertools.pairwise(arrays)]
    return [distinct[key] for key in keys], arrays, shared


def _tries(arrays: list[np.ndarray], shared: list[int]) -> list[_Node]:
    """Compressed tries of sorted sequences: the classic construction from shared prefix lengths, with a stack."""
    roots: list[_Node] = []
    stack: list[_Node] = []
    for index, (array, common) in enumerate(zip(arrays, shared, strict=True)):
        while stack and stack[-1].start >= common:
            stack.pop()
        if stack and stack[-1].end > common:
            # The branch leaves in the middle of a run: cut it in two.
            top = stack[-1]
            lower = _Node(top.sequence, common, top.end, top.children, top.ending)
            top.end, top.children, top.ending = common, [lower], []
        leaf = _Node(index, common, len(array), [], [index])
        (stack[-1].children if stack else roots).append(leaf)
        stack.append(leaf)
    return roots


def _lay_out(
    root: _Node,
    min_shared: int,
    arrays: list[np.ndarray],
    row: list[np.ndarray],
    segments: list[Segment],
    ends: dict[int, int],
) -> None:
    """Append a trie's runs depth first, repeating shared runs that are too short in each of their branches.

    Iterative: a chain of prefixes may be as deep as there are sequences.
    """
    start = segments[-1].end if segments else 0
    first = len(segments)
    # node, parent segment, and how many tokens before its start it takes over from ancestors that are too short
    pending: list[tuple[_Node, int, int]] = [(root, -1, 0)]
    while pending:
        node, parent, lead = pending.pop()
        length = node.end - node.start + lead
        is_short = bool(node.children) and length < min_shared
        if not is_short or node.ending:
            row.append(arrays[node.sequence][node.start - lead : node.end])
            segments.append(Segment(parent, start, length, node.start - lead, start + length))
            start += length
            ends.update((sequence, start - 1) for sequence in node.ending)
        children = (parent, length) if is_short else (len(segments) - 1, 0)
        pending.extend((child, *children) for child in reversed(node.children))
    # Children come behind their parents, so one pass from the back carries every subtree's end up to its root.
    for index in range(len(segments) - 1, first, -1):
        segment = segments[index]
        if segment.parent >= 0:
            parent_segment = segments[segment.parent]
            if segment.end_of_descendants > parent_segment.end_of_descendants:
                segments[segment.parent] = parent_segment._replace(end_of_descendants=segment.end_of_descendants)
