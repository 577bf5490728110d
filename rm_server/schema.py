"""What ``POST /score`` takes and answers, and its refusals in words.

Invariant: nothing that was sent is ignored. A field is understood, or it is refused by name; and no refusal quotes
what the caller wrote, beyond the names of fields.
"""

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from rm_server.errors import InvalidRequestError

M = TypeVar("M", bound=BaseModel)
_NOT_YET = ("references", "recipe", "components", "verifiers")
_TEXT, _MESSAGES, _OBJECT = "(text)", "(messages)", "(object)"
MAX_FIELDS = 32
MAX_DEADLINE_MS = 24 * 3600 * 1000


Parts = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


def _form(value: Any) -> str | None:
    if isinstance(value, str):
        return _TEXT
    if isinstance(value, list):
        return _MESSAGES
    return _OBJECT if isinstance(value, dict | BaseModel) else None


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        # Each unknown field becomes an error object: 700,000 of them held the event loop for 2.8 s.
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise PydanticCustomError("too_many_fields", "{found} fields are too many", {"found": len(value)})
        return value


Content = Annotated[
    Annotated[str, Tag(_TEXT)] | Annotated[Parts, Tag(_MESSAGES)],
    Discriminator(_form, custom_error_type="wrong_form", custom_error_message="must be a text or a list of parts"),
]


class Message(_Strict):
    """One message of a conversation, as chat templates take it."""

    role: str = Field(min_length=1)
    content: Content | None = None
    """Text, or a list of parts `{"type": "text", "text": "…"}`."""
    name: str | None = None
    tool_calls: Parts | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    thinking: str | None = None


# A list stops at its first wrong element: a million wrong ids must not become a million error objects.
Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]
TextOrMessages = Annotated[
    Annotated[str, Tag(_TEXT)] | Annotated[Messages, Tag(_MESSAGES)],
    Discriminator(_form, custom_error_type="wrong_form", custom_error_message="must be a text or a list of messages"),
]


class Completion(_Strict):
    """An answer, with the note whether it came to its own end."""

    content: TextOrMessages
    finished: bool = True
    """False: cut by a length limit. Then no end token is added."""


AnyCompletion = Annotated[
    Annotated[str, Tag(_TEXT)] | Annotated[Messages, Tag(_MESSAGES)] | Annotated[Completion, Tag(_OBJECT)],
    Discriminator(
        _form,
        custom_error_type="wrong_form",
        custom_error_message='must be a text, a list of messages, or {"content": …, "finished": …}',
    ),
]
Completions = Annotated[list[AnyCompletion], Field(fail_fast=True)]
Prompt = Annotated[
    Annotated[str, Field(min_length=1), Tag(_TEXT)] | Annotated[Messages, Tag(_MESSAGES)],
    Discriminator(_form, custom_error_type="wrong_form", custom_error_message="must be a text or a list of messages"),
]


class Group(_Strict):
    """One prompt and its completions."""

    id: str | None = None
    """The caller's name for the group, given back in `ids`."""
    prompt: Prompt
    completions: Completions
    reference: Any = None
    """What the verifiers of the server's recipe compare the completions with; refused where it has none."""


class AdvantageOptions(_Strict):
    """How a reward is made relative to its group (`rm_client.grpo_advantages`)."""

    scale: Literal["std", "none", "batch"] = "std"
    ddof: int = Field(default=1, ge=0, le=1)
    eps: float = Field(default=1e-4, ge=0, allow_inf_nan=False)


Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


_SCORE_FORMS = (("prompt", "completions"), ("groups",), ("texts",), ("conversations",), ("input_ids",))


def _exactly_one(*forms: tuple[str, ...]) -> list[Any]:
    """JSON Schema for "the fields of one of these forms are given, those of the others are not"; null is not given."""
    names = [name for form in forms for name in form]
    null = {"type": "null"}
    return [
        {"required": [*form], "properties": {name: {"not": null} if name in form else null for name in names}}
        for form in forms
    ]


