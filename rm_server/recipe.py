"""A reward recipe: the parts of a reward and how they combine, read from YAML.

    parts:
      model:  {kind: model, standardise: checkpoint}
      answer: {kind: math}
      format: {kind: regex, pattern: "(?s)<think>.*</think>.*"}
    reward:
      gate: format
      otherwise: -1.0
      then:
        sum:
          - {part: model, weight: 0.2}
          - {part: answer}

Invariant: a reward is a function of its components and of nothing else: ``combine(recipe.reward, components)`` is the
reward that was answered, to the last bit.
"""

import difflib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rm_server.settings import SettingsError
from rm_server.verifiers.parts import AnyPart, ModelPart, Standard, VerifierPart

IDENTITY_VERSION = 1
"""Raised when a verifier of ours gives another value for the same answer: the reward has changed."""

PartName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Node(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    weight: Number = 1.0
    """What the value of this node is multiplied with."""


class PartNode(_Node):
    """The value of one part. A name alone is short for `{part: name}`."""

    part: str


class SumNode(_Node):
    """The sum of its terms."""

    sum: list["Node"] = Field(min_length=1)


class ProductNode(_Node):
    """The product of its factors."""

    product: list["Node"] = Field(min_length=1)


class GateNode(_Node):
    """`then` where the gate's part is at least `at_least`, else `otherwise`, whatever `then` would be."""

    gate: str
    at_least: Number = 1.0
    then: "Node"
    otherwise: Number = 0.0


_FORMS = ("part", "sum", "product", "gate")


def _form(value: Any) -> str | None:
    if isinstance(value, str):
        return "(part)"
    if isinstance(value, Mapping):
        found = [name for name in _FORMS if name in value]
        return f"({found[0]})" if len(found) == 1 else None
    return next((f"({name})" for name in _FORMS if hasattr(value, name)), None)


class _Named(PartNode):
    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"part": value} if isinstance(value, str) else value


Node = Annotated[
    Annotated[_Named, Tag("(part)")]
    | Annotated[SumNode, Tag("(sum)")]
    | Annotated[ProductNode, Tag("(product)")]
    | Annotated[GateNode, Tag("(gate)")],
    Discriminator(
        _form,
        custom_error_type="wrong_form",
        custom_error_message="must be the name of a part, or have exactly one of the keys part, sum, product, gate",
    ),
]


class Recipe(BaseModel):
    """The content of a recipe file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    parts: dict[PartName, AnyPart] = Field(min_length=1)
    """What is measured, by name; the names appear in `components`."""
    reward: Node
    """How the parts become one number."""

    @model_validator(mode="after")
    def _names_agree(self) -> "Recipe":
        used = list(part_names(self.reward))
        for place, name in used:
            if name not in self.parts:
                close = difflib.get_close_matches(name, self.parts, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise _problem(f"reward{place}: there is no part {name!r}{hint}")
        for name in self.parts:
            if name not in {used_name for _, used_name in used}:
                raise _problem(f"parts.{name}: is not used in reward; give it weight 0 to see it in components only")
        if sum(isinstance(part, ModelPart) for part in self.parts.values()) > 1:
            raise _problem("parts: only one part may be of kind model")
        return self

    @property
    def model_part(self) -> str | None:
        """The name of the part that is the reward model, or None."""
        return next((name for name, part in self.parts.items() if isinstance(part, ModelPart)), None)

    @property
    def verifiers(self) -> dict[str, VerifierPart]:
        """The parts that are not the model."""
        return {name: part for name, part in self.parts.items() if not isinstance(part, ModelPart)}

    def as_json(self) -> dict[str, Any]:
        """The recipe with every default filled in."""
        return self.model_dump(mode="json", by_alias=True)


class MissingComponentError(LookupError):
    """The reward needs a component that there is no value for; ``name`` is the part's."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def combine(node: Any, components: Mapping[str, float]) -> float:
    """The reward of one answer from its components. ``node`` is a recipe's ``reward``.

    Sums are exact before their one rounding (``math.fsum``). A gate that is closed needs nothing of ``then``.
    Raises MissingComponentError for a component that is needed and not there.
    """
    value: float
    match node:
        case PartNode():
            value = _component(components, node.part)
        case SumNode():
            value = _fsum([combine(term, components) for term in node.sum])
        case ProductNode():
            value = math.prod(combine(factor, components) for factor in node.product)
        case GateNode():
            is_open = _component(components, node.gate) >= node.at_least
            value = combine(node.then, components) if is_open else node.otherwise
        case _:
            raise AssertionError(f"this is a bug: {type(node).__name__} is no node")
    weight: float = node.weight
    return weight * value


