"""From sources to the pairs of a run: reading, splitting by prompt, mixing, drawing, and what identifies them.

Invariant: the same config, seed and data give the same pairs in the same order, and a prompt whose pairs were split
is never on both sides.
"""

import hashlib
import json
import random
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, TypeVar

from rm_train.best_of import BestOf, is_best_of, read_best_of
from rm_train.config import Columns, DataConfig, SourceConfig, parse_source
from rm_train.pairs import Pair, row_to_pairs
from rm_train.row_reader import Content
from rm_train.rows import DataError, ErrorHandler, raise_error
from rm_train.sources import read_rows, source_name, source_names


@dataclass(frozen=True, slots=True)
class Leak:
    """An evaluation pair whose prompt is also trained on."""

    train: Pair
    eval: Pair


@dataclass(frozen=True)
class FitData:
    """The pairs of one run."""

    train: list[Pair]
    """In the order read; a pair occurs as often as an epoch sees it."""
    eval: list[Pair]
    leaks: list[Leak]
    """Evaluation pairs whose prompts are trained on; empty when the evaluation pairs were split off."""
    tied_rows: int
    """K-wise rows that gave no pair, because all their answers are tied."""


def read_pairs(
    source: SourceConfig | str,
    columns: Columns | None = None,
    *,
    name: str | None = None,
    on_error: ErrorHandler = raise_error,
    tally: Counter[str] | None = None,
) -> Iterator[Pair]:
    """Yield the pairs of one source in order, holding one row at a time; a best-of-N row is a broken row here.

    ``source`` may be a text such as a path or ``org/name:split``. ``columns`` maps our names to the source's; the
    source's own mapping is laid over it. ``name`` is what the pairs call their source, ``source_name`` unless it is
    given. A broken row goes to ``on_error``, which raises unless told otherwise.
    ``tally`` counts ``rows``, ``pairs`` and ``tied_rows`` (K-wise rows that gave no pair).
    """
    for item in read_items(source, columns, name=name, on_error=on_error, tally=tally):
        if isinstance(item, Pair):
            yield item
        else:
            on_error(DataError(item.where, "chosen: holds a list of answers (best-of-N); pairs have one, K-wise rows "
                                           "have completions with ranks or scores"))  # fmt: skip


def read_items(
    source: SourceConfig | str,
    columns: Columns | None = None,
    *,
    name: str | None = None,
    on_error: ErrorHandler = raise_error,
    tally: Counter[str] | None = None,
) -> Iterator[Pair | BestOf]:
    """``read_pairs`` for evaluation: best-of-N rows are read too, each in its place."""
    if isinstance(source, str):
        source = SourceConfig.model_validate(parse_source(source))
    mapping = {**(columns or {}), **source.columns}
    name = name or source_name(source)
    tally = Counter() if tally is None else tally
    for row in read_rows(source, on_error):
        tally["rows"] += 1
        try:
            if is_best_of(row.values, mapping):
                yield read_best_of(row, mapping)
                continue
            pairs = row_to_pairs(row, mapping, name)
        except DataError as error:
            on_error(error)
            continue
        tally["pairs"] += len(pairs)
        tally["tied_rows"] += not pairs
        yield from pairs


def load_fit_data(data: DataConfig, seed: int) -> FitData:
    """Read and prepare all pairs of a run. Raises DataError."""
    tally: Counter[str] = Counter()
    names = source_names([*data.train, *(data.eval or [])])

    def pairs_of(source: SourceConfig, name: str) -> list[Pair]:
        return list(read_pairs(source, data.columns, name=name, tally=tally))

    read = [pairs_of(source, name) for source, name in zip(data.train, names, strict=False)]
    if data.eval is not None:
        held_out = zip(data.eval, names[len(data.train) :], strict=True)
        evaluation = [pair for source, name in held_out for pair in pairs_of(source, name)]
    else:
        if not any(read):
            raise DataError(", ".join(source.path for source in data.train), "no pairs to train on")
        apart = _prompts_apart([pair for pairs in read for pair in pairs], data.eval_fraction, seed)
        evaluation = [pair for pairs in read for pair in pairs if prompt_key(pair) in apart]
        read = [[pair for pair in pairs if prompt_key(pair) not in apart] for pairs in read]
    train = [
        pair
        for index, (source, pairs) in enumerate(zip(data.train, read, strict=True))
        for pair in _mix(pairs, source.mix_weight, f"{seed}:mix:{index}")
    ]
    for name, found, sources in (("train", train, data.train), ("eval", evaluation, data.eval or data.train)):
        if not found:
            raise DataError(", ".join(source.path for source in sources), f"no pairs to {name} on")
    train = draw(train, data.limit, f"{seed}:train")
    evaluation = draw(evaluation, data.eval_limit, f"{seed}:eval")
    return FitData(train, evaluation, find_leaks(train, evaluation), tally["tied_rows"])


# ------------------------------------------------------------------ prompts


def prompt_key(pair: Pair) -> str:
    """Hash of the normalised prompt: Unicode form, case and blanks do not count, nor whether it is text or one message.

    Whole texts without a prompt go by the lines that both share; when they share none, by the pair itself.
    """
    if pair.prompt is None:
        shared = _shared_lines(content_text(pair.chosen), content_text(pair.rejected))
        text = shared or "\n".join(sorted((content_text(pair.chosen), content_text(pair.rejected))))
    elif isinstance(pair.prompt, tuple) and [message["role"] for message in pair.prompt] != ["user"]:
        text = "\n".join(f"{message['role']}: {message_text(message)}" for message in pair.prompt)
    else:
        text = content_text(pair.prompt)
    return hashlib.sha256(normalise(text).encode()).hexdigest()


