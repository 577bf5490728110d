"""The one place where text becomes token ids: trainer, evaluator, server and every protocol route call ``Renderer``.

Invariant: one conversation has one sequence of ids, whether it comes as messages or as the text that a policy wrote
with the same chat template. What decides the ids is recorded in ``RenderingRules`` and stored in the checkpoint.
"""

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rm_core.chat_template import (
    Conversation,
    Message,
    RenderError,
    apply_template,
    check_nothing_dropped,
    plain_message,
)
from rm_core.rendering_rules import (
    RenderingRules,
    derive_rules,
    end_tokens,
    probe_ids,
    sha256_of,
    special_tokens,
    tokenizer_hash,
)


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
        self._ends = end_tokens(tokenizer, rules)
        self._special = re.compile("|".join(re.escape(token) for token in special_tokens(tokenizer)) or r"(?!)")
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
        return cls(tokenizer, derive_rules(tokenizer, base))

    def check_rules(self) -> None:
        """Raise RenderError naming the rule when tokenizer or template no longer do what the rules record."""
        rules = self.rules
        derived = derive_rules(self.tokenizer, rules)
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
        from the left. Both answers keep the same prompt, and neither loses its end; an answer that fits loses nothing
        of itself where the other is too long even without a prompt.
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
        # The same number of ids is cut from both, so that the two still answer one prompt, while there is one to cut.
        excess = max(map(len, both)) - max_length
        shared = next((i for i, (a, b) in enumerate(zip(*both, strict=False)) if a != b), min(map(len, both)))
        bos = self.tokenizer.bos_token_id
        shared -= shared > 0 and both[0][0] == bos  # which stays
        limits = [min(max_length, len(ids) - min(excess, shared)) for ids in both]
        cut = [truncate_left(ids, max(limit, 1), bos) for ids, limit in zip(both, limits, strict=True)]
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
        plain = [plain_message(message, index) for index, message in enumerate(messages)]
        text = apply_template(self.tokenizer, plain, self.rules.date)
        check_nothing_dropped(plain, text)
        return text

    def _probe_tail(self) -> list[int]:
        """What the template prints after the last turn's end token."""
        ids = probe_ids(self.tokenizer, self.rules.date)
        if not self._turn_end_ids or self._turn_end_ids[0] not in ids:
            return []
        last = len(ids) - 1 - ids[::-1].index(self._turn_end_ids[0])
        return ids[last + 1 :]


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


__all__ = [
    "Conversation",
    "Message",
    "RenderError",
    "Renderer",
    "RenderingRules",
    "sha256_of",
    "tokenizer_hash",
    "truncate_left",
]
