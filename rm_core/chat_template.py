"""Messages through a chat template, with what a template may do to a reward shut out: the clock, images, lost roles.

Invariant: what is printed depends on the messages, the template and the pinned date alone, and neither a role nor a
tool call is dropped.
"""

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Conversation = Sequence[Message]


class RenderError(ValueError):
    """A conversation or text that cannot be rendered. ``field`` is the dotted path of what is wrong with it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


def apply_template(tokenizer: Any, messages: list[dict[str, Any]], date: datetime.date) -> str:
    """The text that the tokenizer's template makes of checked messages, on that day. Raises RenderError."""
    import jinja2

    try:
        text = tokenizer.apply_chat_template(
            messages,
            chat_template=_pin_date(tokenizer.chat_template, date),
            tokenize=False,
            add_generation_prompt=False,
            date_string=date.strftime("%d %b %Y"),
        )
    except jinja2.TemplateError as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise RenderError("messages", f"the chat template refuses the roles ({roles}): {error}") from None
    except (TypeError, KeyError, AttributeError) as error:
        raise RenderError("messages", f"the chat template cannot print them: {error}") from None
    return str(text)


def _pin_date(template: str, date: datetime.date) -> str:
    """Shadow the template's clock: transformers turns a function passed as an argument into text, a macro it keeps."""
    if "strftime_now" not in template:
        return template
    codes = "".join(f"|replace('%{code}','{date.strftime('%' + code)}')" for code in "dmYybBaAjeHMIpS")
    return "{%- macro strftime_now(format) -%}{{ format" + codes + " }}{%- endmacro -%}" + template


def plain_message(message: Any, index: int) -> dict[str, Any]:
    """Check one message and join its text parts."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RenderError(where, f"must be an object with role and content, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RenderError(f"{where}.role", "is missing or not text")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        content = "".join(_text_part(part, f"{where}.content[{number}]") for number, part in enumerate(content))
    elif content is None and message.get("tool_calls"):
        content = ""
    elif not isinstance(content, str):
        raise RenderError(f"{where}.content", "is missing or neither text nor a list of text parts")
    return {**message, "content": content}


def _text_part(part: Any, where: str) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise RenderError(where, 'must be an object such as {"type": "text", "text": "…"}')
    if part["type"] != "text":
        raise RenderError(where, f"has type {part['type']!r}: this model reads text only")
    if not isinstance(part.get("text"), str):
        raise RenderError(f"{where}.text", "is missing or not text")
    return str(part["text"])


def check_nothing_dropped(messages: list[dict[str, Any]], text: str) -> None:
    """Refuse a role or a tool call that the template leaves out: the answer would be scored without it."""
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list | tuple):
            raise RenderError(f"messages[{index}].tool_calls", "must be a list of calls")
        for number, call in enumerate(calls):
            _check_call_printed(messages, text, call, f"messages[{index}].tool_calls[{number}]")
        if message["role"] in ("user", "assistant"):
            continue
        words = re.findall(r"[A-Za-z0-9]+", message["content"])
        if words and max(words, key=len) not in text:
            raise RenderError(
                f"messages[{index}].role", f"the chat template does not print the role {message['role']!r}"
            )


def _check_call_printed(messages: list[dict[str, Any]], text: str, call: Any, where: str) -> None:
    function = (call.get("function") or call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise RenderError(where, 'names no function: a call is {"function": {"name": …, "arguments": …}}')
    for message in messages:  # what a turn says of the function is no call of it
        if name in message["content"]:
            text = text.replace(message["content"].strip(), "", 1)
    if name not in text:
        raise RenderError(where, f"the chat template does not print the call of {name[:60]!r}")
