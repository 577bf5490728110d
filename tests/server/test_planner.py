from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st

from rm_core.tree import MIN_SHARED, count_tokens
from rm_server.groups import Item, Request, WaitingItems, ids_of, key_of, num_shared_tokens
from rm_server.planner import MIN_SHARED_TOKENS, Batch, BatchCost, plan_batch

Ids = tuple[int, ...]
# In runs of 16, the shortest that is shared.
sequences = st.lists(st.integers(0, 3), min_size=1, max_size=12).map(
    lambda ids: tuple(i for i in ids for _ in range(16))
)
requests = st.lists(st.lists(sequences, min_size=1, max_size=8), min_size=1, max_size=8)


def waiting_with(groups: list[list[Ids]]) -> tuple[WaitingItems, list[Request]]:
    waiting, made = WaitingItems(), []
    for group in groups:
        request = Request(len(group))
        waiting.add([Item(key_of(ids), request, slot) for slot, ids in enumerate(group)])
        made.append(request)
    return waiting, made


def tree_tokens(batch: Batch) -> int:
    return count_tokens([ids_of(item.key) for item in batch.items])


def padded_tokens(batch: Batch) -> int:
    return len({item.key for item in batch.items}) * max(item.num_tokens for item in batch.items)


def drain(waiting: WaitingItems, budget: int, counting: str = "shared") -> list[Batch]:
    batches = []
    while (batch := plan_batch(waiting, budget, counting)).items:  # type: ignore[arg-type]
        batches.append(batch)
    return batches


@given(st.lists(st.integers(0, 2**31), max_size=40), st.lists(st.integers(0, 2**31), max_size=40))
def test_keys_sort_as_ids_and_know_their_common_prefix(a: list[int], b: list[int]) -> None:
    assert ids_of(key_of(a)) == a
    assert (key_of(a) < key_of(b)) == (a < b)
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert num_shared_tokens(key_of(a), key_of(b)) == expected


@given(requests, st.integers(192, 800))
@settings(deadline=None)
def test_every_item_is_planned_once_and_no_batch_is_over_budget(groups: list[list[Ids]], budget: int) -> None:
    waiting, _ = waiting_with(groups)
    batches = drain(waiting, budget)
    planned = [(id(item.request), item.slot) for batch in batches for item in batch.items]
    assert len(planned) == len(set(planned)) == sum(map(len, groups))
    assert len(waiting) == 0
    assert waiting.num_tokens == 0
    for batch in batches:
        assert batch.cost == tree_tokens(batch) <= budget
        assert batch.num_tokens == sum(item.num_tokens for item in batch.items)


@given(requests, st.integers(192, 800))
@settings(deadline=None)
def test_padded_batches_are_charged_for_their_padding(groups: list[list[Ids]], budget: int) -> None:
    waiting, _ = waiting_with(groups)
    for batch in drain(waiting, budget, "padded"):
        assert batch.cost == padded_tokens(batch) <= budget


@given(st.lists(sequences, min_size=1, max_size=20))
def test_cost_equals_that_of_the_token_tree_in_any_order(group: list[Ids]) -> None:
    cost = BatchCost("shared")
    for ids in group:
        cost.add(key_of(ids), cost.with_key(key_of(ids)))
    assert cost.tokens == count_tokens(group)


@given(requests, st.data())
@settings(deadline=None)
def test_discarded_requests_are_never_planned(groups: list[list[Ids]], data: st.DataObject) -> None:
    waiting, made = waiting_with(groups)
    first = plan_batch(waiting, 192, "shared")
    gone = set(data.draw(st.lists(st.sampled_from(made))))
    for request in gone:
        for item in waiting.discard(request):
            assert item not in first.items
    later = list(chain.from_iterable(batch.items for batch in drain(waiting, 192)))
    assert not gone & {item.request for item in later}
    kept = [item for request in set(made) - gone for item in first.items if item.request is request]
    assert len(kept) + len(later) == sum(
        len(group) for group, request in zip(groups, made, strict=True) if request not in gone
    )
    assert len(waiting) == waiting.num_tokens == 0


def test_planner_and_token_tree_agree_on_the_shortest_shared_run() -> None:
    assert MIN_SHARED_TOKENS == MIN_SHARED


def test_sequence_over_the_budget_is_scored_alone() -> None:
    waiting, _ = waiting_with([[tuple(range(50))], [(1, 2)]])
    assert [[item.num_tokens for item in batch.items] for batch in drain(waiting, 16)] in ([[50], [2]], [[2], [50]])


