"""docs/verifiers.md shows recipes, examples and a table; each is what the code does."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import TypeAdapter

from rm_server.recipe import Recipe, combine, load_recipe
from rm_server.verifiers.answers import Answer
from rm_server.verifiers.parts import CodePart, VerifierPart
from rm_server.verifiers.sandbox import Sandbox, SandboxError
from rm_server.verifiers.work import prepare

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "verifiers.md").read_text(encoding="utf-8")
BLOCKS: list[dict[str, Any]] = [
    yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S)
]
RECIPE = next(block for block in BLOCKS if "reward" in block)
EXAMPLES = {block["part"]["kind"]: block for block in BLOCKS if "examples" in block}


def test_every_kind_has_examples() -> None:
    assert set(EXAMPLES) == {get_args(cls.model_fields["kind"].annotation)[0] for cls in get_args(VerifierPart)}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_examples_have_the_values_that_are_shown(kind: str) -> None:
    part = TypeAdapter[VerifierPart](VerifierPart).validate_python(EXAMPLES[kind]["part"])
    if isinstance(part, CodePart):
        part = part.model_copy(update={"test_seconds": 2.0})
        try:
            Sandbox().probe()
        except SandboxError as error:
            pytest.skip(f"no sandbox here: {error}")
    verify = prepare(part)
    for example in EXAMPLES[kind]["examples"]:
        answer = Answer(example["answer"], example.get("reference"), example.get("finished", True))
        assert verify(answer) == pytest.approx(example["value"]), example


def test_worked_recipe_gives_the_rewards_of_the_table() -> None:
    recipe = Recipe.model_validate(RECIPE)
    rows = re.findall(r"^\|(.+)\|$", PAGE[PAGE.index("<!-- worked recipe -->") :].split("\n\n")[0], re.M)
    head, _, *body = [[cell.strip() for cell in row.split("|")] for row in rows]
    assert len(body) == 3
    for row in body:
        components = {name: float(cell) for name, cell in zip(head, row, strict=True)}
        reward = components.pop("reward")
        assert combine(recipe.reward, components) == pytest.approx(reward, abs=1e-12)


def test_recipes_of_the_examples_can_be_read() -> None:
    recipes = [path for path in (ROOT / "examples").glob("*.yaml") if "--recipe" in path.read_text(encoding="utf-8")]
    for path in recipes:
        load_recipe(path)
