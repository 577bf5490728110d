"""The one place where text becomes token ids: trainer, evaluator, server and every protocol route call ``Renderer``.

Invariant: one conversation has one sequence of ids, whether it comes as messages or as the text that a policy wrote
with the same chat template. What decides the ids is recorded in ``RenderingRules`` and stored in the checkpoint.
"""

import datetime
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Message = Mapping[str, Any]
Conversation = Sequence[Message]

# The content of the probe conversations. Plain lower-case letters: no template changes or strips them.
_QUESTION, _ANSWER, _THOUGHT = "questionprobe", "answerprobe", "thoughtprobe"


class RenderError(ValueError):
    """A conversation or text that cannot be rendered. ``field`` is the dotted path of what is wrong with it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class RenderingRules(BaseModel):
    """How text becomes ids. Recorded in the checkpoint, part of ``reward_id``."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    text_as: Literal["raw", "chat"] = "raw"
    """Strings are tokenised as they are (raw), or wrapped as one user and one assistant turn (chat)."""
    end: Literal["token", "template"] = "token"
    """A chat ends at its last end-of-turn token (token), or with all that the template prints after it (template)."""
    date: datetime.date = datetime.date(2024, 7, 26)
    """What "today" is for templates that print it: a reward must not change overnight."""
    chat_template: str | None = Field(default=None, pattern=r"^sha256:[0-9a-f]{64}$")
    """Hash of the chat template; None when the tokenizer has none (then only raw text can be scored)."""
    chat_begins_with_bos: bool = False
    """Whether the template's output begins with the BOS token."""
    end_of_turn: str | None = None
    """The token that ends a chat's last turn."""
    end_of_text: str | None = None
    """The token that ends a raw text: the tokenizer's EOS; None when the tokenizer adds its own end ([SEP]) or none."""
    thinking: Literal["kept", "dropped", "none"] = "none"
    """What the template does with a <think> block in the scored answer; none when there is no template."""


