"""``rm-train replay``: compute the rewards of a server's audit log again, from the texts and the checkpoint.

Invariant: a line of the log counts as confirmed only if the very same token ids, under the same reward id, give its
reward within the tolerance that the checkpoint records for the line's dtype.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rm_core.chat import RenderError
from rm_core.checkpoint import CheckpointError
from rm_core.model import RewardModel
from rm_train.config import SourceConfig, parse_source
from rm_train.pairs import row_to_pairs
from rm_train.rows import DataError, Row
from rm_train.score_file import render_row
from rm_train.scoring import score_sequences
from rm_train.sources import read_rows

_CHUNK = 2048
_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class _Line:
    where: str
    reward_id: str
    dtype: str
    reward: float


def replay(
    log: Path,
    model: RewardModel,
    data: Sequence[str],
    *,
    max_tokens: int,
    progress: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """Recompute what the log says of the sequences that ``data`` holds.

    ``data`` are files of rows as they were sent (the forms of ``rm-train score``) or of pairs. The log's rotated files
    (``LOG.1``, ``LOG.2``, …) are read with it. The result counts lines, confirmed ones, those that differ, those whose
    ids are not in the data, and those of another reward id. Raises DataError or CheckpointError.
    """
    if model.record is None:
        raise CheckpointError(f"{model.name}: has no record (reward_model.json), so its reward id proves nothing")
    lines, counts = _read_log(log, model.reward_id)
    tolerance = model.record.golden.tolerance
    found: set[str] = set()
    wrong: list[dict[str, Any]] = []
    largest = 0.0
    waiting: dict[str, list[int]] = {}

    def settle() -> None:
        nonlocal largest
        rewards = score_sequences(model, list(waiting.values()), max_tokens=max_tokens, progress=progress)
        for digest, reward in zip(waiting, rewards.tolist(), strict=True):
            for line in lines[digest]:
                difference = abs(line.reward - reward)
                largest = max(largest, difference) if np.isfinite(difference) else float("inf")
                if difference <= tolerance.get(line.dtype, 0.0):
                    counts["confirmed"] += 1
                    continue
                counts["different"] += 1
                if len(wrong) < _EXAMPLES:
                    wrong.append({"where": line.where, "logged": line.reward, "computed": reward, "dtype": line.dtype})
        found.update(waiting)
        waiting.clear()

    for ids in _sequences(model, data):
        digest = ids_digest(ids)
        if digest in lines and digest not in found and digest not in waiting:
            waiting[digest] = ids
            if len(waiting) == _CHUNK:
                settle()
    settle()
    return {
        "reward_id": model.reward_id,
        "lines": counts["lines"],
        "confirmed": counts["confirmed"],
        "different": counts["different"],
        "not_in_data": sum(len(same) for digest, same in lines.items() if digest not in found),
        "other_reward_id": counts["other"],
        "largest_difference": largest,
        "tolerance": tolerance,
        "examples": wrong,
    }


def ids_digest(ids: Sequence[int]) -> str:
    """``sha256:`` over the ids, each as 4 bytes, big-endian: what the server's audit log writes."""
    return "sha256:" + hashlib.sha256(np.asarray(ids, dtype=">u4").tobytes()).hexdigest()


def _read_log(log: Path, reward_id: str) -> tuple[dict[str, list[_Line]], Counter[str]]:
    """Lines under this reward id by digest, and how many lines there are of it and of others."""
    rotated = [path for path in log.parent.glob(f"{log.name}.*") if path.suffix[1:].isdecimal()]
    files = [*sorted(rotated, key=lambda path: int(path.suffix[1:])), log]
    lines: dict[str, list[_Line]] = defaultdict(list)
    counts: Counter[str] = Counter()
    for file in files:
        for where, values in _json_lines(file):
            counts["lines"] += 1
            try:
                line = _Line(where, str(values["reward_id"]), str(values["dtype"]), float(values["reward"]))
                digest = str(values["ids"])
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(where, f"is no line of an audit log: {error} is missing or wrong") from None
            if line.reward_id == reward_id:
                lines[digest].append(line)
            else:
                counts["other"] += 1
    return lines, counts


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith("\n"):
                    break  # a server that still writes, or was killed
                try:
                    values = json.loads(line)
                except ValueError:
                    raise DataError(f"{path}:{number}", "is not valid JSON") from None
                if not isinstance(values, dict):
                    raise DataError(f"{path}:{number}", "is no line of an audit log")
                yield f"{path}:{number}", values
    except OSError as error:
        raise DataError(str(path), f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise DataError(str(path), "is not UTF-8 text") from None


def _sequences(model: RewardModel, data: Sequence[str]) -> Iterator[list[int]]:
    for text in data:
        for row in read_rows(SourceConfig.model_validate(parse_source(text))):
            yield from _render(model, row)


def _render(model: RewardModel, row: Row) -> list[list[int]]:
    try:
        if "chosen" in row.values:
            return [
                model.renderer.render(pair.prompt, answer)
                for pair in row_to_pairs(row)
                for answer in (pair.chosen, pair.rejected)
            ]
        return render_row(model, row.values)[1]
    except DataError:
        raise
    except (RenderError, ValueError) as error:
        raise DataError(row.where, str(error)) from None
