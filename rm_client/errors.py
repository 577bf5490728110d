"""Everything the client can raise.

    RewardClientError                    base: .type .message .retryable .status (None without an answer)
    ├── ResponseError                    the server answered with an error
    │   ├── InvalidRequestError          400, 422   a field is wrong; the message names it
    │   │   └── TooLongError             422        a sequence is over the model's limit
    │   ├── UnauthorizedError            401        no or wrong API key
    │   ├── ForbiddenError               403
    │   ├── NotFoundError                404        no such route
    │   │   └── ModelNotFoundError       404        no such model
    │   ├── PinMismatchError             409        the server is not what the client expects
    │   │   ├── RewardIdMismatchError               another reward model (also when an answer carries another id)
    │   │   └── TokenizerMismatchError              token ids made by another tokenizer
    │   ├── TooLargeError                413
    │   ├── UnavailableError             502, 503   retried
    │   │   ├── OverloadedError
    │   │   ├── LoadingError
    │   │   ├── DrainingError
    │   │   ├── AsleepError
    │   │   └── NotReadyError
    │   ├── DeadlineExceededError        504
    │   ├── InternalError                500
    │   ├── NonFiniteRewardError         500        the model gave NaN or infinity
    │   └── VerifierFailedError          500        a verifier could not decide
    │       └── VerifierTimeoutError     500        it took longer than its limit
    ├── ConnectionFailedError            no answer at all; retried
    │   └── RequestTimeoutError          the server took the request and did not answer in time; not retried
    ├── InvalidAnswerError               an answer of the wrong shape or with a reward that is not a finite number
    └── PartialFailureError              some items have no reward: .rewards has the good ones, .errors the reasons

Invariant: an error is never turned into a number. Where a reward is missing, the caller sees an exception or ``None``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


class RewardClientError(Exception):
    """Base of all. ``type`` is machine-readable, ``retryable`` says whether the same call may succeed later."""

    default_type: ClassVar[str] = "error"
    default_retryable: ClassVar[bool] = False

    def __init__(
        self, message: str, *, type: str | None = None, retryable: bool | None = None, status: int | None = None
    ) -> None:
        super().__init__(message)  # the one argument, so that the exception can be pickled between processes
        self.message = message
        self.type = self.default_type if type is None else type
        self.retryable = self.default_retryable if retryable is None else retryable
        self.status = status
        self.num_attempts = 1

    def __str__(self) -> str:
        http = "" if self.status is None else f"HTTP {self.status} "
        tries = "" if self.num_attempts == 1 else f" (after {self.num_attempts} attempts)"
        return f"{http}{self.type}: {self.message}{tries}"


class ResponseError(RewardClientError):
    """The server answered with an error."""

    retry_after_seconds: float | None = None
    errors: "tuple[ItemError, ...]" = ()  # the reason for each item, where all items failed


class InvalidRequestError(ResponseError):
    """A field of the request is wrong; the message names it."""

    default_type = "invalid_request"


class TooLongError(InvalidRequestError):
    """One sequence is longer than the model takes; shorten it, or ask for ``truncation="left"``."""

    default_type = "too_long"


class UnauthorizedError(ResponseError):
    """No API key, or a wrong one."""

    default_type = "unauthorized"


class ForbiddenError(ResponseError):
    """The API key may not do this."""

    default_type = "forbidden"


class NotFoundError(ResponseError):
    """The server has no such route: is ``base_url`` right?"""

    default_type = "not_found"


class ModelNotFoundError(NotFoundError):
    """The server does not serve the model that was named."""

    default_type = "model_not_found"


class PinMismatchError(ResponseError):
    """The server is not the one that the client was told to expect."""

    default_type = "pin_mismatch"


class RewardIdMismatchError(PinMismatchError):
    """Another reward model is being served than the one whose ``reward_id`` was pinned."""

    default_type = "reward_id_mismatch"


class TokenizerMismatchError(PinMismatchError):
    """Token ids were made by another tokenizer than the server's."""

    default_type = "tokenizer_mismatch"


class TooLargeError(ResponseError):
    """The request is larger than the server takes; send fewer items at once."""

    default_type = "too_large"


class UnavailableError(ResponseError):
    """The server cannot take the request now. Retried by the client within its budget."""

    default_type = "unavailable"
    default_retryable = True


class OverloadedError(UnavailableError):
    """The server's queue is full."""

    default_type = "overloaded"


class LoadingError(UnavailableError):
    """The server is still loading its model."""

    default_type = "loading"


class DrainingError(UnavailableError):
    """The server is shutting down."""

    default_type = "draining"


class AsleepError(UnavailableError):
    """The server's model is off its device until someone wakes it."""

    default_type = "asleep"


class NotReadyError(UnavailableError):
    """The server is up, but no forward has succeeded lately."""

    default_type = "not_ready"


class DeadlineExceededError(ResponseError):
    """The request was not scored before its deadline."""

    default_type = "deadline_exceeded"
    default_retryable = True