def normalise(text: str) -> str:
    """Text for comparing: NFKC, case folded, runs of blanks made one space, ends trimmed."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return " ".join(text.casefold().split())


def message_text(message: Mapping[str, Any]) -> str:
    """The words of a message: its text, or its text parts joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or () if isinstance(part.get("text", ""), str))


def content_text(content: Content) -> str:
    """The words of a text or conversation, messages joined by line breaks."""
    return content if isinstance(content, str) else "\n".join(message_text(message) for message in content)


def _shared_lines(first: str, second: str) -> str:
    length = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    return first[: first.rfind("\n", 0, length) + 1].strip()


def split_by_prompt(pairs: Sequence[Pair], fraction: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Set about ``fraction`` of the pairs apart, whole prompts at a time; returns (train, eval), each in order.

    Which prompts go is decided by a hash of prompt and seed, whatever the order of the pairs. Raises DataError when
    there is only one prompt.
    """
    apart = _prompts_apart(pairs, fraction, seed)
    return (
        [pair for pair in pairs if prompt_key(pair) not in apart],
        [pair for pair in pairs if prompt_key(pair) in apart],
    )


def _prompts_apart(pairs: Sequence[Pair], fraction: float, seed: int) -> set[str]:
    counts = Counter(map(prompt_key, pairs))
    if len(counts) < 2:
        where = pairs[0].where if pairs else "the data"
        raise DataError(where, f"cannot split {len(counts)} distinct prompt(s) into two sides; name data.eval instead")
    target = max(1, round(fraction * len(pairs)))
    order = sorted(counts, key=lambda key: hashlib.sha256(f"{seed}:{key}".encode()).digest())
    apart: set[str] = set()
    held = 0
    for key in order:
        # a prompt with too many pairs is passed over, so that one large group cannot swallow the training set
        if held + counts[key] <= target and len(apart) < len(order) - 1:
            apart.add(key)
            held += counts[key]
    if not apart:
        apart.add(min(order, key=lambda key: counts[key]))
    return apart


def find_leaks(train: Iterable[Pair], evaluation: Iterable[Pair]) -> list[Leak]:
    """List the evaluation pairs whose normalised prompt is trained on, each with the first such training pair."""
    trained: dict[str, Pair] = {}
    for pair in train:
        trained.setdefault(prompt_key(pair), pair)
    found = ((trained.get(prompt_key(pair)), pair) for pair in evaluation)
    return [Leak(first, pair) for first, pair in found if first is not None]


# ------------------------------------------------------------------ drawing, mixing, identity


Item = TypeVar("Item", Pair, BestOf, "Pair | BestOf")


def _rows(pairs: Iterable[Item]) -> list[list[Item]]:
    """Pairs of one K-wise row stay together."""
    return [list(group) for _, group in groupby(pairs, key=lambda pair: pair.where)]


def first_rows(items: Iterable[Item], limit: int | None) -> Iterator[Item]:
    """The first rows that ``limit`` pairs hold, without reading on; None gives all.

    A K-wise row is taken whole or not at all; a best-of-N row counts as one pair. Raises DataError where the first row
    has more pairs.
    """
    left, items = limit, iter(items)
    for item in items:
        size = round(1 / item.row_part) if isinstance(item, Pair) else 1
        if left is not None and size > left:
            if left == limit:
                raise DataError(item.where, f"a limit of {limit} pairs does not hold this row, which has {size}")
            return
        yield item
        yield from islice(items, size - 1)
        if left is not None:
            left -= size
            if not left:
                return


def draw(pairs: Sequence[Item], limit: int | None, seed: str) -> list[Item]:
    """Draw rows at random up to ``limit`` pairs and return them in their own order; None keeps all.

    A K-wise row is taken whole or not at all, so that its weights still add up.
    """
    if limit is None or len(pairs) <= limit:
        return list(pairs)
    rows = _rows(pairs)
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    taken, held = set(), 0
    for index in order:
        if held + len(rows[index]) <= limit:
            taken.add(index)
            held += len(rows[index])
    if not taken:
        smallest = min(map(len, rows))
        raise DataError(pairs[0].where, f"a limit of {limit} pairs holds no row; the smallest has {smallest}")
    return [pair for index, row in enumerate(rows) if index in taken for pair in row]


def _mix(pairs: Sequence[Pair], weight: float, seed: str) -> list[Pair]:
    """Repeat rows ``weight`` times; the fraction left over is a random choice of that share of the rows."""
    if weight == 1.0:
        return list(pairs)
    whole, part = divmod(weight, 1.0)
    rows = _rows(pairs)
    once_more = set(random.Random(seed).sample(range(len(rows)), round(part * len(rows))))
    return [pair for index, row in enumerate(rows) for _ in range(int(whole) + (index in once_more)) for pair in row]


def data_fingerprint(pairs: Iterable[Pair]) -> str:
    """``sha256:`` of all that training sees of the pairs, in order; where they were read from does not count."""
    digest = hashlib.sha256()
    for pair in pairs:
        seen = [pair.prompt, pair.chosen, pair.rejected, pair.margin, pair.weight, pair.label]
        digest.update(json.dumps(seen, sort_keys=True, default=str).encode() + b"\n")
    return "sha256:" + digest.hexdigest()