def sha256_of(data: bytes | str) -> str:
    """``sha256:`` and the hex digest of the bytes (text as UTF-8)."""
    return "sha256:" + hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def tokenizer_hash(tokenizer: Any) -> str:
    """Identify a tokenizer by what decides its ids: two tokenizers with one hash give the same ids for every text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        # Both are left behind by earlier calls with padding= or truncation=, and set anew by every call.
        state.pop("padding", None)
        state.pop("truncation", None)
    else:
        state = {"vocab": tokenizer.get_vocab(), "class": type(tokenizer).__name__}
    state["special"] = {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())}
    return sha256_of(json.dumps(state, sort_keys=True, ensure_ascii=True))


def truncate_left(ids: Sequence[int], limit: int, bos_id: int | None = None) -> list[int]:
    """Keep the last ``limit`` ids, and the BOS in front of them where the sequence began with one."""
    if len(ids) <= limit:
        return list(ids)
    if bos_id is not None and ids[0] == bos_id and limit > 1:
        return [bos_id, *ids[len(ids) - limit + 1 :]]
    return list(ids[len(ids) - limit :])


class Renderer:
    """Turn conversations and texts into ids under fixed rules.

    Thread-safe as far as the tokenizer is: it holds no state of its own after construction.
    """

    def __init__(self, tokenizer: Any, rules: RenderingRules) -> None:
        self.tokenizer = tokenizer
        self.rules = rules
        template = tokenizer.chat_template
        if isinstance(template, Mapping):
            raise RenderError("chat_template", "the tokenizer has several named chat templates; keep one (`default`)")
        self._has_template = template is not None
        self._eos_ids = self._ids_of(rules.end_of_text)
        self._turn_end_ids = self._ids_of(rules.end_of_turn)
        self._ends = _end_tokens(tokenizer, rules)
        self._special = re.compile("|".join(re.escape(token) for token in _special_tokens(tokenizer)) or r"(?!)")
        self._tail = self._probe_tail() if self._has_template else []

    @classmethod
    def for_tokenizer(
        cls,
        tokenizer: Any,
        *,
        text_as: Literal["raw", "chat"] = "raw",
        end: Literal["token", "template"] = "token",
        date: datetime.date | None = None,
    ) -> "Renderer":
        """Derive the rules from the tokenizer and its template by rendering probe conversations."""
        if tokenizer.chat_template is None and text_as == "chat":
            raise RenderError("text_as", "'chat' needs a chat template, and this tokenizer has none")
        base = RenderingRules(text_as=text_as, end=end, **({"date": date} if date else {}))
        return cls(tokenizer, _derive_rules(tokenizer, base))

    def check_rules(self) -> None:
        """Raise RenderError naming the rule when tokenizer or template no longer do what the rules record."""
        rules = self.rules
        derived = _derive_rules(self.tokenizer, rules)
        for name in type(rules).model_fields:
            recorded, found = getattr(rules, name), getattr(derived, name)
            if recorded != found:
                raise RenderError(
                    name, f"the checkpoint records {recorded!r}, this tokenizer and template give {found!r}"
                )

    # ------------------------------------------------------------------ public rendering

    def render(
        self,
        prompt: str | Conversation | None,
        completion: str | Conversation,
        *,
        finished: bool = True,
        text_as: Literal["raw", "chat"] | None = None,
    ) -> list[int]:
        """Ids of one prompt with one completion.

        Two strings are tokenised together (``raw``) or become one user and one assistant turn (``chat``). With a
        prompt of messages, a completion of text is one assistant message. ``finished=False`` leaves the end token off.
        """
        if prompt is None or (isinstance(prompt, str) and prompt == "" and not isinstance(completion, str)):
            prompt = "" if isinstance(completion, str) else []
        if isinstance(prompt, str):
            if not isinstance(completion, str):
                raise RenderError("completion", "is a list of messages, but the prompt is text: send both in one form")
            if (text_as or self.rules.text_as) == "raw":
                return self.render_text(prompt + completion, finished=finished, text_as="raw")
            messages: Conversation = [{"role": "user", "content": prompt}] if prompt else []
            return self.render_conversation([*messages, _assistant(completion)], finished=finished)
        answer = [_assistant(completion)] if isinstance(completion, str) else list(completion)
        if not answer:
            raise RenderError("completion", "is an empty list of messages")
        return self.render_conversation([*prompt, *answer], finished=finished)

    def render_text(
        self, text: str, *, finished: bool = True, text_as: Literal["raw", "chat"] | None = None
    ) -> list[int]:
        """Ids of one text. Special tokens written in it are parsed as such; BOS and end token appear once."""
        if (text_as or self.rules.text_as) == "chat":
            return self.render_conversation([_assistant(text)], finished=finished)
        if not text:
            raise RenderError("text", "is empty")
        ids = self._encode(text, add_special_tokens=True)
        bos = self.tokenizer.bos_token_id
        if bos is not None and len(ids) > 1 and ids[0] == bos and ids[1] == bos:
            ids = ids[1:]
        return self._end_text(ids, finished)

    def render_conversation(self, messages: Conversation, *, finished: bool = True) -> list[int]:
        """Ids of a conversation through the chat template; its last message is what is scored."""
        ids = self._encode(self._template(messages), add_special_tokens=False)
        return self._end_chat(ids, finished)

    def render_templated(self, text: str, *, finished: bool | None = True) -> list[int]:
        """Ids of a text that a policy wrote with this chat template, special tokens and all.

        Equal to ``render_conversation`` of the same conversation. A BOS that the template begins with and the caller
        stripped (verl does) is put back once. A text without any special token before its end was written without the
        template, and is raw text. ``finished=None``: it is finished if it stops at an end token.
        """
        if not text:
            raise RenderError("text", "is empty")
        body, is_ended = self.split_end(text)
        finished = is_ended if finished is None else finished
        if not body:
            body = text
        if not self._has_template or not self._special.search(body):
            return self.render_text(body, finished=finished, text_as="raw")
        ids = self._encode(body, add_special_tokens=False)
        bos = self.tokenizer.bos_token_id
        if self.rules.chat_begins_with_bos and ids[0] != bos:
            ids = [bos, *ids]
        return self._end_chat(ids, finished)

    def split_end(self, text: str) -> tuple[str, bool]:
        """A policy's own text without the end and pad tokens that it stops at, and whether there were any."""
        end, is_ended = len(text), False
        while True:
            stop = end
            while stop and text[stop - 1].isspace():
                stop -= 1
            token = next((token for token in self._ends if text.endswith(token, 0, stop)), None)
            if token is None:
                return text[:end], is_ended
            end, is_ended = stop - len(token), True

    def render_pair(
        self,
        prompt: str | Conversation | None,
        chosen: str | Conversation,
        rejected: str | Conversation,
        *,
        max_length: int,
    ) -> tuple[list[int], list[int], bool]:
        """Ids of both answers to one prompt, at most ``max_length`` each; the third value says whether any was cut.

        Too long a pair loses whole turns from the left of its prompt (never the system message), and only then tokens
        from the left. Both answers keep the same prompt, and neither loses its end.
        """
        both = [self.render(prompt, answer) for answer in (chosen, rejected)]
        if max(map(len, both)) <= max_length:
            return both[0], both[1], False
        if prompt and not isinstance(prompt, str):
            first_turn = 1 if prompt[0].get("role") == "system" else 0
            for start in range(first_turn + 1, len(prompt)):
                if prompt[start].get("role") != "user":
                    continue
                shorter = [*prompt[:first_turn], *prompt[start:]]
                both = [self.render(shorter, answer) for answer in (chosen, rejected)]
                if max(map(len, both)) <= max_length:
                    return both[0], both[1], True
        # The same number of ids is cut from both, so that the two still answer one prompt.
        excess = max(map(len, both)) - max_length
        bos = self.tokenizer.bos_token_id
        cut = [truncate_left(ids, max(len(ids) - excess, 1), bos) for ids in both]
        return cut[0], cut[1], True

    # ------------------------------------------------------------------ ends

    def _end_text(self, ids: list[int], finished: bool) -> list[int]:
        if not finished:
            ends = {*self._eos_ids, *self._turn_end_ids}
            return ids[:-1] if len(ids) > 1 and ids[-1] in ends else ids
        if self._turn_end_ids and self._ends_with_turn(ids):
            # A policy's own templated text sent as plain text: it is ended already.
            return self._end_chat(ids, finished)
        if self._eos_ids and ids[-1] != self._eos_ids[-1]:
            return [*ids, *self._eos_ids]
        return ids

    def _ends_with_turn(self, ids: list[int]) -> bool:
        return ids[-1] in self._turn_end_ids or (
            bool(self._tail)
            and ids[-len(self._tail) :] == self._tail
            and ids[-len(self._tail) - 1 :][0] in self._turn_end_ids
        )

    def _end_chat(self, ids: list[int], finished: bool) -> list[int]:
        if self._tail and ids[-len(self._tail) :] == self._tail and self._ends_with_turn(ids):
            ids = ids[: -len(self._tail)]
        if not finished:
            return ids[:-1] if len(ids) > 1 and ids[-1] in self._turn_end_ids else ids
        if self._turn_end_ids and ids[-1] != self._turn_end_ids[-1]:
            ids = [*ids, *self._turn_end_ids]
        return [*ids, *self._tail] if self.rules.end == "template" else ids

    # ------------------------------------------------------------------ template and tokenizer

    def _ids_of(self, token: str | None) -> list[int]:
        if token is None:
            return []
        token_id = self.tokenizer.convert_tokens_to_ids(token)
        if token_id is None or (token_id == self.tokenizer.unk_token_id and token != self.tokenizer.unk_token):
            raise RenderError("end_of_turn", f"the tokenizer does not know the end token {token!r}")
        return [int(token_id)]

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            encoded = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        except UnicodeEncodeError:
            raise RenderError("text", "contains a lone surrogate (invalid Unicode)") from None
        except TypeError as error:
            # fast tokenizers report text that is not valid UTF-8 as a wrong type
            raise RenderError("text", "cannot be tokenised: it is not valid Unicode text") from error
        if not encoded:
            raise RenderError("text", "gives no tokens")
        return [int(token_id) for token_id in encoded]

    def _template(self, messages: Conversation) -> str:
        if not self._has_template:
            raise RenderError("messages", "this model has no chat template: send text")
        if not messages:
            raise RenderError("messages", "is an empty list")
        plain = [_plain_message(message, index) for index, message in enumerate(messages)]
        text = _apply_template(self.tokenizer, plain, self.rules.date)
        _check_nothing_dropped(plain, text)
        return text

    def _probe_tail(self) -> list[int]:
        """What the template prints after the last turn's end token."""
        ids = _probe_ids(self.tokenizer, self.rules.date)
        if not self._turn_end_ids or self._turn_end_ids[0] not in ids:
            return []
        last = len(ids) - 1 - ids[::-1].index(self._turn_end_ids[0])
        return ids[last + 1 :]


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _apply_template(tokenizer: Any, messages: list[dict[str, Any]], date: datetime.date) -> str:
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


