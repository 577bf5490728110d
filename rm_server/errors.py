"""Everything that the server can answer instead of a reward, as one tree with one mapping to HTTP.

    ServerError                        status  type                  retryable
    ├── InvalidRequestError            422     invalid_request       no    a field is wrong; the message names it
    │   ├── MalformedBodyError         400     invalid_request       no    not JSON, not UTF-8
    │   ├── MethodNotAllowedError      405     invalid_request       no
    │   └── TooLongError               422     too_long              no    one sequence over the length limit
    ├── UnauthorizedError              401     unauthorized          no
    ├── ForbiddenError                 403     forbidden             no
    ├── NotFoundError                  404     not_found             no
    ├── RewardIdMismatchError          409     reward_id_mismatch    no
    ├── TokenizerMismatchError         409     tokenizer_mismatch    no
    ├── BusyError                      409     busy                  yes   another change of the model is under way
    ├── CheckpointRefusedError         422     checkpoint_refused    no    it cannot be loaded, or is not what it was
    ├── TooLargeError                  413     too_large             no    can never fit, whatever the load
    ├── UnavailableError               503     each with Retry-After
    │   ├── OverloadedError            503     overloaded            yes
    │   ├── LoadingError               503     loading               yes
    │   ├── DrainingError              503     draining              yes
    │   ├── AsleepError                503     asleep                yes   its device is lent to others
    │   ├── NotEnoughMemoryError       503     not_enough_memory     yes   for another checkpoint, or to wake
    │   └── NotReadyError              503     not_ready             yes   no forward has succeeded lately
    ├── DeadlineExceededError          504     deadline_exceeded     yes
    ├── NonFiniteRewardError           500     non_finite_reward     no    NaN or infinity for one item
    ├── VerifierFailedError            500     verifier_failed       no    a verifier could not decide on one item
    │   └── VerifierTimeoutError       500     verifier_timeout      no    it took longer than its limit
    └── InternalError                  500     internal              no

Invariant: a message names fields, limits and counts; it never holds what the caller wrote.
The same classes are raised for a whole request and kept as values for single items.
"""

from typing import Any


class ServerError(Exception):
    """Base of all: ``status``, ``type`` and ``retryable`` belong to the class, the message to the case."""

    status: int = 500
    type: str = "internal"
    retryable: bool = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def headers(self) -> dict[str, str]:
        """HTTP headers that go with the answer."""
        return {}

    def body(self) -> dict[str, Any]:
        """``{"error": {"type", "message", "retryable"}}``."""
        return {"error": {"type": self.type, "message": self.message, "retryable": self.retryable}}


class InvalidRequestError(ServerError):
    status, type = 422, "invalid_request"


class MalformedBodyError(InvalidRequestError):
    status = 400


class MethodNotAllowedError(InvalidRequestError):
    status = 405


class TooLongError(InvalidRequestError):
    type = "too_long"


class UnauthorizedError(ServerError):
    status, type = 401, "unauthorized"

    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": "Bearer"}


class ForbiddenError(ServerError):
    status, type = 403, "forbidden"


class NotFoundError(ServerError):
    status, type = 404, "not_found"


class RewardIdMismatchError(ServerError):
    status, type = 409, "reward_id_mismatch"


class TokenizerMismatchError(ServerError):
    status, type = 409, "tokenizer_mismatch"


class BusyError(ServerError):
    status, type, retryable = 409, "busy", True

    def __init__(self, message: str, retry_after_seconds: int = 1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds

    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_after_seconds)}


class CheckpointRefusedError(ServerError):
    status, type = 422, "checkpoint_refused"


class TooLargeError(ServerError):
    status, type = 413, "too_large"


class UnavailableError(ServerError):
    """Cannot be served now. 503 and never 429: some trainers give up for good on any 4xx."""

    status, retryable = 503, True

    def __init__(self, message: str, retry_after_seconds: int = 1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds

    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_after_seconds)}


class OverloadedError(UnavailableError):
    type = "overloaded"


class LoadingError(UnavailableError):
    type = "loading"


class DrainingError(UnavailableError):
    type = "draining"


class AsleepError(UnavailableError):
    type = "asleep"


class NotEnoughMemoryError(UnavailableError):
    type = "not_enough_memory"


class NotReadyError(UnavailableError):
    type = "not_ready"


class DeadlineExceededError(ServerError):
    status, type, retryable = 504, "deadline_exceeded", True


class NonFiniteRewardError(ServerError):
    type = "non_finite_reward"


class VerifierFailedError(ServerError):
    type = "verifier_failed"


class VerifierTimeoutError(VerifierFailedError):
    type = "verifier_timeout"


class InternalError(ServerError):
    """Ours. The log says where."""


def describe_exception(error: BaseException) -> str:
    """Type and place of an exception for the log, without its text, in which a prompt may be quoted."""
    place, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        place, trace = f" at {code.co_filename}:{trace.tb_lineno} in {code.co_name}", trace.tb_next
    return f"{type(error).__name__}{place}"
