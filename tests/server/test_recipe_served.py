"""A recipe over a model: components that recombine, errors behind a gate, swaps under one identity."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rm_core.checkpoint import CheckpointRecord
from rm_server.memory import Need
from rm_server.recipe import combine, load_recipe
from rm_server.service import ScoringService
from rm_server.settings import ServerSettings, SettingsError
from rm_server.switch import Switch
from tests.server.recipes import MATH_GATE, MIXED, QUICK, post, serving


@pytest.fixture
def measured(fake: Any) -> Any:
    """The fake model with a checkpoint's record of its rewards' spread."""
    known: dict[str, Any] = {"reward_mean": 1.5, "reward_std": 4.0, "num_eval": 100, "training_length": None}
    fake.record = CheckpointRecord.model_construct(**known)
    return fake


async def test_components_of_a_mixed_recipe_recombine_to_the_reward(
    tmp_path: Path, measured: Any, score_of: Callable[[Any], float]
) -> None:
    groups: list[dict[str, Any]] = [
        {"id": "a", "prompt": "1/2 = ", "reference": "0.5", "completions": [
            "\\boxed{\\frac{1}{2}}",
            "\\boxed{0.6}",
            "0.5",
            "it is of course and without any doubt \\boxed{50\\%}",
        ]},
        {"id": "b", "prompt": [{"role": "user", "content": "3"}], "reference": 3, "completions": [
            [{"role": "assistant", "content": "\\boxed{3}"}],
            {"content": "\\boxed{4}", "finished": False},
        ]},
    ]  # fmt: skip
    async with serving(tmp_path, MIXED, measured) as (client, _):
        status, answer = await post(client, {"groups": groups, "advantages": {"scale": "std"}})
        info = (await client.get("/info")).json()
        assert status == 200, answer
        components = answer["components"]
        render = measured.renderer.render
        raw = [
            *(score_of(render("1/2 = ", text)) for text in groups[0]["completions"]),
            score_of(render(groups[1]["prompt"], "\\boxed{3}")),
            score_of(render(groups[1]["prompt"], "\\boxed{4}", finished=False)),
        ]
        assert [*components["model"][0], *components["model"][1]] == [(value - 1.5) / 4.0 for value in raw]
        assert components["answer"] == [[1.0, 0.0, 1.0, 1.0], [1.0, 0.0]]
        assert components["boxed"] == [[1.0, 1.0, 0.0, 1.0], [1.0, 1.0]]
        assert components["length"] == [[0.0, 0.0, 0.0, -1.0], [0.0, -1.0]]

        node = load_recipe(tmp_path / "recipe.yaml").reward
        for g, row in enumerate(answer["rewards"]):
            for i, reward in enumerate(row):
                parts = {name: values[g][i] for name, values in components.items()}
                assert combine(node, parts) == reward
        assert answer["rewards"][0][2] == -2.0, "the gate is closed"
        assert answer["reward_id"] == info["reward_id"]
        assert info["model_reward_id"] == measured.reward_id != info["reward_id"]
        assert info["recipe"] == load_recipe(tmp_path / "recipe.yaml").as_json()
        assert info["standards"] == {"model": {"mean": 1.5, "std": 4.0}}
        assert info["verifier_versions"]["math-verify"]
        assert len(answer["advantages"]) == 2

        status, refused = await post(client, {"texts": ["x"], "reward_id": measured.reward_id})
        assert (status, refused["error"]["type"]) == (409, "reward_id_mismatch")


async def test_real_checkpoint_behind_a_math_gate_recombines(tmp_path: Path, tiny_model: Any) -> None:
    model = copy.copy(tiny_model)
    model.record = tiny_model.record.model_copy(update={"reward_mean": 0.25, "reward_std": 0.5, "num_eval": 64})
    completions = ["$4$", "$5$", "well, two and two are, as everybody knows, $4$"]
    async with serving(tmp_path, MATH_GATE, model) as (client, _):
        status, answer = await post(client, {"prompt": "2 + 2 = ", "completions": completions, "reference": 4})
    assert status == 200, answer
    ids = [tiny_model.renderer.render("2 + 2 = ", text) for text in completions]
    raw = tiny_model.score_batch(ids).rewards
    standardised = [(float(value) - 0.25) / 0.5 for value in raw]
    components = answer["components"]
    assert components["model"] == pytest.approx(standardised, abs=1e-3)
    assert components["answer"] == [1.0, 0.0, 1.0]
    assert components["length"] == [0.0, 0.0, -1.0]
    gated = [components["model"][0], -3.0, components["model"][2] - 0.5]
    assert answer["rewards"] == pytest.approx(gated, abs=1e-12)


async def test_model_error_is_the_items_error_and_is_not_needed_behind_a_closed_gate(
    tmp_path: Path, measured: Any
) -> None:
    measured.nan_for = lambda ids: len(ids) > 1  # not for the probe at the start
    body = {"prompt": "?", "completions": ["\\boxed{1}", "1"], "reference": 1}
    async with serving(tmp_path, MIXED, measured) as (client, _):
        status, answer = await post(client, body)
    assert (status, answer["rewards"]) == (200, [None, -2.0])
    assert answer["errors"][0]["type"] == "non_finite_reward"
    assert answer["components"]["model"] == [None, None]


async def test_checkpoint_swapped_in_under_a_recipe_has_the_identity_that_a_start_with_it_gives(
    tmp_path: Path, measured: Any, score_of: Callable[[Any], float]
) -> None:
    recipe = MIXED.replace("kind: math,", "kind: exact,")
    body = {"prompt": "?", "completions": ["boxed"], "reference": "boxed"}
    async with serving(tmp_path, recipe, measured) as (client, service):
        _, before = await post(client, body)
        switch = Switch(service, lambda settings, checkpoint: measured, lambda settings, checkpoint: Need(0, 0))
        swapped = await switch.swap("the same one")
        _, after = await post(client, body)
        switch.close()
    assert swapped.reward_id == swapped.previous_reward_id == after["reward_id"] == before["reward_id"]
    raw = score_of(measured.renderer.render("?", "boxed"))
    assert after["components"]["model"] == before["components"]["model"] == [(raw - 1.5) / 4.0]


def test_checkpoint_and_recipe_must_belong_together(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(MIXED)
    with pytest.raises(SettingsError, match=r"recipe\.yaml: parts\.model: needs a reward model; give a CHECKPOINT"):
        ScoringService(ServerSettings(recipe=str(path)))
    path.write_text(QUICK)
    with pytest.raises(SettingsError, match="no part is of kind model, so CHECKPOINT would score nothing"):
        ScoringService(ServerSettings(checkpoint="x", recipe=str(path)))


async def test_standardising_needs_the_checkpoints_spread(tmp_path: Path, fake: Any) -> None:
    with pytest.raises(SettingsError, match=r"parts\.model\.standardise: the checkpoint stores no spread"):
        async with serving(tmp_path, MIXED, fake):
            pass
