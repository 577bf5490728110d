"""500 mixed requests from 64 callers of a real (tiny) model with a cache that must evict: right, none lost, none hung.

The long form, 10,000 requests to a process over HTTP, is benchmarks/soak.py.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from rm_server.memory import resident_bytes

Serve = Callable[..., Any]
TOLERANCE = 1e-4


async def test_500_mixed_requests_get_the_scores_computed_before_and_leave_nothing_behind(
    tiny_model: Any, serve: Serve, sample: Any
) -> None:
    rng = random.Random(11)

    def text(length: int) -> str:
        return "".join(rng.choice("abcdefgh ,.") for _ in range(length))

    groups = [(text(rng.randint(1, 200)), [text(rng.randint(1, 60)) for _ in range(6)]) for _ in range(40)]
    for _, answers in groups:
        answers.append(answers[0] + answers[1])  # one answer is the beginning of another
    rewards = {
        (number, i): float(tiny_model.score_ids([tiny_model.renderer.render(prompt, answer)])[0])
        for number, (prompt, answers) in enumerate(groups)
        for i, answer in enumerate(answers)
    }

    def draw() -> tuple[dict[str, Any], list[float]]:
        number = rng.randrange(len(groups))
        chosen = rng.sample(range(7), rng.choice([1, 1, 1, 3, 7]))
        prompt, answers = groups[number]
        expected = [rewards[number, i] for i in chosen]
        if rng.random() < 0.3:
            return {"texts": [prompt + answers[i] for i in chosen]}, expected
        return {"prompt": prompt, "completions": [answers[i] for i in chosen]}, expected

    bodies = iter([draw() for _ in range(500)])
    sizes: list[int] = []
    async with serve(tiny_model, max_batch_tokens=256, prefix_cache_mb=1) as (client, service):

        async def caller() -> int:
            count = 0
            for body, expected in bodies:
                response = await asyncio.wait_for(client.post("/score", json=body), 60)
                assert response.status_code == 200, response.text
                np.testing.assert_allclose(response.json()["rewards"], expected, atol=TOLERANCE, rtol=0)
                sizes.append(resident_bytes() or 0)
                count += 1
            return count

        counts = await asyncio.gather(*(caller() for _ in range(64)))
        assert sum(counts) == 500
        assert service.admission.tokens == service.admission.items == service.num_open == len(service.waiting) == 0
        assert sample(service, "rm_cache_evictions_total") > 0
        assert sample(service, "rm_cache_hit_tokens_total") > 0
        assert sample(service, "rm_forward_failures_total", cause="error") == 0
        cache = service.engine.scorer.cache
        assert cache.num_bytes <= 1 << 20
    assert sizes[-1] < 1.05 * max(sizes[:250]) or not sizes[-1], "resident memory grew after the warm-up"
