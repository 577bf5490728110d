"""The directory of a run: who may write to it, what lies in it, and how the report reads it back.

Invariant: one process trains into a directory at a time, and every file but the metrics appears whole.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rm_core.checkpoint import RECORD_FILE, CheckpointRecord, read_record
from rm_train.data import content_text, message_text, prompt_key
from rm_train.encode import EncodedPair
from rm_train.evaluation import Rewards
from rm_train.row_reader import Content
from rm_train.state import STATE_FILE

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
CHECK_FILE = "check.json"
EVALUATION_FILE = "evaluation.jsonl"
CHECKPOINT = "checkpoint"
_WORST = 50
"""So many of the worst mistakes are kept with their texts."""


class RunError(ValueError):
    """A run directory that is in use or holds no run. One line that says what to do."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory, which must exist, until the block ends or the process dies. RunError where another does."""
    # the directory itself is locked, so no file is left behind; the kernel frees it when the holder is killed
    held = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"{directory}: another process is training into it; wait for it, or choose another run.name"
            ) from None
        except OSError:
            pass  # a file system without locks (some network mounts): nothing to hold
        yield
    finally:
        os.close(held)


def clear_leftovers(directory: Path) -> None:
    """Remove what a killed run left half-written; a checkpoint that it had just moved aside is put back.

    Only while the directory is locked.
    """
    checkpoint = directory / CHECKPOINT
    for left in sorted(directory.glob(f".{CHECKPOINT}-*")):
        if not checkpoint.exists() and (left / CHECKPOINT / RECORD_FILE).is_file():
            (left / CHECKPOINT).rename(checkpoint)
        shutil.rmtree(left)
    for left in directory.glob(".*.tmp"):
        left.unlink()


def stopped_before_first_save(directory: Path) -> bool:
    """Whether a run began here and neither saved a state nor finished."""
    return not (directory / STATE_FILE).is_file() and _is_unfinished(directory)


def check_nothing_to_resume(directory: Path) -> None:
    """Raise RunError where a run saved a state and did not finish: a new one would throw its work away."""
    if (directory / STATE_FILE).is_file() and _is_unfinished(directory):
        raise RunError(
            f"{directory}: holds the state of an unfinished run; --resume goes on with it, --overwrite starts again"
        )


def _is_unfinished(directory: Path) -> bool:
    config, record = directory / CONFIG_FILE, directory / CHECKPOINT / RECORD_FILE
    if not config.is_file():
        return False
    return not record.is_file() or _is_of_an_earlier_run(record, config)


def _is_of_an_earlier_run(record: Path, config: Path) -> bool:
    """Whether a checkpoint is older than the config: a run of the same name left it, and this one has written none."""
    return record.stat().st_mtime_ns < config.stat().st_mtime_ns


def forget_evaluation(directory: Path) -> None:
    """Remove the evaluation of an earlier run, so that no report takes it for that of the run which begins."""
    (directory / EVALUATION_FILE).unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is the old or the new one at every moment."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_evaluation(
    directory: Path, rewards: Rewards, encoded: Sequence[EncodedPair], bag_of_words: Sequence[float] | None
) -> None:
    """Write one line for each evaluation pair: rewards, lengths, labels; the worst mistakes with their texts.

    ``bag_of_words`` are that model's margins, in the pairs' order.
    """
    margins = rewards.chosen - rewards.rejected
    # of two answers that are equally good neither is a mistake
    wrong = [index for index, item in enumerate(encoded) if margins[index] <= 0 and item.pair.label != 0.5]
    worst = set(sorted(wrong, key=lambda index: float(margins[index]))[:_WORST])
    lines = []
    for index, item in enumerate(encoded):
        pair = item.pair
        line: dict[str, Any] = {
            "where": pair.where,
            "prompt": prompt_key(pair)[:16],
            "category": pair.category,
            "source": pair.source,
            "chosen": float(rewards.chosen[index]),
            "rejected": float(rewards.rejected[index]),
            "label": 1.0 if pair.label is None else pair.label,
            "weight": pair.weight,
            "row_part": pair.row_part,
            "chosen_length": len(content_text(pair.chosen)),
            "rejected_length": len(content_text(pair.rejected)),
            "truncated": item.truncated,
        }
        if bag_of_words is not None:
            line["bag_of_words"] = float(bag_of_words[index])
        if index in worst:
            line["text"] = {
                "prompt": "" if pair.prompt is None else readable(pair.prompt),
                "chosen": readable(pair.chosen),
                "rejected": readable(pair.rejected),
            }
        lines.append(json.dumps(line))
    write_whole(directory / EVALUATION_FILE, "".join(f"{line}\n" for line in lines))


def readable(content: Content) -> str:
    """A text as it is; a conversation with the role before each turn, save for a lone answer."""
    if isinstance(content, str):
        return content
    if len(content) == 1 and content[0].get("role") in ("assistant", "user"):
        return message_text(content[0])
    return "\n\n".join(f"{message['role']}: {message_text(message)}" for message in content)


@dataclass(frozen=True)
class Run:
    """What lies in a run's directory; what a run has not written (yet) is empty or None."""

    directory: Path
    config: dict[str, Any]
    steps: list[dict[str, Any]]
    """Lines of the metrics file that are steps."""
    evaluations: list[dict[str, Any]]
    """Lines of the metrics file that are evaluations."""
    record: CheckpointRecord | None
    pairs: list[dict[str, Any]]
    """Lines of the evaluation file."""
    check: dict[str, Any] | None


def read_run(directory: Path) -> Run:
    """Read a run's files. Raises RunError where the directory holds none.

    The checkpoint that an earlier run of the same name left is none of this run's.
    """
    config = directory / CONFIG_FILE
    if not config.is_file():
        raise RunError(f"{directory}: holds no run (no {CONFIG_FILE}); name a directory that rm-train fit wrote")
    lines = _json_lines(directory / METRICS_FILE)
    check = directory / CHECK_FILE
    checkpoint = directory / CHECKPOINT
    record = read_record(checkpoint) if checkpoint.is_dir() else None
    pairs = _json_lines(directory / EVALUATION_FILE)
    # a finished run has its evaluation, whatever times a copy of its files has
    if record is not None and not pairs and _is_of_an_earlier_run(checkpoint / RECORD_FILE, config):
        record = None
    return Run(
        directory,
        json.loads(config.read_text(encoding="utf-8")),
        [line for line in lines if "loss" in line],
        [line for line in lines if "eval_loss" in line],
        record,
        pairs,
        json.loads(check.read_text(encoding="utf-8")) if check.is_file() else None,
    )


def _json_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    # not splitlines(): a text may hold U+2028 and its like; the last line of a killed run may be half a line
    lines = path.read_text(encoding="utf-8").split("\n")
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(json.loads(line))
        except ValueError:
            if number == len(lines):
                break
            raise RunError(f"{path}:{number}: is not valid JSON") from None
    return found
