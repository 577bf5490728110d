"""Answers of the server as typed results, checked against what was sent. No I/O here.

Invariant: a result has exactly one reward, or one stated reason, for every item that was sent; every reward is a
finite float; and a pinned ``reward_id`` is the answered one. Anything else raises.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from rm_client.errors import (
    InvalidAnswerError,
    ItemError,
    PartialFailureError,
    RewardIdMismatchError,
    item_errors,
)

OnError: TypeAlias = Literal["raise", "none"]

Row: TypeAlias = list[float | None]


@dataclass(frozen=True)
class Usage:
    """Tokens of the request as they stand (``tokens``) and as computed after prefix sharing (``computed_tokens``)."""

    tokens: int = 0
    computed_tokens: int = 0


@dataclass(frozen=True)
class Timing:
    """Where the server spent its time, in milliseconds."""

    queue_ms: float = 0.0
    tokenize_ms: float = 0.0
    forward_ms: float = 0.0


@dataclass(frozen=True)
class TokenRewards:
    """The reward as the model reads it at each token of an answer, had the answer ended there: T values, the last one
    the reward. For reading where it moved; a value in the middle is no reward for that token.

    ``start``: place of the answer's first token in its sequence. ``tokens``: what each adds to the text. ``rewards``:
    None where the model gave no finite number.
    """

    start: int
    tokens: list[str]
    rewards: Row


@dataclass(frozen=True)
class ScoreResult:
    """Scores of one group or of a flat list of N items, in the order in which they were sent.

    ``rewards``: N raw logits, ``None`` where ``on_error="none"`` and the item failed (``errors`` says why).
    ``advantages``: N group-relative advantages if they were asked for, else None; 0 where there is no reward.
    ``truncated``: N flags, or None if the server sent none. ``components``: the parts of each reward, where the
    server combines several. ``token_rewards``: N readings if they were asked for, else None; None where there is no
    reward. ``raw`` is the whole answer. Where items were asked for again, it is all as one answer; ``usage`` and
    ``timing`` are sums.
    """

    rewards: Row
    reward_id: str
    model: str
    advantages: Row | None = None
    truncated: list[bool] | None = None
    token_rewards: list[TokenRewards | None] | None = None
    components: Any = None
    errors: tuple[ItemError, ...] = ()
    usage: Usage = Usage()
    timing: Timing = Timing()
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class GroupsResult:
    """Scores of P groups: as ScoreResult, with one list per group in ``rewards``, ``advantages``, ``truncated`` and
    ``token_rewards``."""

    rewards: list[Row]
    reward_id: str
    model: str
    advantages: list[Row] | None = None
    truncated: list[list[bool]] | None = None
    token_rewards: list[list[TokenRewards | None]] | None = None
    components: Any = None
    errors: tuple[ItemError, ...] = ()
    usage: Usage = Usage()
    timing: Timing = Timing()
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class ServerInfo:
    """What `/info` says. Fields that the server does not state are None; ``raw`` is the whole answer."""

    reward_id: str | None
    model: str | None
    tokenizer_hash: str | None
    max_length: int | None
    training_length: int | None
    reward_mean: float | None
    reward_std: float | None
    raw: Mapping[str, Any] = field(repr=False)


def read_score(
    answer: Mapping[str, Any],
    num_items: int,
    *,
    pin: str | None,
    on_error: OnError,
    advantages: bool,
    token_rewards: bool,
) -> ScoreResult:
    """Check the answer to one group or flat list of ``num_items``."""
    _check_pin(answer, pin)
    rewards = _rewards(answer.get("rewards"), num_items, "rewards")
    errors = _errors(answer, [((i,), r) for i, r in enumerate(rewards)])
    if errors and on_error == "raise":
        raise PartialFailureError.of(rewards, errors)
    return ScoreResult(
        rewards=rewards,
        advantages=_rewards(answer.get("advantages"), num_items, "advantages") if advantages else None,
        truncated=_flags(answer.get("truncated"), num_items, "truncated"),
        token_rewards=_readings(answer.get("token_rewards"), num_items, "token_rewards") if token_rewards else None,
        errors=errors,
        **_common(answer),
    )


def read_groups(
    answer: Mapping[str, Any],
    sizes: Sequence[int],
    *,
    pin: str | None,
    on_error: OnError,
    advantages: bool,
    token_rewards: bool,
) -> GroupsResult:
    """Check the answer to groups of these sizes."""
    _check_pin(answer, pin)
    rewards = [_rewards(*row) for row in _rows(answer.get("rewards"), sizes, "rewards")]
    errors = _errors(answer, [((g, i), r) for g, row in enumerate(rewards) for i, r in enumerate(row)])
    if errors and on_error == "raise":
        raise PartialFailureError.of(rewards, errors)
    flags = answer.get("truncated")
    return GroupsResult(
        rewards=rewards,
        advantages=[_rewards(*row) for row in _rows(answer.get("advantages"), sizes, "advantages")]
        if advantages
        else None,
        truncated=None if flags is None else [_flags(*row) or [] for row in _rows(flags, sizes, "truncated")],
        token_rewards=[_readings(*row) for row in _rows(answer.get("token_rewards"), sizes, "token_rewards")]
        if token_rewards
        else None,
        errors=errors,
        **_common(answer),
    )


def read_info(answer: Mapping[str, Any]) -> ServerInfo:
    """Take the fields this client uses out of `/info`."""

    def number(key: str) -> float | None:
        value = answer.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def text(key: str) -> str | None:
        value = answer.get(key)
        return value if isinstance(value, str) else None

    def whole(key: str) -> int | None:
        value = number(key)
        return None if value is None else int(value)

    return ServerInfo(
        reward_id=text("reward_id"),
        model=text("model"),
        tokenizer_hash=text("tokenizer_hash") or text("tokenizer"),
        max_length=whole("max_length"),
        training_length=whole("training_length"),
        reward_mean=number("reward_mean"),
        reward_std=number("reward_std"),
        raw=answer,
    )


def _check_pin(answer: Mapping[str, Any], pin: str | None) -> None:
    if pin is not None and answer.get("reward_id") != pin:
        raise RewardIdMismatchError(
            f"pinned reward_id {pin}, but the answer is from {answer.get('reward_id')}; the reward model has changed"
        )


def _rows(value: Any, sizes: Sequence[int], field_name: str) -> list[tuple[Any, int, str]]:
    """Pair each group's part of ``value`` with the length it must have and its name."""
    if not isinstance(value, list) or len(value) != len(sizes):
        raise InvalidAnswerError(f"{field_name}: sent {len(sizes)} groups, got {_counted(value)}")
    return [(row, size, f"{field_name}[{g}]") for g, (row, size) in enumerate(zip(value, sizes, strict=True))]