class InternalError(ResponseError):
    """The server failed; its log says why."""

    default_type = "internal"


class NonFiniteRewardError(ResponseError):
    """The model gave NaN or infinity."""

    default_type = "non_finite_reward"


class VerifierFailedError(ResponseError):
    """A verifier could not decide on an answer: its process died, or ran out of memory."""

    default_type = "verifier_failed"


class VerifierTimeoutError(VerifierFailedError):
    """A verifier took longer than its limit on an answer."""

    default_type = "verifier_timeout"


class ConnectionFailedError(RewardClientError):
    """No answer: refused, reset, unreachable. Retried by the client within its budget."""

    default_type = "connection_failed"
    default_retryable = True


class RequestTimeoutError(ConnectionFailedError):
    """No answer within ``timeout``. Not retried: the server may still be computing the first one."""

    default_type = "timeout"


class InvalidAnswerError(RewardClientError):
    """The answer is not what was asked for: wrong number of rewards, or a reward that is not a finite number."""

    default_type = "invalid_answer"


@dataclass(frozen=True)
class ItemError:
    """Why one item has no reward. ``index`` is ``(completion,)``, or ``(group, completion)`` for groups."""

    index: tuple[int, ...]
    type: str
    message: str
    retryable: bool


class PartialFailureError(RewardClientError):
    """Some items have no reward.

    ``rewards`` has the shape of what was sent, with ``None`` where there is none; ``errors`` says why, one per hole.
    """

    default_type = "partial_failure"

    rewards: "list[float | None] | list[list[float | None]]"
    errors: tuple[ItemError, ...]

    @classmethod
    def of(
        cls, rewards: "list[float | None] | list[list[float | None]]", errors: tuple[ItemError, ...]
    ) -> "PartialFailureError":
        first = errors[0]
        at = "".join(f"[{i}]" for i in first.index)
        error = cls(
            f"{len(errors)} item(s) have no reward; the first, rewards{at}: {first.type}: {first.message}",
            retryable=all(e.retryable for e in errors),
            status=200,
        )
        error.rewards, error.errors = rewards, errors
        return error


_BY_TYPE: Mapping[str, type[ResponseError]] = {
    cls.default_type: cls
    for cls in (
        InvalidRequestError,
        TooLongError,
        UnauthorizedError,
        ForbiddenError,
        NotFoundError,
        ModelNotFoundError,
        RewardIdMismatchError,
        TokenizerMismatchError,
        TooLargeError,
        OverloadedError,
        LoadingError,
        DrainingError,
        AsleepError,
        NotReadyError,
        DeadlineExceededError,
        InternalError,
        NonFiniteRewardError,
        VerifierFailedError,
        VerifierTimeoutError,
    )
}
_BY_STATUS: Mapping[int, type[ResponseError]] = {
    400: InvalidRequestError,
    401: UnauthorizedError,
    403: ForbiddenError,
    404: NotFoundError,
    409: PinMismatchError,
    413: TooLargeError,
    422: InvalidRequestError,
    500: InternalError,
    502: UnavailableError,  # what a proxy says while the server behind it restarts
    503: UnavailableError,
    504: DeadlineExceededError,
}


def response_error(status: int, body: object, *, text: str = "") -> ResponseError:
    """Build the exception for an answer with an error status.

    ``body`` is the decoded JSON, or None where the answer was no JSON (a proxy's page); ``text`` is then quoted. The
    type in the body decides, then the status; an unknown one of both becomes a plain ResponseError.
    """
    error = body.get("error") if isinstance(body, Mapping) else None
    if isinstance(error, Mapping) and isinstance(error.get("message"), str):
        name, message, retryable = error.get("type"), str(error["message"]), error.get("retryable")
        cls = _BY_TYPE.get(str(name)) or _BY_STATUS.get(status, ResponseError)
        built = cls(
            message,
            type=name if isinstance(name, str) else None,
            retryable=retryable if isinstance(retryable, bool) else None,
            status=status,
        )
    else:
        quoted = " ".join(text.split())[:200] or "no body"
        built = _BY_STATUS.get(status, ResponseError)(f"not an answer of a reward server: {quoted}", status=status)
    if isinstance(body, Mapping):
        built.errors = item_errors(body.get("errors"))
    return built


def item_errors(value: Any) -> tuple[ItemError, ...]:
    """Read the ``errors`` list of an answer; entries that cannot be understood are skipped, holes are not."""
    found = []
    for entry in value if isinstance(value, list) else []:
        index = entry.get("index") if isinstance(entry, Mapping) else None
        index = [index] if isinstance(index, int) else index
        if isinstance(index, list) and all(isinstance(i, int) for i in index):
            found.append(
                ItemError(
                    tuple(index),
                    str(entry.get("type", "internal")),
                    str(entry.get("message", "the server gave no reason")),
                    entry.get("retryable") is True,
                )
            )
    return tuple(found)
