"""From settled items to the JSON of an answer, in the shape in which they were sent.

Invariant: a place in ``rewards`` holds the raw reward of the item at the same place in the request, or null and one
entry of ``errors`` that says why.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rm_server.errors import ServerError
from rm_server.groups import Request
from rm_server.schema import ScoreRequest
from rm_server.scorer import ServedModel

T = TypeVar("T")


class AllItemsFailedError(ServerError):
    """No item has a reward: the whole answer is the error of one of them, and ``errors`` has them all."""

    def __init__(self, cause: ServerError, errors: list[dict[str, Any]]) -> None:
        more = f" (and {len(errors) - 1} more of {len(errors)} items)" if len(errors) > 1 else ""
        super().__init__(cause.message + more)
        self.status, self.type, self.retryable = cause.status, cause.type, cause.retryable
        self.cause = cause
        self.errors = errors

    def headers(self) -> dict[str, str]:
        return self.cause.headers()

    def body(self) -> dict[str, Any]:
        return {**super().body(), "errors": self.errors}


def build_answer(request: ScoreRequest, scored: Request, model: ServedModel, total_seconds: float) -> dict[str, Any]:
    """The body of a 200.

    Raises AllItemsFailedError where no item has a reward; a retryable error, if there is one, decides its status.
    """
    sizes = [len(group.completions) for group in request.groups] if request.groups is not None else None
    place = _places(sizes)
    errors = [
        {"index": place(slot), "type": error.type, "message": error.message, "retryable": error.retryable}
        for slot, error in sorted(scored.errors.items())
    ]
    if errors and len(errors) == len(scored.rewards):
        in_order = [error for _, error in sorted(scored.errors.items())]
        raise AllItemsFailedError(next((error for error in in_order if error.retryable), in_order[0]), errors)
    queue_seconds = max(total_seconds - scored.tokenize_seconds - scored.forward_seconds, 0.0)
    answer: dict[str, Any] = {"rewards": _shaped(scored.rewards, sizes)}
    if request.advantages is not None:
        answer["advantages"] = _advantages(request, scored.rewards, sizes)
    if scored.components is not None:
        answer["components"] = {name: _shaped(values, sizes) for name, values in scored.components.items()}
    answer["truncated"] = _shaped(scored.truncated, sizes)
    if request.token_rewards:
        answer["token_rewards"] = _shaped([_token_rewards(scored, slot) for slot in range(len(scored.rewards))], sizes)
    if scored.over_training_length:
        answer["over_training_length"] = [place(slot) for slot in sorted(scored.over_training_length)]
    if errors:
        answer["errors"] = errors
    if request.groups is not None and any(group.id is not None for group in request.groups):
        answer["ids"] = [group.id for group in request.groups]
    return answer | {
        "reward_id": model.reward_id,
        "model": model.name,
        "usage": {"tokens": scored.num_tokens, "computed_tokens": scored.computed_tokens},
        "timing": {
            "queue_ms": round(queue_seconds * 1000, 3),
            "tokenize_ms": round(scored.tokenize_seconds * 1000, 3),
            "forward_ms": round(scored.forward_seconds * 1000, 3),
        },
    }


def _token_rewards(scored: Request, slot: int) -> dict[str, Any] | None:
    reading = scored.readings.get(slot)
    if reading is None or reading.rewards is None or scored.rewards[slot] is None:
        return None
    # What is not a finite number is written as null.
    return {"start": reading.start, "tokens": reading.texts, "rewards": reading.rewards.tolist()}


def _advantages(request: ScoreRequest, rewards: Sequence[float | None], sizes: list[int] | None) -> Any:
    from rm_client.advantages import grpo_advantages

    options = request.advantages
    assert options is not None, "this is a bug: advantages were not asked for"
    groups = [list(rewards)] if sizes is None else _shaped(rewards, sizes)
    if not any(groups):
        return [] if sizes is None else [[] for _ in sizes]
    advantages = grpo_advantages(groups, scale=options.scale, ddof=options.ddof, eps=options.eps)
    return advantages[0] if sizes is None else advantages


def _shaped(flat: Sequence[T], sizes: list[int] | None) -> Any:
    if sizes is None:
        return list(flat)
    ends = iter(flat)
    return [[next(ends) for _ in range(size)] for size in sizes]


def _places(sizes: list[int] | None) -> Callable[[int], list[int]]:
    if sizes is None:
        return lambda slot: [slot]
    places = [[group, number] for group, size in enumerate(sizes) for number in range(size)]
    return lambda slot: places[slot]