def _rewards(value: Any, num_items: int, field_name: str) -> Row:
    if not isinstance(value, list) or len(value) != num_items:
        raise InvalidAnswerError(f"{field_name}: sent {num_items} items, got {_counted(value)}")
    for i, number in enumerate(value):
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise InvalidAnswerError(f"{field_name}[{i}]: expected a finite number or null, got {number!r}")
    return [None if number is None else float(number) for number in value]


def _readings(value: Any, num_items: int, field_name: str) -> list[TokenRewards | None]:
    if not isinstance(value, list) or len(value) != num_items:
        raise InvalidAnswerError(f"{field_name}: sent {num_items} items, got {_counted(value)}")
    readings: list[TokenRewards | None] = []
    for i, reading in enumerate(value):
        if reading is None:
            readings.append(None)
            continue
        tokens = reading.get("tokens") if isinstance(reading, Mapping) else None
        if not isinstance(tokens, list):
            raise InvalidAnswerError(f"{field_name}[{i}]: expected start, tokens and rewards, got {reading!r:.80}")
        rewards = _rewards(reading.get("rewards"), len(tokens), f"{field_name}[{i}].rewards")
        readings.append(TokenRewards(int(reading.get("start") or 0), [str(token) for token in tokens], rewards))
    return readings


def _flags(value: Any, num_items: int, field_name: str) -> list[bool] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != num_items or not all(isinstance(v, bool) for v in value):
        raise InvalidAnswerError(f"{field_name}: expected {num_items} booleans, got {_counted(value)}")
    return value


def _errors(answer: Mapping[str, Any], rewards: list[tuple[tuple[int, ...], float | None]]) -> tuple[ItemError, ...]:
    """One ItemError per missing reward, in order; a hole the server did not explain gets one too."""
    stated = {error.index: error for error in item_errors(answer.get("errors"))}
    return tuple(
        stated.get(index) or ItemError(index, "internal", "the server gave neither a reward nor a reason", False)
        for index, reward in rewards
        if reward is None
    )


def _common(answer: Mapping[str, Any]) -> dict[str, Any]:
    usage, timing = answer.get("usage"), answer.get("timing")
    usage, timing = (usage if isinstance(usage, Mapping) else {}), (timing if isinstance(timing, Mapping) else {})
    return {
        "reward_id": str(answer.get("reward_id", "")),
        "model": str(answer.get("model", "")),
        "components": answer.get("components"),
        "usage": Usage(*(int(usage.get(key) or 0) for key in ("tokens", "computed_tokens"))),
        "timing": Timing(*(float(timing.get(key) or 0.0) for key in ("queue_ms", "tokenize_ms", "forward_ms"))),
        "raw": answer,
    }


def _counted(value: Any) -> str:
    return f"{len(value)}" if isinstance(value, list) else f"a {type(value).__name__}"
