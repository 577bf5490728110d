"""A model with several heads answers their spread beside their mean."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import orjson

from rm_core.passes import Scored
from tests.server.conftest import FakeModel

Serve = Callable[..., Any]
OFFSETS = np.array([-1.0, 0.0, 4.0], dtype=np.float32)


class HeadsModel(FakeModel):
    """Heads that lie below, at and above the fake's score."""

    def score_batch(
        self, sequences: Sequence[Sequence[int]], *, max_tokens: int | None = None, cache: Any = None
    ) -> Scored:
        done = super().score_batch(sequences, max_tokens=max_tokens, cache=cache)
        heads = done.rewards[:, None] + OFFSETS
        return Scored(heads.mean(axis=1), done.computed_tokens, done.cached_tokens, heads)


async def test_components_are_std_and_min_in_the_shape_of_the_rewards(fake: Any, serve: Serve, score_of: Any) -> None:
    model = HeadsModel(fake.renderer)
    model.nan_for = lambda ids: ids == [7, 7]
    groups = [{"prompt": "a", "completions": ["1", "2"]}, {"prompt": "b", "completions": ["1"]}]
    async with serve(model) as (client, _):
        answer = (await client.post("/score", content=orjson.dumps({"groups": groups}))).json()
        failed = (await client.post("/score", content=orjson.dumps({"input_ids": [[7, 7], [8]]}))).json()
    base = [
        [score_of(model.renderer.render(group["prompt"], text)) for text in group["completions"]] for group in groups
    ]
    for group, rewards, std, low in zip(
        base, answer["rewards"], answer["components"]["std"], answer["components"]["min"], strict=True
    ):
        np.testing.assert_allclose(rewards, np.array(group) + 1, rtol=1e-5)
        np.testing.assert_allclose(std, [float(OFFSETS.std())] * len(group), rtol=1e-4)
        np.testing.assert_allclose(low, np.array(group) - 1, rtol=1e-5)
    assert failed["rewards"][0] is None
    assert failed["components"]["std"][0] is None
    assert failed["components"]["std"][1] > 0


async def test_one_head_has_no_components(fake: Any, serve: Serve) -> None:
    async with serve(fake) as (client, _):
        answer = (await client.post("/score", content=orjson.dumps({"texts": ["a"]}))).json()
    assert "components" not in answer