class ScoreRequest(_Strict):
    """One of `prompt` + `completions`, `groups`, `texts`, `conversations`, `input_ids`; the rest is optional."""

    model_config = ConfigDict(json_schema_extra={"oneOf": _exactly_one(*_SCORE_FORMS)})

    prompt: Prompt | None = None
    completions: Completions | None = None
    reference: Any = None
    """Of the one group that `prompt` and `completions` are, as in `groups`."""
    groups: Annotated[list[Group], Field(fail_fast=True)] | None = None
    texts: Annotated[list[str], Field(fail_fast=True)] | None = None
    conversations: Annotated[list[Messages], Field(fail_fast=True)] | None = None
    input_ids: Annotated[list[Ids], Field(fail_fast=True)] | None = None
    """Token ids made with the server's own tokenizer, complete with their end token."""
    tokenizer: str | None = None
    """The hash of the tokenizer that made `input_ids`; another one than the server's is refused (409)."""
    text_as: Literal["raw", "chat", "templated"] | None = None
    """How strings become tokens; the checkpoint's own rule where it is not given. `templated`: as a policy wrote them
    with the chat template, special tokens and all; such a text is finished if it stops at an end token."""
    truncation: Literal["error", "left"] = "error"
    """What happens to a sequence over the length limit: an error for it, or the loss of its beginning."""
    reward_id: str | None = None
    """Pin: refuse (409) if the server scores with another reward model."""
    advantages: AdvantageOptions | None = None
    """Also answer group-relative advantages. A flat list is one group."""
    token_rewards: bool = False
    """Also answer the reward as it is read at each token of an answer, in the same forward. It shows where the reward
    moved; it is not a reward for a token."""
    deadline_ms: float | None = Field(default=None, gt=0, le=MAX_DEADLINE_MS, allow_inf_nan=False)
    """Milliseconds from arrival after which an answer is of no use; the server's default where it is not given."""

    @model_validator(mode="after")
    def _one_form(self) -> "ScoreRequest":
        given = [
            name
            for name in ("prompt", "completions", "groups", "texts", "conversations", "input_ids")
            if getattr(self, name) is not None
        ]
        forms = {"prompt + completions" if name in ("prompt", "completions") else name for name in given}
        if len(forms) != 1:
            found = " and ".join(given) or "none of them"
            raise PydanticCustomError(
                "one_form",
                "give exactly one of prompt + completions, groups, texts, conversations, input_ids; found: {found}",
                {"found": found},
            )
        if forms == {"prompt + completions"} and len(given) == 1:
            other = "completions" if given == ["prompt"] else "prompt"
            raise PydanticCustomError(
                "one_form", "{other}: is required beside {given}", {"other": other, "given": given[0]}
            )
        if self.reference is not None and self.completions is None:
            raise PydanticCustomError("one_form", "reference: belongs to prompt + completions, or to one of groups")
        if self.tokenizer is not None and self.input_ids is None:
            raise PydanticCustomError("one_form", "tokenizer: belongs to input_ids, and there are none")
        return self


# ------------------------------------------------------------------ answer

Rewards = list[float | None]


class ItemErrorBody(BaseModel):
    """Why one item has no reward; `index` is its place in `rewards`."""

    index: list[int]
    type: str
    message: str
    retryable: bool


class TokenRewardsBody(BaseModel):
    """The reward as the model reads it at each token of an answer, had the sequence ended there; the last one is the
    model's reward. An item of `texts` or `input_ids` is an answer as a whole."""

    start: int
    """Place of the answer's first token in its sequence."""
    tokens: list[str]
    """What each token adds to the text; empty within a character of several tokens."""
    rewards: Rewards
    """null where the model gave no finite number."""


TokenRewards = list[TokenRewardsBody | None]


class UsageBody(BaseModel):
    """`tokens`: lengths of the sequences. `computed_tokens`: what was computed for them; sharing saved the rest."""

    tokens: int
    computed_tokens: int


class TimingBody(BaseModel):
    """Where the time went. `queue_ms` is what was neither tokenising nor a forward: waiting for room and for a turn."""

    queue_ms: float
    tokenize_ms: float
    forward_ms: float


