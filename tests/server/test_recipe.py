"""Recipes: what they may say, what they make of components, and what is refused in which words."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rm_server.recipe import (
    MissingComponentError,
    Recipe,
    combine,
    identity_of,
    load_recipe,
    standards_of,
)
from rm_server.settings import SettingsError
from rm_server.verifiers.parts import Standard

MIXED = """
parts:
  model:  {kind: model, standardise: checkpoint}
  answer: {kind: math}
  form:   {kind: regex, pattern: "(?s)<think>.*</think>.*"}
  length: {kind: overlong, max_length: 100, buffer: 50}
reward:
  gate: form
  otherwise: -1.5
  then:
    sum:
      - {part: model, weight: 0.25}
      - answer
      - {product: [answer, length], weight: 2}
"""


def recipe_of(text: str) -> Recipe:
    return Recipe.model_validate(yaml.safe_load(text))


def test_sum_product_and_gate_combine_by_hand() -> None:
    reward = recipe_of(MIXED).reward
    # 0.25 * 2 + 1 + 2 * (1 * -0.5) = 0.5
    assert combine(reward, {"model": 2.0, "answer": 1.0, "form": 1.0, "length": -0.5}) == 0.5
    assert combine(reward, {"model": 2.0, "answer": 1.0, "form": 0.0, "length": -0.5}) == -1.5


def test_closed_gate_needs_nothing_of_what_is_behind_it() -> None:
    reward = recipe_of(MIXED).reward
    assert combine(reward, {"form": 0.0}) == -1.5
    with pytest.raises(MissingComponentError, match="model"):
        combine(reward, {"form": 1.0, "answer": 1.0, "length": 0.0})


def test_gate_opens_at_its_threshold_and_weights_scale_every_node() -> None:
    text = """
    parts: {a: {kind: length}, b: {kind: length}}
    reward: {gate: a, at_least: 0.5, then: b, otherwise: 3, weight: 2}
    """
    reward = recipe_of(text).reward
    assert combine(reward, {"a": 0.5, "b": 7.0}) == 14.0
    assert combine(reward, {"a": 0.4999, "b": 7.0}) == 6.0


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=8))
def test_weighted_sum_is_rounded_once(terms: list[tuple[float, float]]) -> None:
    names = [f"p{i}" for i in range(len(terms))]
    recipe = Recipe.model_validate(
        {
            "parts": {name: {"kind": "length"} for name in names},
            "reward": {
                "sum": [{"part": name, "weight": weight} for name, (weight, _) in zip(names, terms, strict=True)]
            },
        }
    )
    components = {name: value for name, (_, value) in zip(names, terms, strict=True)}
    assert combine(recipe.reward, components) == math.fsum(weight * value for weight, value in terms)


def test_identity_covers_recipe_model_and_versions_and_not_the_way_it_is_written() -> None:
    recipe = recipe_of(MIXED)
    rewritten = recipe_of(MIXED.replace("- answer", "- {part: answer, weight: 1.0}"))
    identity = identity_of(recipe, "sha256:a", {"math-verify": "0.9.0"})
    assert identity.startswith("sha256:")
    assert len(identity) == 71
    assert identity_of(rewritten, "sha256:a", {"math-verify": "0.9.0"}) == identity
    others = {
        identity_of(recipe, "sha256:b", {"math-verify": "0.9.0"}),
        identity_of(recipe, None, {"math-verify": "0.9.0"}),
        identity_of(recipe, "sha256:a", {"math-verify": "0.9.1"}),
        identity_of(recipe_of(MIXED.replace("weight: 2", "weight: 3")), "sha256:a", {"math-verify": "0.9.0"}),
        identity_of(recipe_of(MIXED.replace("buffer: 50", "buffer: 49")), "sha256:a", {"math-verify": "0.9.0"}),
    }
    assert len(others | {identity}) == 6


def test_standards_come_from_the_checkpoint_or_the_recipe() -> None:
    recipe = recipe_of(MIXED.replace("kind: math", "kind: math, standardise: {mean: 0.5, std: 0.25}"))
    assert standards_of(recipe, 1.5, 2.0) == {
        "model": Standard(mean=1.5, std=2.0),
        "answer": Standard(mean=0.5, std=0.25),
    }
    for mean, std in ((None, None), (0.0, 0.0), (0.0, math.nan)):
        with pytest.raises(SettingsError, match=r"parts\.model\.standardise: the checkpoint stores no spread"):
            standards_of(recipe, mean, std)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- 1", "must be a mapping with the keys parts and reward"),
        ("a: [", "is not valid YAML"),
        ("parts: {a: {kind: length}}", "reward: is required"),
        ("parts: {}\nreward: a", "parts: must not be empty"),
        ("parts: {a: {kind: length}}\nreward: b", "reward.part: there is no part 'b'"),
        ("parts: {answer: {kind: math}}\nreward: anser", "did you mean answer?"),
        ("parts: {a: {kind: length}, b: {kind: length}}\nreward: a", "parts.b: is not used in reward; give it weight 0"),
        ("parts: {a: {kind: maths}}\nreward: a", "parts.a.kind: must be one of model, math, exact, regex, json, length"),
        ("parts: {a: {}}\nreward: a", "parts.a.kind: is required"),
        ("parts: {a: 3}\nreward: a", "parts.a: "),
        ("parts: {a b: {kind: length}}\nreward: a b", "a part's name is letters, digits, _ and -"),
        ("parts: {a: {kind: math, timeout_secs: 3}}\nreward: a", "parts.a.timeout_secs: unknown key; did you mean timeout_seconds?"),
        ("parts: {a: {kind: math, timeout_seconds: 0}}\nreward: a", "parts.a.timeout_seconds: must be greater than 0"),
        ("parts: {a: {kind: regex}}\nreward: a", "parts.a.pattern: is required"),
        ("parts: {a: {kind: regex, pattern: '('}}\nreward: a", "parts.a.pattern: is no regular expression: missing )"),
        ("parts: {a: {kind: overlong, max_length: 3, buffer: 4}}\nreward: a", "parts.a: buffer (4) must be at most max_length (3)"),
        ("parts: {a: {kind: length, minimum: 4, maximum: 3}}\nreward: a", "maximum (3) must be at least minimum (4)"),
        ("parts: {a: {kind: json, schema: {type: objekt}}}\nreward: a", "parts.a.schema: is no JSON Schema: 'objekt'"),
        ("parts: {a: {kind: json, schema: {$ref: 'http://x/y'}}}\nreward: a", "parts.a.schema: refers to another document"),
        ("parts: {a: {kind: math, standardise: checkpoint}}\nreward: a", "parts.a.standardise: "),
        ("parts: {a: {kind: math, standardise: {std: 0}}}\nreward: a", "parts.a.standardise.std: must be greater than 0"),
        ("parts: {a: {kind: model}, b: {kind: model}}\nreward: {sum: [a, b]}", "only one part may be of kind model"),
        ("parts: {a: {kind: length}}\nreward: {sum: []}", "reward.sum: must not be empty"),
        ("parts: {a: {kind: length}}\nreward: {sum: [{part: a, wieght: 2}]}", "reward.sum[0].wieght: unknown key; did you mean weight?"),
        ("parts: {a: {kind: length}}\nreward: {sum: [{part: a, gate: a}]}", "reward.sum[0]: must be the name of a part, or have exactly one of"),
        ("parts: {a: {kind: length}}\nreward: {gate: a}", "reward.then: is required"),
        ("parts: {a: {kind: length}}\nreward: {part: a, weight: .inf}", "reward.weight: must be a finite number"),
        ("parts: {a: {kind: length}}\nreward: a\nrewards: a", "rewards: unknown key; did you mean reward?"),
        ("parts: {a: {kind: length}, a: {kind: math}}\nreward: a", "the key a appears twice"),
    ],
)  # fmt: skip
def test_wrong_recipe_is_one_line_that_names_file_and_key(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as raised:
        load_recipe(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: ")
    assert says in message
    assert "\n" not in message


def test_recipe_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no\.yaml: cannot be read: No such file or directory"):
        load_recipe(tmp_path / "no.yaml")


def test_every_default_is_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("parts: {a: {kind: json, schema: {type: object}}}\nreward: a")
    recipe: Any = load_recipe(path).as_json()
    assert recipe["reward"] == {"weight": 1.0, "part": "a"}
    assert recipe["parts"]["a"] == {
        "kind": "json",
        "schema": {"type": "object"},
        "after": None,
        "standardise": None,
        "timeout_seconds": 5.0,
    }
    assert load_recipe(path) == Recipe.model_validate(recipe)
