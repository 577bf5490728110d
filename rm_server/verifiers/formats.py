"""The form of an answer: equal to a text, matching a pattern, or JSON that fits a schema. Each gives 1.0 or 0.0.

Invariant: the result depends on the text alone. A pattern can take exponential time on some texts: callers set a hard
limit (``pool.py``).
"""

import json
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from rm_server.verifiers.answers import texts_of

_FENCE = re.compile(
    r"^(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})(?P<info>[^\n`]*)\n(?P<content>.*?)^[ \t]*(?P=fence)[ \t\r]*$",
    re.MULTILINE | re.DOTALL,
)


def check_exact(answer: str, reference: Any, *, ignore_case: bool = False, ignore_space: bool = True) -> float:
    """1.0 where the answer is the reference, or one of a list of them.

    ``ignore_space``: runs of white space count as one blank, and those at the ends do not count.
    Raises BadReferenceError where there is no reference.
    """

    def plain(text: str) -> str:
        text = " ".join(text.split()) if ignore_space else text
        return text.casefold() if ignore_case else text

    return float(plain(answer) in {plain(text) for text in texts_of(reference)})


def check_regex(answer: str, pattern: str | re.Pattern[str], *, whole: bool = True) -> float:
    """1.0 where the pattern (Python's ``re``) matches the whole answer, or with ``whole=False`` any part of it.

    The dot does not match a line break unless the pattern begins with ``(?s)``.
    """
    compiled = re.compile(pattern)
    found = compiled.fullmatch(answer) if whole else compiled.search(answer)
    return float(found is not None)


def check_json(answer: str, schema: Mapping[str, Any]) -> float:
    """1.0 where the answer is one JSON value that the schema (JSON Schema, draft 2020-12 unless it names another)
    accepts. A fence of backticks around the value is allowed. NaN, Infinity and duplicate keys are no JSON.

    References to other documents are not followed: a schema that needs one raises.
    """
    try:
        value = json.loads(_unfenced(answer), parse_constant=_refuse, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return 0.0
    return float(validator_of(schema).is_valid(value))


def validator_of(schema: Mapping[str, Any]) -> Any:
    """The validator of a schema. Raises ``jsonschema.SchemaError`` where it is none."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for
    from referencing import Registry

    cls: Any = validator_for(schema, default=Draft202012Validator)
    cls.check_schema(schema)
    return cls(schema, registry=Registry())


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """The fenced blocks of a Markdown text in order, as (language, content).

    The language is the first word behind the fence, in lower case. The content of an indented fence, as in a list, has
    lost that indentation.
    """
    return [("".join(match["info"].lower().split()[:1]), _content(match)) for match in _FENCE.finditer(text)]


def _unfenced(text: str) -> str:
    match = _FENCE.fullmatch(text.strip())
    return match["content"] if match is not None else text


def _content(match: re.Match[str]) -> str:
    content, indent = match["content"], len(match["indent"])
    if indent:
        content = re.sub(rf"^[ \t]{{1,{indent}}}", "", content, flags=re.MULTILINE)  # as CommonMark has it
    return textwrap.dedent(content) if content.lstrip("\r\n")[:1] in (" ", "\t") else content


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key appears twice")
    return dict(pairs)
