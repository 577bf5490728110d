"""Score sequences over their token tree in forward passes under a token budget, with and into a prefix cache.

The rule: sequences are taken in sorted order, which is the tree's depth-first order, as many for a pass as fit the
budget after sharing. What the next pass shares with this one is carried over as keys and values. A sequence that alone
exceeds the budget is computed in pieces, each carried to the next.

Invariant: a reward does not depend on where the passes were cut, beyond rounding.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rm_core.attention import Prefix, TreePlan
from rm_core.network import RewardNetwork
from rm_core.prefix_cache import CachedPrefix, Key, PrefixCache, concatenate, usable_length
from rm_core.token_reads import TokenReads
from rm_core.tree import MIN_SHARED, Segment, build_tree, shared_length


@dataclass(frozen=True)
class Scored:
    """Rewards fp32 [B]; for each sequence the tokens that were computed for it: its share of what it has in common."""

    rewards: np.ndarray
    computed_tokens: np.ndarray
    """float64 [B]; sums to the tokens that went through the model."""
    cached_tokens: int
    """Tokens, over all distinct sequences, whose keys and values came from the cache."""
    heads: np.ndarray | None = None
    """Rewards of the single heads, fp32 [B, K], of a checkpoint that has several."""
    token_rewards: list[np.ndarray | None] | None = None
    """Where asked for: the reward as read at each token of a sequence from some place on, fp32 [n] each."""


def as_scored(values: np.ndarray, computed: np.ndarray, cached_tokens: int, reads: TokenReads | None) -> Scored:
    """``values`` fp32 [B, 1 + K]: what ``project_all`` gives."""
    heads = values[:, 1:] if values.shape[1] > 1 else None
    return Scored(values[:, 0], computed, cached_tokens, heads, reads.token_rewards() if reads is not None else None)


@dataclass
class _Row:
    """One pass: a packed row made of one tree for each prefix."""

    ids: np.ndarray
    positions: np.ndarray
    plan: TreePlan
    last: np.ndarray
    sharers: np.ndarray
    """How many sequences each packed token belongs to."""
    segment_of: np.ndarray


def score_in_passes(
    network: RewardNetwork,
    sequences: Sequence[Sequence[int]],
    max_tokens: int,
    cache: PrefixCache | None,
    reads: TokenReads | None = None,
) -> Scored:
    """Score ``sequences`` (none empty). Call it under ``torch.inference_mode``.

    A budget below MIN_SHARED is raised to it: known beginnings come in multiples of that, so a smaller piece would
    never be taken over.
    """
    max_tokens = max(max_tokens, MIN_SHARED)
    keys = [tuple(ids) for ids in sequences]
    order = sorted(set(keys))
    rewards: dict[Key, list[float]] = {}
    computed: dict[Key, float] = dict.fromkeys(order, 0.0)
    carried: CachedPrefix | None = None
    cached_tokens = 0
    start = 0
    while start < len(order):
        found = [_find(cache, carried, order[start], reads)]
        entry, length = found[0] or (None, 0)
        if len(order[start]) - length > max_tokens:
            ids = order[start]
            piece = max_tokens - max_tokens % MIN_SHARED
            carried = _compute_piece(network, ids, entry, length, piece, reads)
            computed[ids] += piece
            continue
        end, found = _take(order, start, found, max_tokens, cache, carried, reads)
        batch = order[start:end]
        row = _pack(batch, found)
        shared_next = shared_length(batch[-1], order[end]) if end < len(order) else 0
        wanted = _paths_to_keep(batch, found, row, cache, shared_next)
        row.plan.keep = [torch.from_numpy(rows).to(network.device) for _, _, rows in wanted]
        rewards.update(zip(batch, _read(network, row, batch, found, reads).tolist(), strict=True))
        for ids, tokens in zip(batch, _shares(row, len(batch)), strict=True):
            computed[ids] += tokens
        for hit in found:
            if hit is not None:
                cached_tokens += hit[1] if hit[0] is not carried else 0
        carried = _keep(wanted, row, found, batch, cache, shared_next)
        start = end
    fan_out = Counter(keys)
    return as_scored(
        np.array([rewards[ids] for ids in keys], dtype=np.float32),
        np.array([computed[ids] / fan_out[ids] for ids in keys]),
        cached_tokens,
        reads,
    )


def _read(
    network: RewardNetwork, row: _Row, batch: list[Key], found: list["Hit"], reads: TokenReads | None
) -> np.ndarray:
    """Run a pass: what ``project_all`` gives at each sequence's last token, fp32 [B, 1 + K]; ``reads`` gets its own."""
    wanted = {
        ids: _rows_of(row, sequence)[reads.next_place(ids) - _known(found[sequence]) :]
        for sequence, ids in enumerate(batch)
        if reads is not None and ids in reads
    }
    rows = np.unique(np.concatenate([row.last, *wanted.values()])) if wanted else row.last
    hidden = network.run_tree(row.ids, row.positions, row.plan, rows)
    values: np.ndarray = network.project_all(hidden).float().cpu().numpy()
    if reads is None or not wanted:
        return values
    for ids, places in wanted.items():
        reads.add(ids, values[np.searchsorted(rows, places), 0])
    return values[np.searchsorted(rows, row.last)]


