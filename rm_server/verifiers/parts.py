"""How a recipe names a verifier: its kind and its options. One class for each kind.

Invariant: options are checked here, once, when the recipe is read; a worker only applies them.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

TextMark = Annotated[str, Field(min_length=1)]


class Standard(BaseModel):
    """A part's value v becomes (v - mean) / std."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    mean: float = Field(default=0.0, allow_inf_nan=False)
    std: float = Field(default=1.0, gt=0, allow_inf_nan=False)


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, populate_by_name=True)


class ModelPart(_Part):
    """The reward model's raw logit."""

    kind: Literal["model"]
    standardise: Literal["checkpoint"] | Standard | None = None
    """`checkpoint`: with the mean and spread that the checkpoint stores; or `{mean: …, std: …}`."""


class _Verifier(_Part):
    standardise: Standard | None = None
    """`{mean: …, std: …}`: the value becomes (value - mean) / std."""
    timeout_seconds: float = Field(default=5.0, gt=0, le=600)
    """An answer that takes longer is an error of its own; its worker process is ended and replaced."""


class _TextVerifier(_Verifier):
    after: TextMark | None = None
    """Read only what follows the last occurrence of this text, such as `</think>`; nothing where it is missing."""


class MathPart(_TextVerifier):
    """1 where the answer's final expression equals the group's `reference`, else 0 (math-verify)."""

    kind: Literal["math"]
    extract: Literal["last", "boxed"] = "last"
    """`last`: as math-verify finds it, a boxed answer first; `boxed`: only the last `\\boxed{…}`."""


class ExactPart(_TextVerifier):
    """1 where the answer is the group's `reference` (or one of a list), else 0."""

    kind: Literal["exact"]
    ignore_case: bool = False
    """Compare without regard to upper and lower case."""
    ignore_space: bool = True
    """Count runs of white space as one blank, and none at the ends."""


class RegexPart(_TextVerifier):
    """1 where the answer matches the pattern, else 0."""

    kind: Literal["regex"]
    pattern: str
    """Python's syntax; begin with `(?s)` to let the dot match line breaks."""
    whole: bool = True
    """The pattern must match the whole answer; false: any part of it."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"is no regular expression: {error}") from None
        return pattern


class JsonPart(_TextVerifier):
    """1 where the answer is JSON that fits the schema, else 0. A fence of backticks around it is allowed."""

    kind: Literal["json"]
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    """JSON Schema; empty: any JSON value. References to other documents are refused."""

    @field_validator("schema_")
    @classmethod
    def _is_schema(cls, schema: dict[str, Any]) -> dict[str, Any]:
        try:
            from rm_server.verifiers.formats import validator_of
        except ImportError:  # said in words when the server starts
            return schema
        outside = [reference for reference in _references(schema) if not reference.startswith("#")]
        if outside:
            raise ValueError("refers to another document; only references that begin with # are followed")
        try:
            validator_of(schema)
        except ImportError:
            return schema
        except Exception as error:  # jsonschema's own tree of exceptions is not imported for this
            raise ValueError(f"is no JSON Schema: {str(error).splitlines()[0]}") from None
        return schema


class LengthPart(_Verifier):
    """1 where the answer's number of characters is within bounds, else 0."""

    kind: Literal["length"]
    minimum: int = Field(default=1, ge=0)
    """Characters an answer must have."""
    maximum: int | None = Field(default=None, ge=0)
    """Characters it may have."""

    @model_validator(mode="after")
    def _in_order(self) -> "LengthPart":
        if self.maximum is not None and self.maximum < self.minimum:
            raise ValueError(f"maximum ({self.maximum}) must be at least minimum ({self.minimum})")
        return self


class OverlongPart(_Verifier):
    """DAPO's soft over-long penalty: 0 up to `max_length - buffer` characters, then falling to -1 at `max_length`."""

    kind: Literal["overlong"]
    max_length: int = Field(ge=1)
    """Characters (about four to a token) from which on the penalty is -1."""
    buffer: int = Field(ge=0)
    """Characters below `max_length` over which the penalty grows."""
    unfinished: float | None = Field(default=-1.0, allow_inf_nan=False)
    """The value of an answer that was sent as `finished: false`, however long; null: as any other."""

    @model_validator(mode="after")
    def _in_order(self) -> "OverlongPart":
        if self.buffer > self.max_length:
            raise ValueError(f"buffer ({self.buffer}) must be at most max_length ({self.max_length})")
        return self


class RepetitionPart(_TextVerifier):
    """Minus the share of n-grams that repeat an earlier one: 0 down to -1."""

    kind: Literal["repetition"]
    after: TextMark | None = None
    """Read only what follows the last occurrence of this text; the whole answer where it is missing."""
    n: int = Field(default=4, ge=1, le=100)
    """Units in an n-gram."""
    unit: Literal["words", "characters"] = "words"
    """`characters` for writing without blanks between words."""


class CodePart(_TextVerifier):
    """1 where the answer's Python program passes all tests of the group's `reference`, else 0. Needs bubblewrap."""

    kind: Literal["code"]
    fraction: bool = False
    """Give the share of tests passed instead."""
    timeout_seconds: float = Field(default=120.0, gt=0, le=3600)
    """For all tests of one answer together; tests that do not get their turn within it are not passed."""
    test_seconds: float = Field(default=5.0, gt=0, le=600)
    """Processor time for one test; a program that takes more, or three times as much by the clock, does not pass."""
    memory_mb: int = Field(default=512, ge=32, le=65536)
    """MiB of memory of each of the program's processes, so at most `max_processes` times as much together."""
    max_processes: int = Field(default=8, ge=4, le=1024)
    """Processes and threads of one run; the sandbox itself needs 2 of them, and 3 for an `assert`."""
    python: str | None = None
    """The interpreter, a path below /usr; null: the system's python3."""


VerifierPart = MathPart | ExactPart | RegexPart | JsonPart | LengthPart | OverlongPart | RepetitionPart | CodePart
AnyPart = Annotated[ModelPart | VerifierPart, Field(discriminator="kind")]

NEEDS_REFERENCE = (MathPart, ExactPart, CodePart)
"""Kinds that compare an answer with the group's ``reference``."""


def _references(schema: Any) -> list[str]:
    if isinstance(schema, Mapping):
        own = [value for key, value in schema.items() if key in ("$ref", "$dynamicRef") and isinstance(value, str)]
        return own + [found for value in schema.values() for found in _references(value)]
    if isinstance(schema, list):
        return [found for value in schema for found in _references(value)]
    return []
