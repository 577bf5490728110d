import numpy as np
import pytest

from rm_server.errors import InternalError, NonFiniteRewardError, OverloadedError, ServerError
from rm_server.groups import key_of
from rm_server.scorer import RECOVERY_FORWARDS, BatchScorer, is_out_of_memory


class Model:
    """Scores by the first id; ``fail`` is called with the sequences of each forward and may raise."""

    def __init__(self, fail=lambda sequences: None):  # type: ignore[no-untyped-def]
        self.sizes: list[int] = []
        self.fail = fail

    def score_ids(self, sequences):  # type: ignore[no-untyped-def]
        self.sizes.append(len(sequences))
        self.fail(sequences)
        return np.array([ids[0] for ids in sequences], dtype=np.float32)


def scorer(model: Model, budget: int = 1000) -> BatchScorer:
    return BatchScorer(model, budget, "shared", clock=lambda: 0.0)


def keys(*firsts: int, length: int = 1) -> list[bytes]:
    return [key_of([first] * length) for first in firsts]


def raising(error: BaseException, times: int = 10**9, when=lambda sequences: True):  # type: ignore[no-untyped-def]
    left = [times]

    def fail(sequences):  # type: ignore[no-untyped-def]
        if left[0] > 0 and when(sequences):
            left[0] -= 1
            raise error

    return fail


def test_equal_sequences_are_computed_once_and_all_get_the_reward() -> None:
    model = Model()
    assert scorer(model).score(keys(3, 5, 3, 3)).outcomes == [3.0, 5.0, 3.0, 3.0]
    assert model.sizes == [2]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_forward_that_raises_once_fails_nobody(count: int) -> None:
    scored = scorer(Model(raising(ValueError("secret"), times=1))).score(keys(*range(count)))
    assert scored.outcomes == [float(i) for i in range(count)]
    assert scored.num_failures == 1
    assert all("ValueError" in problem and "secret" not in problem for problem in scored.problems)


@pytest.mark.parametrize("guilty", [0, 3, 9])
def test_item_that_always_raises_fails_alone(guilty: int) -> None:
    model = Model(raising(IndexError("secret"), when=lambda seqs: any(ids[0] == guilty for ids in seqs)))
    scored = scorer(model).score(keys(*range(10)))
    for i, outcome in enumerate(scored.outcomes):
        assert isinstance(outcome, InternalError) if i == guilty else outcome == float(i)
    assert len(model.sizes) <= 10, "a guilty item among n costs about 2 log n more forwards"


def test_model_that_always_raises_fails_every_item_and_ends() -> None:
    scored = scorer(Model(raising(RuntimeError("broken")))).score(keys(*range(5)))
    assert all(isinstance(outcome, InternalError) for outcome in scored.outcomes)


def test_wrong_number_of_rewards_is_a_failure_and_not_a_shift() -> None:
    model = Model()
    model.score_ids = lambda sequences: np.zeros(1, dtype=np.float32)  # type: ignore[method-assign]
    outcomes = scorer(model).score(keys(1, 2, 3)).outcomes
    assert len(outcomes) == 3
    assert outcomes == [0.0, 0.0, 0.0] or any(isinstance(outcome, ServerError) for outcome in outcomes)


def test_nan_and_infinity_are_errors_of_their_item() -> None:
    model = Model()
    model.score_ids = lambda sequences: np.array([1, np.nan, np.inf, -np.inf], dtype=np.float32)  # type: ignore
    outcomes = scorer(model).score(keys(1, 2, 3, 4)).outcomes
    assert outcomes[0] == 1.0
    assert all(isinstance(outcome, NonFiniteRewardError) for outcome in outcomes[1:])


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), RuntimeError("out of memory")]
)
def test_out_of_memory_lowers_the_limit_and_loses_nobody(error: BaseException) -> None:
    model = Model(raising(error, when=lambda seqs: sum(map(len, seqs)) > 300))
    subject = scorer(model)
    scored = subject.score(keys(*range(10), length=100))
    assert scored.outcomes == [float(i) for i in range(10)]
    assert scored.num_out_of_memory > 0
    assert 150 <= subject.token_limit <= 300


def test_lowered_limit_recovers_after_enough_good_forwards() -> None:
    model = Model(raising(MemoryError(), times=1))
    subject = scorer(model)
    subject.score(keys(*range(10), length=100))
    assert subject.token_limit == 500
    for _ in range(RECOVERY_FORWARDS):
        subject.score(keys(1))
    assert subject.token_limit == 1000
    for _ in range(2 * RECOVERY_FORWARDS):
        subject.score(keys(1))
    assert subject.token_limit == 1000


def test_item_too_large_for_memory_alone_may_come_again() -> None:
    model = Model(raising(MemoryError(), when=lambda seqs: any(len(ids) > 50 for ids in seqs)))
    outcomes = scorer(model).score([*keys(1, 2), key_of([3] * 60)]).outcomes
    assert outcomes[:2] == [1.0, 2.0]
    assert isinstance(outcomes[2], OverloadedError)
    assert "60 tokens" in outcomes[2].message


def test_torch_out_of_memory_is_recognised() -> None:
    import torch

    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("out of memory"))
