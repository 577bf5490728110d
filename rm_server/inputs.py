"""From what a caller sent to token ids: a flat list of inputs, then one sequence for each. Runs off the event loop.

Invariant: ids come from the one renderer (or from the caller), and an input that cannot be scored becomes an error of
its own that names it as the caller knows it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import orjson

from rm_server.errors import InternalError, InvalidRequestError, ServerError, TooLongError, describe_exception
from rm_server.groups import Reading, key_of
from rm_server.schema import Completion, Group, Message, ScoreRequest
from rm_server.scorer import ServedModel
from rm_server.token_rewards import token_texts

MAX_CHARACTERS_PER_TOKEN = 64
"""A text with more characters than this for every allowed token is refused without tokenising it."""
_MAX_MESSAGE = 300

Text = str | list[Message]


@dataclass(frozen=True)
class ItemInput:
    """One thing to score. ``path`` and ``prompt_path`` are how the caller knows it, such as ``groups[0].prompt``."""

    path: str
    completion: Text | None = None
    prompt: Text | None = None
    prompt_path: str = ""
    ids: list[int] | None = None
    finished: bool | None = True
    """None: read from the end of a templated text; it is finished if it stops at an end token."""
    reference: Any = None
    """What verifiers compare the answer with."""
    answer: str | None = None
    """The answer alone for verifiers, where it is known and ``completion`` holds more."""
    is_templated: bool = False
    """A policy's own text, written with the chat template, special tokens and all."""

    @property
    def size(self) -> int:
        """Characters, or tokens where ids were sent."""
        if self.ids is not None:
            return len(self.ids)
        return _size(self.prompt) + _size(self.completion)


@dataclass(frozen=True)
class TokenizeOptions:
    """What a request says about turning its inputs into sequences."""

    max_length: int
    truncation: Literal["error", "left"] = "error"
    text_as: Literal["raw", "chat", "templated"] | None = None
    token_rewards: bool = False
    """The reward is wanted at each token of the answer."""


@dataclass(frozen=True)
class Tokens:
    """Token ids ready to score."""

    key: bytes
    is_truncated: bool = False
    is_finished: bool = True
    reading: Reading | None = None
    """The answer's tokens, where the reward is wanted at each of them."""


def list_inputs(request: ScoreRequest) -> list[ItemInput]:
    """All items of a request in order, whichever form they came in."""
    items = _list_inputs(request)
    if request.text_as != "templated":
        return items
    # Whether such a text is finished stands in it, unless the caller says that it is not.
    return [replace(item, is_templated=True, finished=item.finished and None) for item in items]


def _list_inputs(request: ScoreRequest) -> list[ItemInput]:
    if request.groups is not None:
        return [
            item for number, group in enumerate(request.groups) for item in _group_inputs(group, f"groups[{number}].")
        ]
    if request.texts is not None:
        return [ItemInput(f"texts[{i}]", text) for i, text in enumerate(request.texts)]
    if request.conversations is not None:
        return [ItemInput(f"conversations[{i}]", messages) for i, messages in enumerate(request.conversations)]
    if request.input_ids is not None:
        return [ItemInput(f"input_ids[{i}]", ids=ids) for i, ids in enumerate(request.input_ids)]
    assert request.prompt is not None, "this is a bug: the schema allows no other form"
    assert request.completions is not None, "this is a bug: the schema allows no other form"
    group = Group.model_construct(prompt=request.prompt, completions=request.completions, reference=request.reference)
    return _group_inputs(group, "")


def _group_inputs(group: Group, prefix: str) -> list[ItemInput]:
    items = []
    for number, completion in enumerate(group.completions):
        path, prompt_path = f"{prefix}completions[{number}]", f"{prefix}prompt"
        if isinstance(completion, Completion):
            path, answer, finished = f"{path}.content", completion.content, completion.finished
        else:
            answer, finished = completion, True
        items.append(ItemInput(path, answer, group.prompt, prompt_path, finished=finished, reference=group.reference))
    return items


def tokenize(
    model: ServedModel,
    inputs: Sequence[ItemInput],
    options: TokenizeOptions,
    log: Callable[[str], None] = lambda line: None,
) -> list[Tokens | ServerError]:
    """One sequence, or the reason why there is none, for each input. ``log`` gets failures of the tokenizer itself."""
    return [_tokenize_one(model, item, options, log) for item in inputs]


def why_never(model: ServedModel, item: ItemInput, options: TokenizeOptions) -> ServerError | None:
    """Why an input can never be scored, whatever the load, as far as it is seen without tokenising; else None."""
    if item.ids is not None:
        return _why_not_ids(model, item, options, item.ids)
    limit = options.max_length
    if options.truncation == "error" and (size := item.size) > limit * MAX_CHARACTERS_PER_TOKEN:
        return TooLongError(f"{item.path}: {size} characters cannot be {limit} tokens or fewer, which is the limit")
    return None


def _why_not_ids(model: ServedModel, item: ItemInput, options: TokenizeOptions, ids: list[int]) -> ServerError | None:
    limit = options.max_length
    if not ids:
        return InvalidRequestError(f"{item.path}: is empty, there is nothing to score")
    if len(ids) > limit and options.truncation != "left":
        return TooLongError(
            f'{item.path}: {len(ids)} tokens are over the limit of {limit}; shorten it, or ask for "truncation": "left"'
        )
    if max(ids) >= model.vocab_size:
        place = next(i for i, token in enumerate(ids) if token >= model.vocab_size)
        where = f"{item.path}[{place}]" if item.ids is not None else f"{item.path}: token {place}"
        return InvalidRequestError(
            f"{where}: {ids[place]} is not a token id of this model (0 to {model.vocab_size - 1})"
        )
    return None


