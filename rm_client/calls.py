"""Requests to `/score`, one class per answer shape: the payload, and how its answer is read. No I/O here.

Invariant: a field that the caller did not give is not sent, so that the server's default holds; and nothing is sent
that would mean something else than the caller wrote (a string where a list belongs, a NaN, a token that is no integer).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypedDict

from rm_client.answers import GroupsResult, OnError, ScoreResult, read_groups, read_score
from rm_client.errors import (
    InvalidRequestError,
    NonFiniteRewardError,
    ResponseError,
    TooLongError,
    VerifierFailedError,
    VerifierTimeoutError,
)

Message: TypeAlias = Mapping[str, Any]
"""``{"role": ..., "content": ...}``, as chat templates take it."""
Text: TypeAlias = str | Sequence[Message]
"""A string, or messages."""
Completion: TypeAlias = Text | Mapping[str, Any]
"""A string, messages, or ``{"content": string or messages, "finished": bool}``."""

Index: TypeAlias = tuple[int, ...]
"""Of an item: ``(completion,)``, or ``(group, completion)`` for groups."""


_ITEMS_OWN_FAULT = {
    cls.default_type
    for cls in (InvalidRequestError, TooLongError, NonFiniteRewardError, VerifierFailedError, VerifierTimeoutError)
}


class ScoreOptions(TypedDict, total=False):
    """What every scoring method takes beside its input. All optional.

    ``advantages``: True, or ``{"scale": "std"|"none"|"batch", "ddof": 0|1, "eps": float}``: also return them.
    ``truncation``: "error" or "left", what to do with a text over the model's limit (the server's default: error).
    ``text_as``: "raw" or "chat", how strings become token ids (the default is recorded in the checkpoint); "templated":
    strings are what a policy wrote with the chat template, special tokens and all; one that stops at an end token is
    finished.
    ``on_error``: "raise" (default) a PartialFailureError where an item has no reward, or "none": give None there. A
    failure of the request as a whole raises in either case.
    ``deadline_ms``: milliseconds after which the server may give the request up.
    ``token_rewards``: also return the reward as the model reads it at each token of an answer (docs/playground.md).
    """

    advantages: bool | Mapping[str, Any] | None
    truncation: Literal["error", "left"] | None
    text_as: Literal["raw", "chat", "templated"] | None
    on_error: OnError
    deadline_ms: float | None
    token_rewards: bool


@dataclass(frozen=True)
class FlatCall:
    """One group, or a flat list: the answer has one list."""

    payload: dict[str, Any]
    field_name: str
    num_items: int
    pin: str | None
    on_error: OnError

    @property
    def indexes(self) -> list[Index]:
        """Of the items, in order."""
        return [(i,) for i in range(self.num_items)]

    def part(self, indexes: Sequence[Index], reward_id: str) -> "FlatCall":
        """The same call for some of its items, to be scored by ``reward_id``, and without advantages."""
        rows = [self.payload[self.field_name][i] for (i,) in indexes]
        payload = {**_part_of(self.payload, reward_id), self.field_name: rows}
        return replace(self, payload=payload, num_items=len(rows))

    def read(self, answer: Mapping[str, Any]) -> ScoreResult:
        """Check the answer. Raises InvalidAnswerError, RewardIdMismatchError or PartialFailureError."""
        return read_score(answer, self.num_items, pin=self.pin, on_error=self.on_error, **_beside(self.payload))

    def failed(self, error: ResponseError) -> ScoreResult:
        """All items failed, each with its own reason: None for each where ``on_error="none"``, else ``error``."""
        entries = _item_entries(error, self.on_error, self.indexes)
        holes, zeros = [None] * self.num_items, [0.0] * self.num_items
        answer = {
            "rewards": holes, "advantages": zeros, "token_rewards": holes, "errors": entries, "reward_id": self.pin
        }  # fmt: skip
        return self.read(answer)


@dataclass(frozen=True)
class GroupsCall:
    """Many groups: the answer has one list per group."""

    payload: dict[str, Any]
    sizes: list[int]
    pin: str | None
    on_error: OnError

    @property
    def indexes(self) -> list[Index]:
        """Of the items, in order."""
        return [(g, i) for g, n in enumerate(self.sizes) for i in range(n)]

    def part(self, indexes: Sequence[Index], reward_id: str) -> "GroupsCall":
        """The same call for some of its items, to be scored by ``reward_id``, and without advantages."""
        members: dict[int, list[int]] = {}
        for g, i in indexes:
            members.setdefault(g, []).append(i)
        groups = [
            {**self.payload["groups"][g], "completions": [self.payload["groups"][g]["completions"][i] for i in items]}
            for g, items in members.items()
        ]
        payload = {**_part_of(self.payload, reward_id), "groups": groups}
        return replace(self, payload=payload, sizes=[len(items) for items in members.values()])

    def read(self, answer: Mapping[str, Any]) -> GroupsResult:
        """Check the answer. Raises InvalidAnswerError, RewardIdMismatchError or PartialFailureError."""
        return read_groups(answer, self.sizes, pin=self.pin, on_error=self.on_error, **_beside(self.payload))

    def failed(self, error: ResponseError) -> GroupsResult:
        """All items failed, each with its own reason: None for each where ``on_error="none"``, else ``error``."""
        entries = _item_entries(error, self.on_error, self.indexes)
        holes, zeros = [[None] * n for n in self.sizes], [[0.0] * n for n in self.sizes]
        answer = {
            "rewards": holes, "advantages": zeros, "token_rewards": holes, "errors": entries, "reward_id": self.pin
        }  # fmt: skip
        return self.read(answer)


def flat_call(
    field_name: str,
    items: Any,
    *,
    pin: str | None,
    beside: Mapping[str, Any] | None = None,
    advantages: bool | Mapping[str, Any] | None = None,
    truncation: str | None = None,
    text_as: str | None = None,
    on_error: OnError = "raise",
    deadline_ms: float | None = None,
    token_rewards: bool = False,
) -> FlatCall:
    """A request whose items stand in one list under ``field_name``, with the fields ``beside`` it."""
    rows = token_rows(items) if field_name == "input_ids" else listed(items, field_name)
    options = _options(pin, advantages, truncation, text_as, deadline_ms, token_rewards)
    return FlatCall({**(beside or {}), field_name: rows, **options}, field_name, len(rows), pin, _checked(on_error))


def groups_call(
    groups: Any,
    *,
    pin: str | None,
    advantages: bool | Mapping[str, Any] | None = None,
    truncation: str | None = None,
    text_as: str | None = None,
    on_error: OnError = "raise",
    deadline_ms: float | None = None,
    token_rewards: bool = False,
) -> GroupsCall:
    """A request of many groups, each ``{"prompt", "completions"}`` and what else the caller put there."""
    entries = [_group(group, at) for at, group in enumerate(listed(groups, "groups"))]
    sizes = [len(entry["completions"]) for entry in entries]
    options = _options(pin, advantages, truncation, text_as, deadline_ms, token_rewards)
    return GroupsCall({"groups": entries, **options}, sizes, pin, _checked(on_error))


def encode(payload: Mapping[str, Any]) -> bytes:
    """JSON as UTF-8. Raises InvalidRequestError for what JSON cannot carry (NaN, images, lone surrogates)."""
    try:
        text = json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=plain_value)
        return text.encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the request cannot be sent as JSON: {error}") from error


def listed(value: Any, field_name: str) -> list[Any]:
    """``list(value)``; a string or a mapping, which would fall apart into characters or keys, is refused by name."""
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        raise InvalidRequestError(f"{field_name}: expected a list, got {type(value).__name__}")
    return list(value)


def token_rows(input_ids: Any) -> list[list[int]]:
    """Nested lists of ints from lists, arrays or tensors."""
    rows = []
    for i, row in enumerate(listed(input_ids, "input_ids")):
        ids = row.tolist() if hasattr(row, "tolist") else listed(row, f"input_ids[{i}]")
        for token in ids if isinstance(ids, list) else [ids]:
            if isinstance(token, bool) or not hasattr(token, "__index__"):
                raise InvalidRequestError(f"input_ids[{i}]: expected integers, got {token!r}")
        rows.append([int(token) for token in listed(ids, f"input_ids[{i}]")])
    return rows


def plain_value(value: Any) -> Any:
    """What ``json`` cannot write by itself: data set columns arrive as NumPy scalars and arrays."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def _group(group: Any, at: int) -> dict[str, Any]:
    if not isinstance(group, Mapping):
        raise InvalidRequestError(f"groups[{at}]: expected a mapping, got {type(group).__name__}")
    for key in ("prompt", "completions"):
        if key not in group:
            raise InvalidRequestError(f"groups[{at}].{key}: missing")
    return {**group, "completions": listed(group["completions"], f"groups[{at}].completions")}


