"""Read a ``FitConfig`` from a YAML file and ``--set key.path=value`` overrides.

Invariant: whatever is wrong, the user gets a ``ConfigError`` of one line that names the file (or the ``--set``), the
dotted key and what to do.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from rm_train.config import FitConfig


class ConfigError(ValueError):
    """A config that cannot be used. The text is one line for the user."""


class _Loader(yaml.SafeLoader):
    """YAML that reads 1e-4 as a number, as everybody expects, and refuses a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key if isinstance(key, str) else id(key_node))
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> FitConfig:
    """Read and check a config.

    ``overrides`` are ``key.path=value`` texts, their values read as YAML; the last one wins. Raises ConfigError.
    """
    values = _read(Path(path))
    origins: dict[str, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key or any(not part for part in key.split(".")):
            raise ConfigError(f"--set {override}: write it as key.path=value, for instance train.epochs=2")
        try:
            value = yaml.load(text, Loader=_Loader)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {override}: the value is not valid YAML: {_yaml_problem(error)}") from None
        _put(values, key, value, override)
        origins[key] = f"--set {override}"
    try:
        return FitConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_one_line(error, str(path), origins)) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    try:
        values = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_yaml_line(error)}: is not valid YAML: {_yaml_problem(error)}") from None
    if values is None:
        raise ConfigError(f"{path}: is empty; it needs at least run.name, model.base and data.train")
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must be a mapping of sections, not a {type(values).__name__}")
    return values


def _yaml_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}" if mark is not None else ""


def _yaml_problem(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or str(error)
    return " ".join(str(problem).split())


def _put(values: dict[str, Any], key: str, value: Any, override: str) -> None:
    *parents, last = key.split(".")
    here = values
    for depth, part in enumerate(parents):
        below = here.get(part)
        if below is None:
            below = here[part] = {}
        if not isinstance(below, dict):
            path = ".".join(parents[: depth + 1])
            raise ConfigError(f"--set {override}: {path} is a {type(below).__name__}; set it as a whole")
        here = below
    here[last] = value


# ------------------------------------------------------------------ messages


def _one_line(error: ValidationError, path: str, origins: Mapping[str, str]) -> str:
    problems: dict[str, str] = {}
    # an unknown key first: it is often why another one is missing
    for item in sorted(error.errors(include_url=False), key=lambda item: item["type"] != "extra_forbidden"):
        key, text = _problem(item["loc"], item["type"], item["msg"], item.get("input"))
        problems.setdefault(key, text)
    lines = []
    for key, text in list(problems.items())[:3]:
        inside = [name for name in origins if key == name or key.startswith((f"{name}.", f"{name}["))]
        # an override may also be named by a problem of its parent
        origin = origins[max(inside, key=len)] if inside else path
        lines.append(f"{origin}: {key}: {text}" if key else f"{origin}: {text}")
    more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
    return "; ".join(lines) + more


def _problem(loc: Sequence[int | str], kind: str, message: str, given: Any) -> tuple[str, str]:
    """Return the dotted key and what is wrong with it."""
    key, owner, rest = _locate(loc)
    if kind == "extra_forbidden":
        return key, f"unknown key{_suggestion(key, str(loc[-1]), owner)}"
    if kind == "missing":
        return key, "is required"
    if kind == "value_error":
        text = message.removeprefix("Value error, ")
        named, colon, what = text.partition(": ")
        if not rest and colon and re.fullmatch(r"[a-z_.\[\]0-9]+", named):
            return f"{key}.{named}" if key else named, what
        return key, text
    if kind == "literal_error" and rest:
        return key, f"must be 'all-linear' or a list of module names, not {given!r}"
    shown = "null" if given is None else repr(given)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    if kind in ("model_type", "dict_type"):
        return key, f"must be a mapping of keys to values, not {shown}"
    return key, f"{message.replace('Input should', 'must').replace('String should', 'must')}, not {shown}"


def _locate(loc: Sequence[int | str]) -> tuple[str, type[BaseModel], bool]:
    """Turn pydantic's location into a dotted key.

    Returns the key, the model that owns its last part, and whether pydantic's own union branches were left out.
    """
    key, model = "", FitConfig
    owner: type[BaseModel] = model
    current: type[BaseModel] | None = model
    annotation: Any = None
    for part in loc:
        if isinstance(part, int):
            key += f"[{part}]"
            current = _model_in(annotation)
            continue
        if current is None:
            if annotation is not None and _is_mapping(annotation):
                return f"{key}.{part}", owner, False
            return key, owner, True
        owner = current
        key = f"{key}.{part}" if key else part
        field = current.model_fields.get(part)
        annotation = field.annotation if field else None
        current = None if field is None or _is_list(annotation) else _model_in(annotation)
    return key, owner, False


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        found = _model_in(inner)
        if found is not None:
            return found
    return None


def _is_list(annotation: Any) -> bool:
    return "list[" in str(annotation)


def _is_mapping(annotation: Any) -> bool:
    return "dict[" in str(annotation)


def _suggestion(key: str, name: str, owner: type[BaseModel]) -> str:
    prefix = key[: len(key) - len(name)]
    close = difflib.get_close_matches(name, owner.model_fields, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    everywhere = dict(_all_keys(FitConfig))
    same = [dotted for dotted, leaf in everywhere.items() if leaf == name]
    if same:
        return f"; did you mean {' or '.join(same)}?"
    leaves = difflib.get_close_matches(name, list(everywhere.values()), n=1, cutoff=0.75)
    if leaves:
        return f"; did you mean {next(dotted for dotted, leaf in everywhere.items() if leaf == leaves[0])}?"
    return f"; known here: {', '.join(owner.model_fields)}"


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        yield prefix + name, name
        inner = None if _is_list(field.annotation) else _model_in(field.annotation)
        if inner is not None:
            yield from _all_keys(inner, f"{prefix}{name}.")