def _tokenize_one(
    model: ServedModel, item: ItemInput, options: TokenizeOptions, log: Callable[[str], None]
) -> Tokens | ServerError:
    from rm_core.chat import RenderError, truncate_left

    limit = options.max_length
    if (refusal := why_never(model, item, options)) is not None:
        return refusal
    try:
        ids, is_finished = (item.ids, True) if item.ids is not None else _render(model, item, options)
        start = _answer_start(model, item, options, ids) if options.token_rewards else 0
    except RenderError as error:
        return InvalidRequestError(f"{wire_path(item, error.field)}: {error.message}"[:_MAX_MESSAGE])
    except RecursionError:
        return InvalidRequestError(f"{item.path}: is nested too deeply")
    except Exception as error:  # a tokenizer may raise anything; it must reach this item's caller, and no other
        log(f"the tokenizer failed: {describe_exception(error)}")
        return InternalError(f"{item.path}: the tokenizer failed on it; the server's log says where")
    if item.ids is None and (refusal := _why_not_ids(model, item, options, ids)) is not None:
        return refusal
    is_truncated = len(ids) > limit
    if is_truncated:
        bos = model.renderer.tokenizer.bos_token_id
        num_cut, ids = len(ids) - limit, truncate_left(ids, limit, bos)
        # A BOS that was kept in front is none of the answer's.
        start = max(start - num_cut, int(limit > 1 and ids[0] == bos))
    reading = Reading(start, token_texts(model.renderer.tokenizer, ids, start)) if options.token_rewards else None
    return Tokens(key_of(ids), is_truncated, is_finished, reading)


def _answer_start(model: ServedModel, item: ItemInput, options: TokenizeOptions, ids: list[int]) -> int:
    """The place of the answer's first token: where the same input with an empty answer goes on differently.

    A token that holds the end of the prompt and the beginning of the answer counts as the answer's.
    """
    from rm_core.chat import RenderError
    from rm_core.tree import shared_length

    if item.ids is not None or (item.prompt is None and isinstance(item.completion, str)):
        return 0
    empty: Text = ""
    if isinstance(item.completion, list):
        empty = [*item.completion[:-1], item.completion[-1].model_copy(update={"content": ""})]
    try:
        without, _ = _render(model, replace(item, completion=empty), options)
    except RenderError:
        return 0  # a template that prints no empty answer: all of it is shown
    return min(shared_length(without, ids), len(ids) - 1)


def _render(model: ServedModel, item: ItemInput, options: TokenizeOptions) -> tuple[list[int], bool]:
    """The ids, and whether what is scored came to its own end."""
    renderer, prompt, completion = model.renderer, _plain(item.prompt), _plain(item.completion)
    assert completion is not None, "this is a bug: an input has ids or a completion"
    if item.is_templated and isinstance(completion, str):
        if not isinstance(prompt, list):
            text = (prompt or "") + completion
            finished = renderer.split_end(text)[1] if item.finished is None else item.finished
            return renderer.render_templated(text, finished=finished), finished
        completion, is_ended = renderer.split_end(completion)
        finished = is_ended if item.finished is None else item.finished
        return renderer.render(prompt, completion, finished=finished), finished
    finished, text_as = item.finished is not False, None if options.text_as == "templated" else options.text_as
    if prompt is not None:
        return renderer.render(prompt, completion, finished=finished, text_as=text_as), finished
    if isinstance(completion, str):
        return renderer.render_text(completion, finished=finished, text_as=text_as), finished
    return renderer.render_conversation(completion, finished=finished), finished


def wire_path(item: ItemInput, field: str) -> str:
    """The caller's name for a field that the renderer complains about."""
    found = re.fullmatch(r"messages\[(\d+)\](.*)", field)
    if found is None:
        return item.prompt_path if field.startswith("prompt") and item.prompt_path else item.path
    number, rest = int(found[1]), found[2]
    num_prompt = len(item.prompt) if isinstance(item.prompt, list) else 0
    if number < num_prompt:
        return f"{item.prompt_path}[{number}]{rest}"
    return f"{item.path}[{number - num_prompt}]{rest}" if isinstance(item.completion, list) else item.path


def _plain(text: Text | None) -> str | list[dict[str, Any]] | None:
    if isinstance(text, list):
        # Not model_dump, which gives up on deeply nested tool calls.
        return [{name: value for name, value in message if value is not None} for message in text]
    return text


def _size(text: Text | None) -> int:
    if isinstance(text, list):
        return sum(_content_size(message) for message in text)
    return len(text) if text is not None else 0


def _content_size(message: Message) -> int:
    extras = (message.thinking, message.reasoning_content, message.role, message.name, message.tool_call_id)
    size = 16 + sum(len(extra) for extra in extras if extra)
    if message.tool_calls:
        size += _json_size(message.tool_calls)
    if isinstance(message.content, str):
        return size + len(message.content)
    return size + sum(
        len(part.get("text") or "") for part in message.content or () if isinstance(part.get("text"), str)
    )


def _json_size(value: Any) -> int:
    """Characters of decoded JSON, about."""
    try:
        return len(orjson.dumps(value))
    except orjson.JSONEncodeError:  # nested more deeply than it writes, though it reads that
        size, stack = 0, [value]
        while stack:
            part = stack.pop()
            size += 2 + (len(part) if isinstance(part, str) else 0)
            if isinstance(part, dict):
                stack += [*part.keys(), *part.values()]
            elif isinstance(part, list):
                stack += part
        return size