def _checked(on_error: OnError) -> OnError:
    if on_error not in ("raise", "none"):
        raise ValueError(f'on_error: expected "raise" or "none", got {on_error!r}')
    return on_error


def _options(
    pin: str | None,
    advantages: bool | Mapping[str, Any] | None,
    truncation: str | None,
    text_as: str | None,
    deadline_ms: float | None,
    token_rewards: bool,
) -> dict[str, Any]:
    wanted = {"scale": "std", "ddof": 1, "eps": 1e-4} if advantages is True else advantages
    fields = {
        "advantages": None if wanted is None or wanted is False else dict(wanted),
        "truncation": truncation,
        "text_as": text_as,
        "reward_id": pin,
        "deadline_ms": deadline_ms,
        "token_rewards": token_rewards or None,
    }
    return {key: value for key, value in fields.items() if value is not None}


def _part_of(payload: Mapping[str, Any], reward_id: str) -> dict[str, Any]:
    """What is sent beside some of the items. Advantages are of whole groups; the rewards, of one model."""
    fields = {key: value for key, value in payload.items() if key != "advantages"}
    return {**fields, "reward_id": reward_id} if reward_id else fields


def _beside(payload: Mapping[str, Any]) -> dict[str, bool]:
    """What was asked for beside the rewards, and must therefore be in the answer."""
    return {key: key in payload for key in ("advantages", "token_rewards")}


def _item_entries(error: ResponseError, on_error: OnError, indexes: list[Index]) -> list[dict[str, Any]]:
    """The reasons, one per item, of a request in which every item failed; a failure of the request itself raises.

    So does one that happens to have hit every item but lies in none of them (a deadline, a broken forward): a trainer
    that got None for everything would go on, and train on nothing.
    """
    # Said of items only, even where none is listed.
    alone = isinstance(error, NonFiniteRewardError | TooLongError | VerifierFailedError)
    if on_error == "raise" or not (alone or error.errors) or not {e.type for e in error.errors} <= _ITEMS_OWN_FAULT:
        raise error
    stated = {e.index: e for e in error.errors}
    return [
        {
            "index": list(index),
            "type": stated[index].type if index in stated else error.type,
            "message": stated[index].message if index in stated else error.message,
            "retryable": stated[index].retryable if index in stated else error.retryable,
        }
        for index in indexes
    ]