def part_names(node: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Every use of a part below a node: (place such as ``.then.sum[1].part``, name)."""
    match node:
        case PartNode():
            yield f"{place}.part", node.part
        case SumNode():
            for i, term in enumerate(node.sum):
                yield from part_names(term, f"{place}.sum[{i}]")
        case ProductNode():
            for i, factor in enumerate(node.product):
                yield from part_names(factor, f"{place}.product[{i}]")
        case GateNode():
            yield f"{place}.gate", node.gate
            yield from part_names(node.then, f"{place}.then")


def load_recipe(path: Path) -> Recipe:
    """Read and check a recipe file. Raises SettingsError: one line that names the file and the key."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"{path}: is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise SettingsError(f"{path}: must be a mapping with the keys parts and reward")
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise SettingsError(f"{path}: {_explain(error)}") from None


def identity_of(recipe: Recipe, model_reward_id: str | None, versions: Mapping[str, str]) -> str:
    """``reward_id`` of a recipe: sha256 over the recipe, the model's own ``reward_id`` and the verifiers' versions."""
    content = {
        "version": IDENTITY_VERSION,
        "recipe": recipe.as_json(),
        "model": model_reward_id,
        "versions": dict(versions),
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def standards_of(recipe: Recipe, mean: float | None, std: float | None) -> dict[str, Standard]:
    """How each part is standardised. ``mean`` and ``std`` are the checkpoint's, None where it has none.

    Raises SettingsError where they are asked for and cannot be used.
    """
    standards: dict[str, Standard] = {}
    for name, part in recipe.parts.items():
        standard = part.standardise
        if standard == "checkpoint":
            if mean is None or std is None or not std > 0:
                raise SettingsError(
                    f"parts.{name}.standardise: the checkpoint stores no spread of its rewards; "
                    "rm-train calibrate makes one, or write {mean: …, std: …}"
                )
            standard = Standard(mean=mean, std=std)
        if standard is not None:
            standards[name] = standard
    return standards


def _component(components: Mapping[str, float], name: str) -> float:
    if name not in components:
        raise MissingComponentError(name)
    return components[name]


def _fsum(values: list[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # beyond the largest float, or infinities of both signs
        return sum(values)


def _problem(message: str) -> PydanticCustomError:
    return PydanticCustomError("recipe", "{message}", {"message": message})


_IN_WORDS = {
    "missing": "is required",
    "union_tag_not_found": "kind: is required",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "too_short": "must not be empty",
}


def _explain(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    kind, path = problem["type"], _path(problem["loc"])
    if kind == "recipe":
        return problem["msg"]
    if kind == "union_tag_invalid":
        kinds = ", ".join(str(get_args(cls.model_fields["kind"].annotation)[0]) for cls in _part_classes())
        return f"{path}.kind: must be one of {kinds}"
    if kind == "union_tag_not_found":
        return f"{path}.kind: is required"
    if kind == "string_pattern_mismatch" and path.endswith(".[key]"):
        return f"{path[: -len('.[key]')]}: a part's name is letters, digits, _ and -, and begins with a letter"
    if kind == "extra_forbidden":
        return f"{path}: unknown key{_nearest(problem['loc'])}"
    text = problem["msg"].removeprefix("Value error, ").replace("Input should", "must")
    return f"{path}: {_IN_WORDS.get(kind, text)}"


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for i, part in enumerate(loc):
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("(") and not (i == 2 and loc[0] == "parts" and part != "[key]"):
            path += f".{part}" if path else part
    return path


def _nearest(loc: tuple[int | str, ...]) -> str:
    kind = str(loc[-2]).strip("()") if len(loc) > 1 else ""
    if loc[0] == "parts":
        classes: list[type[BaseModel]] = [
            cls for cls in _part_classes() if get_args(cls.model_fields["kind"].annotation)[0] == kind
        ]
    else:
        nodes: dict[str, type[BaseModel]] = {"part": PartNode, "sum": SumNode, "product": ProductNode, "gate": GateNode}
        classes = [nodes[kind]] if kind in nodes else [Recipe]
    known = [field.alias or name for cls in classes for name, field in cls.model_fields.items()]
    close = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; there are: {', '.join(known)}"


def _part_classes() -> tuple[type[BaseModel], ...]:
    verifiers: tuple[type[BaseModel], ...] = get_args(VerifierPart)
    return (ModelPart, *verifiers)


class _UniqueKeys(yaml.SafeLoader):
    """A part that is written twice would otherwise silently be the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) < len(node.value):
            keys = [key.value for key, _ in node.value]
            twice = next((key for key in keys if keys.count(key) > 1), None)
            if twice is not None:
                raise yaml.YAMLError(f"the key {twice} appears twice (line {node.start_mark.line + 1} and below)")
        return mapping
