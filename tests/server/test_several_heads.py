"""A model with several heads answers their spread beside their mean."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from rm_core.checkpoint import CheckpointRecord, conservative_reward_id
from rm_core.passes import Scored
from rm_server.settings import SettingsError
from tests.server.conftest import FakeModel
from tests.server.recipes import post, serving

Serve = Callable[..., Any]
OFFSETS = np.array([-1.0, 0.0, 4.0], dtype=np.float32)
RECIPE = """
parts:
  model: {kind: model, standardise: checkpoint}
  size:  {kind: length, maximum: 1000, timeout_seconds: 60}
reward: {sum: [model, size]}
"""


class HeadsModel(FakeModel):
    """Heads that lie below, at and above the fake's score."""

    num_heads = 3
    scales = np.ones(3, dtype=np.float32)

    def score_batch(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        max_tokens: int | None = None,
        cache: Any = None,
        read_from: Sequence[int | None] | None = None,
    ) -> Scored:
        done = super().score_batch(sequences, max_tokens=max_tokens, cache=cache, read_from=read_from)
        heads = done.rewards[:, None] * self.scales + OFFSETS
        return Scored(heads.mean(axis=1), done.computed_tokens, done.cached_tokens, heads, done.token_rewards)


@pytest.fixture
def disagreeing(fake: Any) -> HeadsModel:
    """Heads 1/2, 1 and 3/2 times the fake's score, moved: their std is another one for every item."""
    model = HeadsModel(fake.renderer)
    model.scales = np.array([0.5, 1.0, 1.5], dtype=np.float32)
    return model


async def test_components_are_mean_std_and_min_in_the_shape_of_the_rewards(
    fake: Any, serve: Serve, score_of: Any
) -> None:
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
    assert answer["components"]["mean"] == answer["rewards"]
    assert failed["rewards"][0] is None
    assert failed["components"]["std"][0] is None
    assert failed["components"]["std"][1] > 0


async def test_one_head_has_no_components(fake: Any, serve: Serve) -> None:
    async with serve(fake) as (client, _):
        answer = (await client.post("/score", content=orjson.dumps({"texts": ["a"]}))).json()
    assert "components" not in answer


# ------------------------------------------------------------------ mean - K * std