Hit = tuple[CachedPrefix, int] | None
"""A known beginning and how many of its tokens count; None where nothing is known."""


def _known(hit: Hit) -> int:
    return hit[1] if hit else 0


def _find(cache: PrefixCache | None, carried: CachedPrefix | None, ids: Key, reads: TokenReads | None) -> Hit:
    """The longest known beginning of ``ids``: carried from the pass before, or from the cache."""
    hit = cache.find(ids) if cache is not None else None
    if carried is not None:
        length = usable_length(shared_length(carried.ids, ids), ids)
        if length > _known(hit):
            hit = carried, length
    if hit is None or reads is None:
        return hit
    length = reads.usable(hit[1], ids)
    return (hit[0], length) if length else None


def _take(
    order: list[Key],
    start: int,
    found: list[Hit],
    max_tokens: int,
    cache: PrefixCache | None,
    carried: CachedPrefix | None,
    reads: TokenReads | None,
) -> tuple[int, list[Hit]]:
    """How far from ``start`` one pass reaches, and each sequence's known beginning. At least one sequence."""
    tokens = len(order[start]) - _known(found[0])
    end = start + 1
    while end < len(order):
        hit = _find(cache, carried, order[end], reads)
        known = max(_known(hit), _shared_in_pass(order[end - 1], order[end], found[-1], hit))
        if tokens + len(order[end]) - known > max_tokens:
            break
        tokens += len(order[end]) - known
        found.append(hit)
        end += 1
    return end, found


def _shared_in_pass(before: Key, ids: Key, hit_before: Hit, hit: Hit) -> int:
    """What two neighbours of one pass share: they must stand under the same prefix, and the run must pay."""
    if _same(hit_before, hit):
        shared = shared_length(before, ids)
        own = shared - _known(hit)
        return shared if own >= MIN_SHARED else 0
    return 0


def _same(first: Hit, second: Hit) -> bool:
    if first is None or second is None:
        return first is second
    return first[0] is second[0] and first[1] == second[1]


def units_of(sequences: Sequence[Sequence[int]], cache: PrefixCache | None) -> list[tuple[list[int], int]]:
    """Cut sequences into units that have nothing to compute in common: the indices of each, and its tokens."""
    keys = [tuple(ids) for ids in sequences]
    units: list[tuple[list[int], int]] = []
    before: Key | None = None
    hit_before: Hit = None
    for index in sorted(range(len(keys)), key=keys.__getitem__):
        ids, hit = keys[index], _find(cache, None, keys[index], None)
        if ids == before:  # its reward is its equal's
            units[-1][0].append(index)
            continue
        shared = _shared_in_pass(before, ids, hit_before, hit) if before is not None else 0
        tokens = len(ids) - max(_known(hit), shared)
        if shared:
            units[-1] = [*units[-1][0], index], units[-1][1] + tokens
        else:
            units.append(([index], tokens))
        before, hit_before = ids, hit
    return units


def _pack(batch: list[Key], found: list[Hit]) -> _Row:
    """Lay the sequences' remainders out: one tree for each run of sequences under one prefix."""
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    last: list[np.ndarray] = []
    segments: list[Segment] = []
    prefixes: list[Prefix] = []
    offset = longest = at = 0
    while at < len(batch):
        end = at + 1
        while end < len(batch) and _same(found[at], found[end]):
            end += 1
        hit = found[at]
        known = _known(hit)
        tree = build_tree([ids_[known:] for ids_ in batch[at:end]])
        base = len(segments)
        segments += [
            Segment(s.parent + base if s.parent >= 0 else -1, s.start + offset, s.length, s.position,
                    s.end_of_descendants + offset)
            for s in tree.segments
        ]  # fmt: skip
        if hit is not None:
            prefixes.append(Prefix(offset, offset + tree.num_tokens, known, hit[0].layers))
        ids.append(tree.ids)
        positions.append(tree.positions + known)
        last.append(tree.last + offset)
        longest = max(longest, known + int(tree.positions.max()) + 1)
        offset += tree.num_tokens
        at = end
    plan = TreePlan(segments, longest, prefixes)
    lasts = np.concatenate(last)
    segment_of = np.repeat(np.arange(len(segments)), [s.length for s in segments])
    counts = np.zeros(len(segments))
    np.add.at(counts, segment_of[lasts], 1)
    for index in range(len(segments) - 1, -1, -1):
        if segments[index].parent >= 0:
            counts[segments[index].parent] += counts[index]
    return _Row(np.concatenate(ids), np.concatenate(positions), plan, lasts, counts[segment_of], segment_of)


