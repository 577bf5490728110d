"""What other trainers' clients send, field by field, and what their URL may ask for.

Invariant: as in ``schema``: a field is understood, or it is refused by name. A field whose only harmless value is known
(``add_generation_prompt: false``) takes that value and no other.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from rm_server.errors import InvalidRequestError
from rm_server.inputs import ItemInput
from rm_server.schema import (
    _MESSAGES,
    _TEXT,
    MAX_DEADLINE_MS,
    Messages,
    TextOrMessages,
    _exactly_one,
    _form,
    parse_as,
)
from rm_server.schema import _Strict as Strict

Strings = Annotated[list[str], Field(fail_fast=True)]
TextOrTexts = Annotated[
    Annotated[str, Tag(_TEXT)] | Annotated[Strings, Tag(_MESSAGES)],
    Discriminator(_form, custom_error_type="wrong_form", custom_error_message="must be a text or a list of texts"),
]


class OpenRLHFRequest(Strict):
    """What OpenRLHF posts to `--reward.remote_url`."""

    query: Strings
    """Whole texts as the policy's tokens decode, special tokens included. This is what is scored."""
    prompts: list[Any] | None = None
    """Not needed by a reward model, for `query` begins with the prompt; verifiers read what follows it."""
    labels: list[Any] | None = None
    """What verifiers compare with, where the server has a recipe; not used by a reward model."""


class VllmClassifyRequest(Strict):
    """`POST /classify` as vLLM's clients and verl send it: `input` or `messages`."""

    model_config = ConfigDict(json_schema_extra={"oneOf": _exactly_one(("input",), ("messages",))})

    model: str | None = None
    """Any name; it is given back."""
    input: Any = None
    """A text, texts, token ids, or a list of token ids. Texts may be templated."""
    messages: Messages | None = None
    """One conversation; its last message is scored."""
    use_activation: bool | None = None
    """False: the raw reward. True, and by default as in vLLM: its logistic function."""
    activation: bool | None = None
    """The older name of `use_activation`."""
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | Literal[-1] | None = None
    """Keep the last so many tokens; -1: as many as the model takes."""
    truncation_side: Literal["left"] | None = None
    add_special_tokens: bool | None = None
    """Taken, and makes no difference: the beginning of a sequence is written once either way."""
    add_generation_prompt: Literal[False] | None = None
    continue_final_message: Literal[False] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    """For `/v1/embeddings`."""
    dimensions: Literal[1] | None = None
    """For `/v1/embeddings`."""
    user: str | None = None
    request_id: str | None = None
    priority: Literal[0] | None = None

    @model_validator(mode="after")
    def _one_input(self) -> "VllmClassifyRequest":
        if (self.input is None) == (self.messages is None):
            raise PydanticCustomError("one_form", "give exactly one of input and messages")
        if None not in (self.use_activation, self.activation) and self.use_activation != self.activation:
            raise PydanticCustomError("one_form", "activation: contradicts use_activation; give one of them")
        return self

    @property
    def is_squashed(self) -> bool:
        """Whether the caller wants the logistic function of the reward."""
        return self.use_activation is not False and self.activation is not False


class SGLangClassifyRequest(Strict):
    """`POST /classify` as SGLang's clients send it: `text` or `input_ids`."""

    model_config = ConfigDict(json_schema_extra={"oneOf": _exactly_one(("text",), ("input_ids",))})

    model: str | None = None
    text: TextOrTexts | None = None
    input_ids: Any = None
    rid: TextOrTexts | None = None
    """The caller's name for the request, or for each item; given back in `meta_info`."""

    @model_validator(mode="after")
    def _one_input(self) -> "SGLangClassifyRequest":
        if (self.text is None) == (self.input_ids is None):
            raise PydanticCustomError("one_form", "give exactly one of text and input_ids")
        return self


class RewardUrlRequest(Strict):
    """What slime and miles post to `--rm-url`: one prompt and one response."""

    prompt: TextOrMessages
    response: str
    label: Any = None
    """What verifiers compare with, where the server has a recipe; not used by a reward model."""


class ScoreEvaluationRequest(Strict):
    """What LLaMA-Factory posts where `reward_model_type` is `api`."""

    model: str | None = None
    messages: Strings
    """Whole texts as the policy's tokens decode, special tokens included."""
    max_length: int | None = Field(default=None, ge=1)
    """Keep the last so many tokens."""


PROTOCOL_MODELS = (
    OpenRLHFRequest,
    VllmClassifyRequest,
    SGLangClassifyRequest,
    RewardUrlRequest,
    ScoreEvaluationRequest,
)


class UrlOptions(Strict):
    """What a trainer that only lets its user choose the URL can still ask for, as the URL's query."""

    reward_id: str | None = None
    """Pin: refuse (409) if the server scores with another reward model."""
    deadline_ms: float | None = Field(default=None, gt=0, le=MAX_DEADLINE_MS, allow_inf_nan=False, strict=False)
    """How long the caller waits at most; the route's default where it is not given."""
    truncation: Literal["error", "left"] = "error"
    """What happens to a sequence over the length limit."""
    finished: Literal["read", "always"] = "read"
    """`read`: an answer is finished if its text stops at an end token. `always`: every answer counts as finished, for
    callers that strip special tokens."""
    form: Literal["number", "object"] = "number"
    """`/reward` only: answer with a bare number, or with an object for `--reward-key score`."""


def read_url_options(query: Sequence[tuple[str, str]]) -> UrlOptions:
    """Check a URL's query. Raises InvalidRequestError, which names the parameter."""
    found: dict[str, str] = {}
    for name, value in query:
        if name in found:
            raise InvalidRequestError("the URL's query gives a parameter twice")
        found[name] = value
    try:
        return parse_as(UrlOptions, found)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"the URL's query: {error.message}") from None


def classify_form(data: Any) -> type[VllmClassifyRequest] | type[SGLangClassifyRequest]:
    """Whose `/classify` a body is meant for, told by its fields."""
    if isinstance(data, Mapping):
        if "text" in data or "input_ids" in data:
            return SGLangClassifyRequest
        if not ("input" in data or "messages" in data):
            raise InvalidRequestError("give input or messages (vLLM's form), or text or input_ids (SGLang's form)")
    return VllmClassifyRequest


def list_inputs_of(value: Any, path: str) -> list[ItemInput]:
    """A text, texts, ids, or lists of ids, as items. Raises InvalidRequestError naming the wrong element."""
    if isinstance(value, str):
        return [ItemInput(path, value, is_templated=True)]
    if not isinstance(value, list):
        raise InvalidRequestError(f"{path}: must be a text, a list of texts, token ids, or a list of token ids")
    if value and _is_id(value[0]):
        return [ItemInput(path, ids=_ids(value, path))]
    items = []
    for i, entry in enumerate(value):
        if type(entry) is not type(value[0]) or not isinstance(entry, str | list):
            raise InvalidRequestError(f"{path}[{i}]: must be a text or a list of token ids, like the first element")
        where = f"{path}[{i}]"
        items.append(
            ItemInput(where, entry, is_templated=True)
            if isinstance(entry, str)
            else ItemInput(where, ids=_ids(entry, where))
        )
    return items


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ids(value: list[Any], path: str) -> list[int]:
    # In C for the good case: a body may hold millions of ids, and this runs on the event loop.
    if value and (set(map(type, value)) != {int} or min(value) < 0):
        wrong = next(i for i, token in enumerate(value) if not _is_id(token) or token < 0)
        raise InvalidRequestError(f"{path}[{wrong}]: must be a token id, an integer from 0")
    return value