class ScoreResponse(BaseModel):
    """Shapes as in the request: one list for one group or a flat list, a list of lists for `groups`."""

    rewards: Rewards | list[Rewards]
    """Raw fp32 logits, never squashed; null where `errors` says why."""
    advantages: Rewards | list[Rewards] | None = None
    """0 where there is no reward."""
    truncated: list[bool] | list[list[bool]]
    token_rewards: TokenRewards | list[TokenRewards] | None = None
    """Only when asked for, in the shape of `rewards`; null where there is no reward."""
    over_training_length: list[list[int]] | None = None
    """Places of sequences that are longer than any the model was trained on."""
    components: dict[str, Rewards | list[Rewards]] | None = None
    """Only from a server with a recipe: the value of each part, by name, in the shape of `rewards`."""
    errors: list[ItemErrorBody] | None = None
    ids: list[str | None] | None = None
    reward_id: str
    model: str
    usage: UsageBody
    timing: TimingBody


class ErrorDetail(BaseModel):
    type: str
    message: str
    retryable: bool
    request_id: str | None = None
    """As in the header `X-Request-ID` and in the server's log."""


class ErrorResponse(BaseModel):
    """Every answer that is not 2xx. `errors` says why each item failed, where all failed."""

    error: ErrorDetail
    errors: list[ItemErrorBody] | None = None


# ------------------------------------------------------------------ refusals


def parse_score_request(data: Any) -> ScoreRequest:
    """Check decoded JSON. Raises InvalidRequestError, which names the first wrong field."""
    return parse_as(ScoreRequest, data)


def count_items(data: Any) -> int:
    """Items in decoded JSON whose form is not checked yet: known before anything is made of them."""
    if not isinstance(data, dict):
        return 0
    groups = data["groups"] if isinstance(data.get("groups"), list) else []
    holders = [data, *(group for group in groups if isinstance(group, dict))]
    lists = [holder.get(name) for holder in holders for name in ("completions", "texts", "conversations", "input_ids")]
    return sum(len(items) for items in lists if isinstance(items, list))


def parse_as(model: type[M], data: Any) -> M:
    """Check decoded JSON against a request's model. Raises InvalidRequestError, which names the first wrong field."""
    if not isinstance(data, dict):
        raise InvalidRequestError(f"the body must be a JSON object, not {_json_type(data)}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise InvalidRequestError(_explain(error, model)) from None


def path_of(loc: Sequence[int | str]) -> str:
    """``("groups", 0, "prompt")`` as ``groups[0].prompt``; the branches of unions are left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in (_TEXT, _MESSAGES, _OBJECT):
            path += f".{_shown(part)}" if path else _shown(part)
    return path


_IN_WORDS = {
    "missing": "is required",
    "string_type": "must be a text",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "string_unicode": "must be valid Unicode",
    "finite_number": "must be a finite number",
}


def _explain(error: ValidationError, model: type[BaseModel]) -> str:
    problem = error.errors(include_input=False, include_url=False)[0]
    path, kind = path_of(problem["loc"]), problem["type"]
    if kind == "one_form":
        return problem["msg"]
    if kind == "extra_forbidden":
        return _unknown_field(str(problem["loc"][-1]), path, model)
    text = _IN_WORDS.get(kind) or problem["msg"].replace("Input should", "must")
    return f"{path}: {text}" if path else f"the body: {text}"


def _unknown_field(name: str, path: str, model: type[BaseModel]) -> str:
    if name in _NOT_YET:
        return f"{path}: is not supported by this server"
    known = {*model.model_fields, *Message.model_fields}
    if model is ScoreRequest:
        known |= {*Group.model_fields, *AdvantageOptions.model_fields}
    close = difflib.get_close_matches(name[:64], sorted(known), n=1)
    return f"{path}: unknown field" + (f"; did you mean {close[0]}?" if close else "")


def _shown(name: str) -> str:
    """A field's name as the caller wrote it, short and on one line."""
    printable = "".join(c if c.isprintable() else "?" for c in name[:64])
    return printable + ("…" if len(name) > 64 else "")


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")