def _rows_of(row: _Row, sequence: int) -> np.ndarray:
    """Packed rows of a sequence's computed tokens, in order."""
    segments = row.plan.segments
    index = int(row.segment_of[row.last[sequence]])
    runs = []
    while index >= 0:
        runs.append(np.arange(segments[index].start, segments[index].end))
        index = segments[index].parent
    return np.concatenate(runs[::-1])


def _shares(row: _Row, num_sequences: int) -> list[float]:
    """Computed tokens of each sequence, shared ones divided among those who share them."""
    segments = row.plan.segments
    own = np.array([s.length / row.sharers[s.start] for s in segments])
    for index, segment in enumerate(segments):
        if segment.parent >= 0:
            own[index] += own[segment.parent]
    return [float(own[row.segment_of[row.last[sequence]]]) for sequence in range(num_sequences)]


def _paths_to_keep(
    batch: list[Key], found: list[Hit], row: _Row, cache: PrefixCache | None, shared_next: int
) -> list[tuple[int, int, np.ndarray]]:
    """(sequence, length, packed rows) of each beginning to keep: for the cache, and last for the next pass.

    A beginning that sequences of this pass share is kept as far as they share it; a lonely sequence, of which little
    was known, is kept whole, since where it will part from later ones is not known yet.
    """
    wanted: list[tuple[int, int, np.ndarray]] = []
    seen: set[int] = set()
    for sequence, ids in enumerate(batch if cache is not None else []):
        known = _known(found[sequence])
        index = int(row.segment_of[row.last[sequence]])
        parent = row.plan.segments[index].parent
        if parent >= 0:
            segment = row.plan.segments[parent]
            length = known + segment.position + segment.length
        elif known < len(ids) // 2:
            parent, length = index, len(ids)
        else:
            continue
        if parent not in seen and length >= MIN_SHARED:
            seen.add(parent)
            wanted.append((sequence, length, _rows_of(row, sequence)[: length - known]))
    known = _known(found[-1])
    covered = any(
        length >= shared_next and batch[i][:shared_next] == batch[-1][:shared_next] for i, length, _ in wanted
    )
    if shared_next > known and shared_next >= MIN_SHARED and not covered:
        wanted.append((len(batch) - 1, shared_next, _rows_of(row, len(batch) - 1)[: shared_next - known]))
    return wanted


def _keep(
    wanted: list[tuple[int, int, np.ndarray]],
    row: _Row,
    found: list[Hit],
    batch: list[Key],
    cache: PrefixCache | None,
    shared_next: int,
) -> CachedPrefix | None:
    """Put kept beginnings into the cache; return what the next pass carries on."""
    last_hit = found[-1]
    carried = last_hit[0] if last_hit is not None and shared_next >= MIN_SHARED else None
    for (sequence, length, _), layers in zip(wanted, row.plan.kept, strict=True):
        hit = found[sequence]
        whole = tuple(layers) if hit is None else concatenate(hit[0].layers, hit[1], layers)
        entry = CachedPrefix(batch[sequence][:length], whole)
        if length >= shared_next >= MIN_SHARED and entry.ids[:shared_next] == batch[-1][:shared_next]:
            carried = entry
        if cache is not None:
            cache.add(entry)
    return carried


def _compute_piece(
    network: RewardNetwork,
    ids: Key,
    entry: CachedPrefix | None,
    length: int,
    num_tokens: int,
    reads: TokenReads | None,
) -> CachedPrefix:
    """Compute the next ``num_tokens`` of a sequence behind its known beginning, for their keys and values, and for the
    rewards that are wanted among them."""
    piece = np.asarray(ids[length : length + num_tokens], dtype=np.int64)
    plan = TreePlan([Segment(-1, 0, len(piece), 0, len(piece))], length + len(piece))
    if entry is not None:
        plan.prefixes = [Prefix(0, len(piece), length, entry.layers)]
    plan.keep = [torch.arange(len(piece), device=network.device)]
    wanted = reads.next_place(ids) - length if reads is not None and ids in reads else len(piece)
    hidden = network.run_tree(piece, np.arange(length, length + len(piece)), plan, np.arange(wanted, len(piece)))
    if reads is not None and wanted < len(piece):
        reads.add(ids, network.project_all(hidden).float().cpu().numpy()[:, 0])
    layers = tuple(plan.kept[0]) if entry is None else concatenate(entry.layers, length, plan.kept[0])
    return CachedPrefix(ids[: length + len(piece)], layers)