def test_small_request_is_in_the_next_batch_behind_a_huge_one() -> None:
    waiting, (huge,) = waiting_with([[(9, i // 256, i % 256, *range(100)) for i in range(32_000)]])
    plan_batch(waiting, 4096, "shared")
    small = Request(3)
    waiting.add([Item(key_of([7, i, i]), small, i) for i in range(3)])
    batch = plan_batch(waiting, 4096, "shared")
    assert sum(item.request is small for item in batch.items) == 3
    assert sum(item.request is huge for item in batch.items) > 30


def test_newcomers_get_half_a_batch_and_those_under_way_the_rest() -> None:
    waiting, first = waiting_with([[(r, i, *range(98)) for i in range(100)] for r in range(3)])
    drain_one = plan_batch(waiting, 1600, "shared")
    assert {item.request for item in drain_one.items} == set(first)
    newcomers = []
    for number in range(40):
        request = Request(1)
        waiting.add([Item(key_of([100 + number, *range(99)]), request, 0)])
        newcomers.append(request)
    batch = plan_batch(waiting, 1600, "shared")
    assert [item.request in newcomers for item in batch.items].count(True) == 8
    assert [item.request in first for item in batch.items].count(True) == 8
    assert {item.request for item in batch.items} >= set(newcomers[:8])


def test_constant_newcomers_do_not_starve_an_item_as_large_as_a_batch() -> None:
    waiting = WaitingItems()
    large = Request(4)
    waiting.add([Item(key_of([5, i, *range(998)]), large, i) for i in range(4)])
    batches_until_done = 0
    while waiting.oldest(large) is not None:
        for number in range(30):
            waiting.add([Item(key_of([6, batches_until_done, number, *range(97)]), Request(1), 0)])
        plan_batch(waiting, 1000, "shared")
        batches_until_done += 1
    assert batches_until_done <= 9


def test_large_items_under_way_do_not_starve_a_large_newcomer() -> None:
    waiting = WaitingItems()
    for r in range(4):
        request = Request(50)
        waiting.add([Item(key_of([r, i, *range(898)]), request, i) for i in range(50)])
    for _ in range(8):
        plan_batch(waiting, 1000, "shared")
    assert not waiting.newcomers
    newcomer = Request(1)
    waiting.add([Item(key_of([77, *range(950)]), newcomer, 0)])
    batches = [plan_batch(waiting, 1000, "shared") for _ in range(2)]
    assert any(item.request is newcomer for batch in batches for item in batch.items)


def test_single_answers_of_one_prompt_meet_in_one_batch_whatever_comes_between() -> None:
    prompt = tuple(range(200))
    others = [[(1000 + n, *range(150))] for n in range(20)]
    answers = [[(*prompt, 500 + n, *range(20))] for n in range(8)]
    mixed = [group for pair in zip(answers, others[:8], strict=True) for group in pair] + others[8:]
    waiting, made = waiting_with(mixed)
    of_prompt = {request for request, group in zip(made, mixed, strict=True) if group in answers}
    batch = plan_batch(waiting, 1024, "shared")
    assert of_prompt <= {item.request for item in batch.items}


def test_alone_every_distinct_sequence_is_charged_whole() -> None:
    prompt = tuple(range(20))
    waiting, _ = waiting_with([[(*prompt, 3), (*prompt, 3), (7,), (7,)], [(*prompt, 4, 5)]])
    batch = plan_batch(waiting, 64, "alone")
    assert (len(batch.items), batch.cost, batch.num_tokens) == (5, 21 + 1 + 22, 66)


def test_what_the_cache_holds_costs_nothing_so_more_late_siblings_fit_one_batch() -> None:
    siblings = [[(n, *range(200), 500 + n, *range(30))] for n in range(40)]
    cached = {key_of(group[0]): 192 for group in siblings}
    batches = []
    for known in (lambda key: 0, lambda key: cached[key]):
        waiting, _ = waiting_with(siblings)  # type: ignore[arg-type]
        batches.append(plan_batch(waiting, 1000, "shared", known))
    assert [len(batch.items) for batch in batches] == [4, 25]
    assert [batch.cost for batch in batches] == [4 * 232, 25 * 40]


def test_siblings_behind_a_cached_prompt_share_what_is_new_only_where_it_is_long_enough() -> None:
    prompt, opening = tuple(range(100)), tuple(range(200, 230))
    for length, shared in ((8, 0), (30, 126)):
        group = [(*prompt, *opening[:length], answer, *range(9)) for answer in (1, 2)]
        cost = BatchCost("shared", lambda key: 96)
        for ids in group:
            cost.add(key_of(ids), cost.with_key(key_of(ids)))
        whole = 2 * (len(group[0]) - 96)
        assert cost.tokens == (whole if not shared else whole - (4 + 30))


def test_planning_32_000_long_items_is_fast_enough_for_the_event_loop() -> None:
    import time

    waiting = WaitingItems()
    request = Request(32_000)
    prompt = list(range(500))
    items = [Item(key_of([n // 8, *prompt, n, *prompt[:498]]), request, n) for n in range(32_000)]
    start = time.process_time()
    for first in range(0, 32_000, 512):
        waiting.add(items[first : first + 512])
    added = time.process_time() - start
    start = time.process_time()
    for _ in range(50):
        plan_batch(waiting, 8192, "shared")
    planned = (time.process_time() - start) / 50
    assert added < 3.0, f"adding took {added:.2f} s of CPU"
    assert planned < 0.02, f"a batch took {planned:.4f} s of CPU"
