"""A trainer's flat batch as groups, and the rewards back in the batch's order. Pure functions.

Invariant: every item gets the reward of its own completion, whatever the order of the batch.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rm_client.calls import Completion, Text, plain_value
from rm_client.errors import InvalidRequestError

T = TypeVar("T")

_SPECIAL = re.compile(r"<[^<>\s]{1,40}>|\[\w{1,20}\]")
_FRONT = re.compile(rf"(?:{_SPECIAL.pattern})*\s*")
_LEAST_TAIL = 16
"""Characters of a prompt that was cut on the left which must be there, or a match would be chance."""
_MOST_TAILS = 64
"""Places looked at for such a tail, so that no text costs more than a few passes over it."""


@dataclass(frozen=True)
class Batch:
    """``groups`` for score_groups; item k of the flat batch is ``places[k] = (group, completion)``."""

    groups: list[dict[str, Any]]
    places: list[tuple[int, int]]

    def flat(self, rows: Sequence[Sequence[T]]) -> list[T]:
        """Rewards (or flags) per group, [[G], ...], as one list in the flat batch's order."""
        return [rows[group][item] for group, item in self.places]


def group_by_prompt(
    prompts: Sequence[Text],
    completions: Sequence[Completion],
    *,
    references: Sequence[Any] | None = None,
    finished: Sequence[bool] | None = None,
) -> Batch:
    """Bring items with equal prompt (and reference) together, so that the server computes each prompt once.

    N prompts and N completions; ``finished``: False for a completion that was cut by its length limit. Raises
    ValueError where the lengths differ: one answer must never be spread over several completions; InvalidRequestError
    for a prompt or reference that is not JSON.
    """
    for name, column in (("prompts", prompts), ("references", references), ("finished", finished)):
        if column is not None and len(column) != len(completions):
            raise ValueError(f"{len(completions)} completions, but {len(column)} {name}; one per completion is needed")
    groups: list[dict[str, Any]] = []
    places: list[tuple[int, int]] = []
    known: dict[str, int] = {}
    for k, completion in enumerate(completions):
        prompt = plain_messages(prompts[k])
        group: dict[str, Any] = {"prompt": prompt}
        if references is not None and references[k] is not None:
            group["reference"] = references[k]
        try:
            # As they will be sent: two arrays that only print alike must not share one reference.
            name = json.dumps(group, default=plain_value)
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"item {k}: its prompt or reference cannot be sent as JSON: {error}") from None
        at = known.setdefault(name, len(groups))
        if at == len(groups):
            groups.append({**group, "completions": []})
        content = plain_messages(completion)
        cut = finished is not None and not finished[k]
        groups[at]["completions"].append({"content": content, "finished": False} if cut else content)
        places.append((at, len(groups[at]["completions"]) - 1))
    return Batch(groups, places)


def plain_messages(text: Any) -> Any:
    """Messages without the empty keys that an Arrow table adds to rows of mixed shape; strings as they are."""
    if isinstance(text, str | Mapping):
        return text
    return [{key: value for key, value in message.items() if value is not None or key == "content"} for message in text]


def answer_start(query: str, prompt: str) -> int | None:
    """Where the answer begins in a templated text that holds prompt and answer; None where that cannot be told.

    Special tokens that the prompt does not have (BOS, padding) may stand in front of it, and the prompt may have lost
    its beginning to a limit of length, behind a BOS or not.
    """
    front = _FRONT.match(query)
    at = query.find(prompt, 0, (front.end() if front else 0) + len(prompt))
    if at >= 0:
        return at + len(prompt)
    first = _SPECIAL.match(query)
    for begin in {0, first.end() if first else 0}:
        head, place = query[begin : begin + _LEAST_TAIL], 0
        for _ in range(_MOST_TAILS if len(head) == _LEAST_TAIL else 0):
            place = prompt.find(head, place + 1)
            if place < 0:
                break
            if query.startswith(prompt[place:], begin):
                return begin + len(prompt) - place
    return None