def _plain_message(message: Any, index: int) -> dict[str, Any]:
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


def _check_nothing_dropped(messages: list[dict[str, Any]], text: str) -> None:
    """Refuse a role that the template leaves out: the answer would be scored without it."""
    for index, message in enumerate(messages):
        if message["role"] in ("user", "assistant"):
            continue
        words = re.findall(r"[A-Za-z0-9]+", message["content"])
        if words and max(words, key=len) not in text:
            raise RenderError(
                f"messages[{index}].role", f"the chat template does not print the role {message['role']!r}"
            )


def _probe_messages(answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": answer}]


def _probe_ids(tokenizer: Any, date: datetime.date) -> list[int]:
    text = _apply_template(tokenizer, _probe_messages(_ANSWER), date)
    return [int(token_id) for token_id in tokenizer(text, add_special_tokens=False)["input_ids"]]


def _derive_rules(tokenizer: Any, base: RenderingRules) -> RenderingRules:
    """Fill in the rules that tokenizer and template decide; text_as, end and date are taken from ``base``."""
    plain = tokenizer("a", add_special_tokens=True)["input_ids"]
    adds_own_end = len(plain) > 0 and plain[-1] in {tokenizer.sep_token_id, tokenizer.eos_token_id} - {None}
    eos = None if adds_own_end or tokenizer.eos_token is None else str(tokenizer.eos_token)
    found: dict[str, Any] = {"end_of_text": eos}
    if tokenizer.chat_template is None:
        found |= {"chat_template": None, "chat_begins_with_bos": False, "end_of_turn": None, "thinking": "none"}
        return base.model_copy(update=found)
    ids = _probe_ids(tokenizer, base.date)
    thought = _apply_template(tokenizer, _probe_messages(f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"), base.date)
    found |= {
        "chat_template": sha256_of(tokenizer.chat_template),
        "chat_begins_with_bos": tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id,
        "end_of_turn": _end_of_turn(tokenizer, base.date) or (tokenizer.eos_token and str(tokenizer.eos_token)),
        "thinking": "kept" if _THOUGHT in thought else "dropped",
    }
    return base.model_copy(update=found)


def _end_tokens(tokenizer: Any, rules: RenderingRules) -> list[str]:
    """What a policy's text may stop at: the ends that the rules name, EOS, and padding behind them."""
    found = (rules.end_of_turn, rules.end_of_text, tokenizer.eos_token, tokenizer.pad_token)
    return list(dict.fromkeys(str(token) for token in found if token))


def _special_tokens(tokenizer: Any) -> list[str]:
    """All special tokens as text, longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    found = {*map(str, tokenizer.all_special_tokens), *(str(token) for token in added if token.special)}
    return sorted(found - {""}, key=lambda token: (-len(token), token))


def _end_of_turn(tokenizer: Any, date: datetime.date) -> str | None:
    """The first special token that the template prints after the last answer."""
    text = _apply_template(tokenizer, _probe_messages(_ANSWER), date)
    after = text[text.rindex(_ANSWER) + len(_ANSWER) :]
    special = set(tokenizer.all_special_ids) | {
        token_id for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special
    }
    for token_id in tokenizer(after, add_special_tokens=False)["input_ids"]:
        if token_id in special:
            return str(tokenizer.convert_ids_to_tokens(token_id))
    return None
