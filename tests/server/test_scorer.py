import numpy as np
import pytest
import torch

from rm_core.attention import LayerKV
from rm_core.passes import Scored
from rm_core.prefix_cache import CachedPrefix
from rm_server.errors import InternalError, NonFiniteRewardError, OverloadedError, ServerError
from rm_server.groups import key_of
from rm_server.scorer import RECOVERY_FORWARDS, BatchScorer, is_out_of_memory


def scored(rewards: list[float], computed: list[float]) -> Scored:
    return Scored(np.array(rewards, dtype=np.float32), np.array(computed, dtype=np.float64), 0)


class Model:
    """Scores by the first id; ``fail`` is called with the sequences of each forward and may raise."""

    def __init__(self, fail=lambda sequences: None):  # type: ignore[no-untyped-def]
        self.sizes: list[int] = []
        self.budgets: list[int | None] = []
        self.fail = fail

    def score_batch(self, sequences, *, max_tokens=None, cache=None):  # type: ignore[no-untyped-def]
        self.sizes.append(len(sequences))
        self.budgets.append(max_tokens)
        self.fail(sequences)
        return scored([ids[0] for ids in sequences], [len(ids) for ids in sequences])


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
    batch = scorer(Model(raising(ValueError("secret"), times=1))).score(keys(*range(count)))
    assert batch.outcomes == [float(i) for i in range(count)]
    assert batch.num_failures == 1
    assert all("ValueError" in problem and "secret" not in problem for problem in batch.problems)


@pytest.mark.parametrize("guilty", [0, 3, 9])
def test_item_that_always_raises_fails_alone(guilty: int) -> None:
    model = Model(raising(IndexError("secret"), when=lambda seqs: any(ids[0] == guilty for ids in seqs)))
    batch = scorer(model).score(keys(*range(10)))
    for i, outcome in enumerate(batch.outcomes):
        assert isinstance(outcome, InternalError) if i == guilty else outcome == float(i)
    assert len(model.sizes) <= 10, "a guilty item among n costs about 2 log n more forwards"


def test_model_that_always_raises_fails_every_item_and_ends() -> None:
    batch = scorer(Model(raising(RuntimeError("broken")))).score(keys(*range(5)))
    assert all(isinstance(outcome, InternalError) for outcome in batch.outcomes)


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: device-side assert triggered"), float("nan")])
def test_a_dead_device_costs_a_few_forwards_and_one_line(error: BaseException | float) -> None:
    model = Model()
    model.score_batch = dying(model.score_batch, error)  # type: ignore[method-assign]
    subject = scorer(model)
    batch = subject.score(keys(*range(1000)))
    kind = NonFiniteRewardError if isinstance(error, float) else InternalError
    assert all(isinstance(outcome, kind) for outcome in batch.outcomes)
    assert len(model.sizes) < 30
    if isinstance(error, BaseException):
        assert len(batch.problems) == 1
        assert "RuntimeError at " in batch.problems[0]
        assert batch.problems[0].endswith(f"({batch.num_failures} times)")
    del model.score_batch
    assert subject.score(keys(*range(20))).outcomes == [float(i) for i in range(20)], "the next batch is tried again"


def dying(score_batch, error):  # type: ignore[no-untyped-def]
    def score(sequences, **options):  # type: ignore[no-untyped-def]
        score_batch(sequences, **options)
        if isinstance(error, BaseException):
            raise error
        return scored([error] * len(sequences), [len(ids) for ids in sequences])

    return score


@pytest.mark.parametrize("is_nan", [False, True])
def test_many_guilty_items_are_no_dead_device(is_nan: bool) -> None:
    def guilty(ids):  # type: ignore[no-untyped-def]
        return 1 <= ids[0] <= 40

    model = Model(raising(IndexError(), when=lambda seqs: not is_nan and any(map(guilty, seqs))))
    if is_nan:
        model = Spreading(guilty)
    outcomes = scorer(model).score(keys(*range(1, 50))).outcomes
    assert all(isinstance(outcome, ServerError) for outcome in outcomes[:40])
    assert outcomes[40:] == [float(i) for i in range(41, 50)]


