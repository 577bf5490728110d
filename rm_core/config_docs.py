"""Reference tables of settings, generated from the pydantic models that declare them.

Invariant: the documentation says what the code does, for both come from one declaration; a setting without a
docstring is an error here, so an undocumented one cannot be shipped.
"""

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined


@dataclass(frozen=True)
class Setting:
    """One documented key."""

    section: str
    """Dotted path of the section it belongs to; empty at the top."""
    key: str
    """Dotted path of the key."""
    type: str
    """Type in the words of YAML."""
    default: str
    """Default as YAML would write it, or ``required``."""
    bounds: str
    """Bounds, such as ``> 0, < 1``; empty when there are none."""
    doc: str
    """The field's docstring, on one line."""


@dataclass(frozen=True)
class Section:
    """One group of keys."""

    path: str
    """Dotted path; empty for the top level. ``data.train[]`` is an item of a list."""
    doc: str
    settings: tuple[Setting, ...]


def describe_settings(model: type[BaseModel]) -> list[Section]:
    """List sections and keys in declaration order. Raises ValueError naming a key that has no docstring."""
    return list(_sections(model, "", set()))


def markdown_reference(
    model: type[BaseModel],
    *,
    heading: str = "###",
    extra: Mapping[str, Callable[[Setting], str]] | None = None,
) -> str:
    """Write one Markdown table for each section.

    ``heading`` is put before each section's name. ``extra`` adds columns after the key: title to function of the
    setting (the server shows flag and environment name that way).
    """
    extra = extra or {}
    blocks = []
    for section in describe_settings(model):
        if section.path:
            blocks.append(f"{heading} `{section.path}`")
            if section.doc:
                blocks.append(section.doc)
        titles = ["key", *extra, "type", "default", "bounds", "what it does"]
        rows = [
            [
                f"`{setting.key}`",
                *(cell(setting) for cell in extra.values()),
                setting.type,
                setting.default if setting.default == "required" else f"`{setting.default}`",
                setting.bounds,
                setting.doc,
            ]
            for setting in section.settings
        ]
        if rows:
            lines = [titles, ["---"] * len(titles), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
            blocks.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join(blocks) + "\n"


def _sections(model: type[BaseModel], path: str, seen: set[type[BaseModel]]) -> Iterator[Section]:
    seen.add(model)
    settings: list[Setting] = []
    below: list[tuple[type[BaseModel], str]] = []
    for name, field in model.model_fields.items():
        key = f"{path}.{name}" if path else name
        inner, is_list = _nested(field.annotation)
        if inner is not None:
            below.append((inner, f"{key}[]" if is_list else key))
            if not is_list:
                continue  # the section's own text says what a plain nested model is for
        if not field.description:
            raise ValueError(f"{key}: the field has no docstring")
        settings.append(
            Setting(
                path,
                key,
                type_in_words(field.annotation),
                _default(field),
                _bounds(field),
                _one_line(field.description),
            )
        )
    yield Section(path, _one_line(model.__doc__ or ""), tuple(settings))
    for inner, inner_path in below:
        if inner not in seen:
            yield from _sections(inner, inner_path, seen)


def _nested(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Find the model inside an annotation, and whether it sits in a list or mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    in_container = get_origin(annotation) in (list, tuple, dict)
    for inner in get_args(annotation):
        model, is_list = _nested(inner)
        if model is not None:
            return model, is_list or in_container
    return None, False


_WORDS: dict[Any, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    type(None): "null",
    Any: "anything",
}


def type_in_words(annotation: Any) -> str:
    """Say a Python annotation in the words of YAML: ``int | None`` is ``integer or null``."""
    if annotation in _WORDS:
        return _WORDS[annotation]
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_in_words(inner[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(type_in_words(part) for part in inner)
    if origin in (list, tuple, set, frozenset):
        return f"list of {type_in_words(inner[0])}" if inner else "list"
    if origin is dict:
        return f"mapping of {type_in_words(inner[0])} to {type_in_words(inner[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return str(getattr(annotation, "__name__", annotation))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list | tuple | set | frozenset) and not value:
        return "{}" if isinstance(value, dict) else "[]"
    return str(value)


def _bounds(field: FieldInfo) -> str:
    parts = []
    for rule in field.metadata:
        match rule:
            case annotated_types.Ge(ge):
                parts.append(f"≥ {ge}")
            case annotated_types.Gt(gt):
                parts.append(f"> {gt}")
            case annotated_types.Le(le):
                parts.append(f"≤ {le}")
            case annotated_types.Lt(lt):
                parts.append(f"< {lt}")
            case annotated_types.MinLen(length):
                parts.append("not empty" if length == 1 else f"at least {length} long")
            case annotated_types.MaxLen(length):
                parts.append(f"at most {length} long")
            case _:
                pattern = getattr(rule, "pattern", None)
                if pattern:
                    parts.append(f"matches `{pattern}`")
    return ", ".join(parts)


def _one_line(text: str) -> str:
    return " ".join(text.split())