@pytest.mark.parametrize("exact", [False, True])
async def test_conservative_reward_is_the_mean_less_the_spread_under_an_id_of_its_own(
    exact: bool, disagreeing: HeadsModel, serve: Serve, score_of: Any
) -> None:
    texts = ["a", "b", "cc"]
    heads = np.array([score_of(disagreeing.renderer.render_text(text)) for text in texts])
    heads = heads[:, None] * disagreeing.scales + OFFSETS
    async with serve(disagreeing, conservative=2.0, exact=exact) as (client, _):
        answer = (await client.post("/score", json={"texts": texts, "token_rewards": True})).json()
        again = await client.post("/score", json={"texts": ["a"], "reward_id": answer["reward_id"]})
        pinned = await client.post("/score", json={"texts": ["a"], "reward_id": disagreeing.reward_id})
        info = (await client.get("/info")).json()
    np.testing.assert_allclose(answer["rewards"], heads.mean(axis=1) - 2 * heads.std(axis=1), rtol=1e-4)
    np.testing.assert_allclose(answer["components"]["mean"], heads.mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(answer["components"]["std"], heads.std(axis=1), rtol=1e-4)
    np.testing.assert_allclose(answer["components"]["min"], heads.min(axis=1), rtol=1e-4)
    assert answer["reward_id"] == info["reward_id"] == conservative_reward_id(disagreeing.reward_id, 2.0)
    assert (info["conservative"], info["checkpoint_reward_id"]) == (2.0, disagreeing.reward_id)
    assert again.json()["rewards"] == answer["rewards"][:1]
    assert (pinned.status_code, pinned.json()["error"]["type"]) == (409, "reward_id_mismatch")


async def test_every_spread_penalty_has_an_id_and_without_one_it_is_the_checkpoints(
    disagreeing: HeadsModel, serve: Serve
) -> None:
    found = []
    for conservative in (0.0, 1.0, 1.5):
        async with serve(disagreeing, conservative=conservative) as (client, _):
            found.append((await client.get("/info")).json())
    assert found[0]["reward_id"] == disagreeing.reward_id
    assert len({info["reward_id"] for info in found}) == 3
    assert (found[0]["conservative"], "checkpoint_reward_id" in found[0]) == (0.0, False)


async def test_conservative_reward_of_one_head_is_refused_at_the_start_and_at_a_swap(
    fake: Any, disagreeing: HeadsModel, serve: Serve, admin_key: Any
) -> None:
    words = "conservative (1): fake has one head alone"
    with pytest.raises(SettingsError) as raised:
        async with serve(fake, conservative=1.0):
            pass
    assert words in str(raised.value)
    keys, key = admin_key
    header = {"Authorization": f"Bearer {key}"}
    async with serve(disagreeing, conservative=1.0, keys=keys, load=lambda settings, checkpoint: fake) as (client, _):
        body = {"checkpoint": "next"}
        refused = await client.post("/admin/checkpoint", json=body, headers=header)
        after = (await client.get("/info", headers=header)).json()
    assert (refused.status_code, refused.json()["error"]["type"]) == (422, "checkpoint_refused")
    assert words in refused.json()["error"]["message"]
    assert after["checkpoint_reward_id"] == disagreeing.reward_id


@pytest.mark.parametrize(
    ("metrics", "mean", "std", "num_eval"),
    [({"heads": {"mean_std": 0.75}}, 2.0 - 2 * 0.75, 4.0, 100), ({}, 0.0, 1.0, 0)],
    ids=["measured", "unknown"],
)
async def test_recorded_mean_moves_by_the_mean_spread(
    metrics: dict[str, Any], mean: float, std: float, num_eval: int, disagreeing: HeadsModel, serve: Serve
) -> None:
    disagreeing.record = CheckpointRecord.model_construct(
        reward_mean=2.0, reward_std=4.0, num_eval=100, training_length=None, temperature=1.0, metrics=metrics
    )
    async with serve(disagreeing, conservative=2.0) as (client, service):
        info = (await client.get("/info")).json()
        assert service.model is not None
        assert service.model.record is not None
        assert service.model.record.num_eval == num_eval
    assert (info["reward_mean"], info["reward_std"]) == (mean, std)


async def test_recipe_combines_the_conservative_reward(tmp_path: Path, disagreeing: HeadsModel, score_of: Any) -> None:
    """Standardised with the checkpoint's spread and the mean moved by what is taken off on average."""
    metrics = {"heads": {"mean_std": 0.5}}
    disagreeing.record = CheckpointRecord.model_construct(
        reward_mean=1.5, reward_std=4.0, num_eval=100, training_length=None, temperature=1.0, metrics=metrics
    )
    async with serving(tmp_path, RECIPE, disagreeing, conservative=1.0) as (client, _):
        status, answer = await post(client, {"prompt": "q", "completions": ["a"]})
        info = (await client.get("/info")).json()
    assert status == 200, answer
    heads = score_of(disagreeing.renderer.render("q", "a")) * disagreeing.scales + OFFSETS
    reward = heads.mean() - heads.std()
    components = answer["components"]
    assert components["model"][0] == pytest.approx((reward - (1.5 - 0.5)) / 4.0, rel=1e-4)
    assert components["model.mean"][0] == pytest.approx(heads.mean(), rel=1e-4)
    assert answer["rewards"] == [components["model"][0] + components["size"][0]]
    assert info["model_reward_id"] == conservative_reward_id(disagreeing.reward_id, 1.0)
    assert info["checkpoint_reward_id"] == disagreeing.reward_id
    async with serving(tmp_path, RECIPE, disagreeing) as (client, _):
        assert (await client.get("/info")).json()["reward_id"] != info["reward_id"]