class Spreading(Model):
    """Gives NaN to all of a batch that holds a guilty sequence, and to whoever takes a beginning of one from a cache
    that such a batch filled."""

    def __init__(self, guilty):  # type: ignore[no-untyped-def]
        super().__init__()
        self.guilty = guilty

    def score_batch(self, sequences, *, max_tokens=None, cache=None, read_from=None):  # type: ignore[no-untyped-def]
        done = super().score_batch(sequences, max_tokens=max_tokens)
        found = [cache.find(tuple(ids)) for ids in sequences] if cache is not None else []
        is_poisoned = any(hit is not None and hit[0].layers[0].keys.isnan().any() for hit in found)
        spreads = is_poisoned or any(map(self.guilty, sequences))
        if cache is not None:
            for ids in sequences:
                kept = torch.full((500,), float("nan") if spreads else 0.0)
                cache.add(CachedPrefix(tuple(ids), (LayerKV(kept, kept),)))
        reads = None
        if read_from is not None:
            reads = [np.full(2, np.nan if spreads else ids[0], dtype=np.float32) for ids in sequences]
        rewards = np.full(len(sequences), np.nan, dtype=np.float32) if spreads else done.rewards
        return Scored(rewards, done.computed_tokens, 0, token_rewards=reads)


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_nan_that_spreads_costs_only_the_item_that_causes_it(cache_bytes: int) -> None:
    subject = BatchScorer(
        Spreading(lambda ids: ids[0] == 5), 10_000, "shared", clock=lambda: 0.0, cache_bytes=cache_bytes
    )
    batch = subject.score(keys(*range(10), length=20), {keys(3, length=20)[0]: 18})
    for i, outcome in enumerate(batch.outcomes):
        assert isinstance(outcome, NonFiniteRewardError) if i == 5 else outcome == float(i)
    assert batch.token_rewards[keys(3, length=20)[0]].tolist() == [3.0, 3.0]
    assert batch.computed_tokens == 2 * 10 * 20, "what was computed twice is charged twice"
    assert (batch.num_failures, len(batch.problems)) == (1, 1)
    assert "9 of 10 rewards" in batch.problems[0]
    later = subject.score(keys(*range(5), length=20))
    assert later.outcomes == [float(i) for i in range(5)]
    assert later.num_forwards == 1, "nothing of the poisoned batch is left in the cache"


def test_a_poisoned_cache_is_emptied_by_a_single_item_that_uses_it() -> None:
    subject = BatchScorer(Spreading(lambda ids: False), 10_000, "shared", clock=lambda: 0.0, cache_bytes=1 << 20)
    assert subject.cache is not None
    kept = torch.full((500,), float("nan"))
    subject.cache.add(CachedPrefix((7,) * 32, (LayerKV(kept, kept),)))
    assert subject.score(keys(7, length=32)).outcomes == [7.0]
    assert len(subject.cache) == 0


def test_an_item_that_is_nan_by_itself_empties_no_cache() -> None:
    subject = BatchScorer(Spreading(lambda ids: ids[0] == 5), 10_000, "shared", clock=lambda: 0.0, cache_bytes=1 << 20)
    subject.score(keys(1, length=20))
    batch = subject.score(keys(5, length=20))
    assert isinstance(batch.outcomes[0], NonFiniteRewardError)
    assert (batch.problems, batch.num_failures) == ([], 0)
    assert subject.known_length(keys(1, length=20)[0]) == 16


def test_wrong_number_of_rewards_is_a_failure_and_not_a_shift() -> None:
    model = Model()
    model.score_batch = lambda sequences, **_: scored([0], [1])  # type: ignore[method-assign]
    outcomes = scorer(model).score(keys(1, 2, 3)).outcomes
    assert len(outcomes) == 3
    assert outcomes == [0.0, 0.0, 0.0] or any(isinstance(outcome, ServerError) for outcome in outcomes)


def test_nan_and_infinity_are_errors_of_their_item() -> None:
    model = Model()
    rewards = [1, float("nan"), float("inf"), float("-inf")]
    model.score_batch = lambda sequences, **_: scored([rewards[ids[0] - 1] for ids in sequences], [1] * len(sequences))  # type: ignore[method-assign]
    outcomes = scorer(model).score(keys(1, 2, 3, 4)).outcomes
    assert outcomes[0] == 1.0
    assert all(isinstance(outcome, NonFiniteRewardError) for outcome in outcomes[1:])


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("out of memory"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
)
def test_out_of_memory_lowers_the_limit_and_loses_nobody(error: BaseException) -> None:
    model = Model(raising(error, when=lambda seqs: sum(map(len, seqs)) > 3000))
    subject = scorer(model, budget=10_000)
    batch = subject.score(keys(*range(10), length=1000))
    assert batch.outcomes == [float(i) for i in range(10)]
    assert batch.num_out_of_memory > 0
    assert 1500 <= subject.token_limit <= 3000


def test_a_small_batch_out_of_memory_lowers_the_limit_to_what_is_soon_recovered_from() -> None:
    for budget, floor in ((10_000, 512), (100, 100)):
        subject = scorer(Model(raising(MemoryError(), when=lambda seqs: len(seqs) > 1)), budget)
        assert subject.score(keys(*range(8), length=5)).outcomes == [float(i) for i in range(8)]
        assert subject.token_limit == floor
    subject.token_limit = 64  # as pieces of a long sequence left it
    subject.score(keys(1, 2, length=5))
    assert subject.token_limit == 64


def test_lowered_limit_recovers_after_enough_good_forwards() -> None:
    model = Model(raising(MemoryError(), times=1))
    subject = scorer(model, budget=10_000)
    subject.score(keys(*range(10), length=1000))
    assert subject.token_limit == 5000
    for _ in range(RECOVERY_FORWARDS):
        subject.score(keys(1))
    assert subject.token_limit == 10_000
    for _ in range(2 * RECOVERY_FORWARDS):
        subject.score(keys(1))
    assert subject.token_limit == 10_000


