"""One call to `/score`, until no item is left that may yet get a reward: what to send next, and what came. No I/O.

Invariant: a reward that was answered is kept and not asked for again; all rewards of a call are of one reward model;
and an item that stays without one has the reason that was given last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rm_client.advantages import grpo_advantages
from rm_client.answers import GroupsResult, ScoreResult
from rm_client.calls import FlatCall, GroupsCall, Index, encode
from rm_client.errors import (
    InvalidAnswerError,
    ItemError,
    ResponseError,
    RewardClientError,
    RewardIdMismatchError,
    UnavailableError,
    response_error,
)


class Scoring:
    """``content`` is the body of the next attempt: the whole call, then the items for which the server said "not now".

    ``answer``: what was answered so far, as if it had been one answer. ``usage`` and ``timing`` in it are of all
    attempts; advantages are taken anew over each whole group, by the function that the server itself uses.
    """

    def __init__(self, call: FlatCall | GroupsCall) -> None:
        self._whole: FlatCall | GroupsCall = replace(call, on_error="none")
        self._part = self._whole
        self._may_have_holes = call.on_error == "none"
        self._places: dict[Index, Index] = {}  # of an item in the part: its index in the whole
        self._result: ScoreResult | GroupsResult | None = None
        self.answer: dict[str, Any] = {}
        self.content = encode(call.payload)

    def take(self, answer: Mapping[str, Any]) -> RewardClientError | None:
        """Read an answer. None where the call is over; else the error for which items are to be asked for again.

        Raises InvalidAnswerError for an answer that does not fit what was sent.
        """
        try:
            self.answer = dict(answer) if self._result is None else self._merged(answer)
            self._result = self._whole.read(self.answer)
        except RewardIdMismatchError as error:
            return error
        passing = [error for error in self._result.errors if _may_pass(error)]
        is_lost = not self._may_have_holes and len(passing) < len(self._result.errors)
        if not passing or is_lost:
            return None
        return self._ask_again(passing, self._result.reward_id)

    def given_up(self, error: RewardClientError) -> Mapping[str, Any]:
        """After the last attempt failed: the answer with its holes. Raises ``error`` where there is no answer."""
        if self._result is None or (isinstance(error, RewardIdMismatchError) and self._whole.pin is not None):
            raise error
        stated = {entry.index: entry for entry in error.errors} if isinstance(error, ResponseError) else {}
        of_all = ItemError((), error.type, error.message, error.retryable)
        self._say({place: stated.get(index, of_all) for index, place in self._places.items()}, self.answer)
        return self.answer

    def _ask_again(self, passing: Sequence[ItemError], reward_id: str) -> ResponseError:
        self._part = self._whole.part([error.index for error in passing], reward_id)
        self._places = dict(zip(self._part.indexes, (error.index for error in passing), strict=True))
        self.content = encode(self._part.payload)
        first = passing[0]
        error = _as_response(first)
        error.message = f"{len(passing)} item(s) have no reward yet; the first: {first.message}"
        error.errors = tuple(replace(entry, index=at) for at, entry in zip(self._places, passing, strict=True))
        return error

    def _merged(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """The answer so far with the rewards of another one in its holes."""
        before, more = self._result, self._part.read(answer)
        assert before is not None, "this is a bug: there is nothing to merge with"
        if more.reward_id != before.reward_id:
            raise RewardIdMismatchError(
                f"other items of this call were scored by {before.reward_id}, the answer for these is from "
                f"{more.reward_id}; the reward model has changed"
            )
        try:
            merged = {**self.answer, **self._filled(self.answer, answer)}
        except (TypeError, KeyError, IndexError, AttributeError) as error:
            raise InvalidAnswerError(f"not in the shape of the rewards: {error!r}") from error
        if "advantages" in self._whole.payload:
            merged["advantages"] = grpo_advantages(merged["rewards"], **self._whole.payload["advantages"])
        for name, one, other in (("usage", before.usage, more.usage), ("timing", before.timing, more.timing)):
            later = asdict(other)
            merged[name] = {key: value + later[key] for key, value in asdict(one).items()}
        stated = {entry.index: entry for entry in more.errors}
        self._say({place: stated.get(index) for index, place in self._places.items()}, merged)
        return merged

    def _filled(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of ``old`` that have a value for each item, with those of the part at their places."""
        filled: dict[str, Any] = {}
        for key in ("rewards", "truncated", "token_rewards"):
            if old.get(key) is not None and new.get(key) is not None:
                filled[key] = _put(old[key], new[key], self._places)
        if old.get("components"):
            parts = new["components"]
            filled["components"] = {
                name: _put(rows, parts[name], self._places) for name, rows in old["components"].items()
            }
        if new.get("over_training_length"):
            places = {self._places[tuple(index)] for index in new["over_training_length"]}
            places |= {tuple(index) for index in old.get("over_training_length", ())}
            filled["over_training_length"] = [list(place) for place in sorted(places)]
        return filled

    def _say(self, reasons: Mapping[Index, ItemError | None], answer: dict[str, Any]) -> None:
        """Put new reasons, or none, in the place of those that the items at these places had in ``answer``."""
        assert self._result is not None, "this is a bug: nothing was answered"
        entries = {error.index: error for error in self._result.errors if error.index not in reasons}
        entries |= {place: reason for place, reason in reasons.items() if reason is not None}
        answer["errors"] = [
            {"index": list(at), "type": entry.type, "message": entry.message, "retryable": entry.retryable}
            for at, entry in sorted(entries.items())
        ]
        if not entries:
            del answer["errors"]


def _as_response(entry: ItemError) -> ResponseError:
    error = {"type": entry.type, "message": entry.message, "retryable": entry.retryable}
    return response_error(503, {"error": error})


def _may_pass(entry: ItemError) -> bool:
    """Whether a whole request with this error would be tried again. A deadline that has passed is the caller's own."""
    return entry.retryable and isinstance(_as_response(entry), UnavailableError)


def _put(old: Any, new: Any, places: Mapping[Index, Index]) -> list[Any]:
    """A copy of ``old``, [N] or [[G], ...], with the items of ``new`` at their places."""
    is_flat = all(len(place) == 1 for place in places.values())
    rows = list(old) if is_flat else [list(row) for row in old]
    for index, place in places.items():
        if is_flat:
            rows[place[0]] = new[index[0]]
        else:
            rows[place[0]][place[1]] = new[index[0]][index[1]]
    return rows