def test_item_too_large_for_memory_alone_may_come_again() -> None:
    model = Model(raising(MemoryError(), when=lambda seqs: any(len(ids) > 50 for ids in seqs)))
    outcomes = scorer(model).score([*keys(1, 2), key_of([3] * 60)]).outcomes
    assert outcomes[:2] == [1.0, 2.0]
    assert isinstance(outcomes[2], OverloadedError)
    assert "60 tokens" in outcomes[2].message


def test_equal_sequences_share_the_cost_and_charges_add_up_to_what_was_computed() -> None:
    model = Model()
    model.score_batch = lambda sequences, **_: scored([0, 0], [40.5, 20.5])  # type: ignore[method-assign]
    batch = scorer(model).score(keys(1, 1, 1, 2))
    assert batch.charges == [14, 13, 13, 21]
    assert batch.computed_tokens == 61


def test_failed_items_are_charged_nothing_and_the_others_their_own() -> None:
    model = Model(raising(ValueError(), when=lambda seqs: any(ids[0] == 2 for ids in seqs)))
    assert scorer(model).score(keys(1, 2, 3, length=10)).charges == [10, 0, 10]


def test_sequence_too_long_for_memory_is_scored_in_smaller_pieces_and_lowers_the_limit() -> None:
    model = Model()
    model.fail = lambda seqs: raise_if(model.budgets[-1] > 300)  # type: ignore[operator]
    subject = scorer(model, budget=1000)
    batch = subject.score([key_of([5] * 2000)])
    assert batch.outcomes == [5.0]
    assert (subject.token_limit, batch.num_out_of_memory) == (250, 2)


def raise_if(condition: bool) -> None:
    if condition:
        raise MemoryError


class Caching(Model):
    """Keeps 4,000 bytes of something for every sequence it scores."""

    def score_batch(self, sequences, *, max_tokens=None, cache=None):  # type: ignore[no-untyped-def]
        self.caches.append(cache)
        done = super().score_batch(sequences, max_tokens=max_tokens, cache=cache)
        for ids in sequences if cache is not None else ():
            cache.add(CachedPrefix(tuple(ids), (LayerKV(torch.zeros(500), torch.zeros(500)),)))
        return done

    caches: list = []  # type: ignore[type-arg] # noqa: RUF012


def test_out_of_memory_empties_the_cache_before_the_budget_is_lowered() -> None:
    model = Caching()
    model.caches = []
    subject = BatchScorer(model, 2000, "shared", clock=lambda: 0.0, cache_bytes=10_000)
    assert subject.score(keys(1, 2, 3, length=100)).num_evicted == 1
    assert subject.cache is not None
    assert subject.cache.num_bytes == 8000
    assert subject.known_length(key_of([3] * 100)) == 96
    model.fail = raising(MemoryError(), times=1)
    batch = subject.score(keys(*range(10), length=200))
    assert batch.outcomes == [float(i) for i in range(10)]
    assert (batch.num_out_of_memory, subject.token_limit) == (1, 2000)
    assert (subject.cache.num_bytes, subject.cache.max_bytes) == (0, 10_000)
    assert [cache is None for cache in model.caches] == [False, False, True]
    model.fail = raising(MemoryError(), times=1)
    subject.score(keys(*range(10), length=200))
    assert subject.token_limit == 1000, "an empty cache has nothing to give"


def test_cache_that_gave_room_grows_back() -> None:
    model = Caching()
    subject = BatchScorer(model, 1000, "shared", clock=lambda: 0.0, cache_bytes=8 << 20)
    subject.score(keys(1, 2))
    model.fail = raising(MemoryError(), times=1)
    subject.score(keys(3, 4))
    assert subject.cache is not None
    assert subject.cache.max_bytes == 4 << 20
    for _ in range(RECOVERY_FORWARDS):
        subject.score(keys(1))
    assert subject.cache.max_bytes == 8 << 20


def test_alone_each_sequence_has_a_forward_of_its_own_and_no_cache() -> None:
    model = Model()
    subject = BatchScorer(model, 1000, "alone", clock=lambda: 0.0, cache_bytes=1 << 20)
    assert subject.score(keys(3, 5, 3)).outcomes == [3.0, 5.0, 3.0]
    assert model.sizes == [1, 1]
    assert subject.cache is None
    model.fail = raising(MemoryError(), when=lambda seqs: len(seqs[0]) > 300)
    outcomes = subject.score([key_of([5] * 2000), key_of([6])]).outcomes
    assert isinstance(outcomes[0], OverloadedError)
    assert outcomes[1] == 6.0
    assert set(model.budgets) == {1000}, "another cut would change the last bits of the reward"


def test_torch_out_of_memory_is_recognised() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("out of memory"))
