"""The rules by which text becomes ids, derived from a tokenizer and its chat template by rendering probes.

Invariant: what decides the ids is recorded here, and the same tokenizer and template give the same rules.
"""

import datetime
import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rm_core.chat_template import apply_template

# The content of the probe conversations. Plain lower-case letters: no template changes or strips them.
_QUESTION, _ANSWER, _THOUGHT = "questionprobe", "answerprobe", "thoughtprobe"


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


def derive_rules(tokenizer: Any, base: RenderingRules) -> RenderingRules:
    """Fill in the rules that tokenizer and template decide; text_as, end and date are taken from ``base``."""
    plain = tokenizer("a", add_special_tokens=True)["input_ids"]
    adds_own_end = len(plain) > 0 and plain[-1] in {tokenizer.sep_token_id, tokenizer.eos_token_id} - {None}
    eos = None if adds_own_end or tokenizer.eos_token is None else str(tokenizer.eos_token)
    found: dict[str, Any] = {"end_of_text": eos}
    if tokenizer.chat_template is None:
        found |= {"chat_template": None, "chat_begins_with_bos": False, "end_of_turn": None, "thinking": "none"}
        return base.model_copy(update=found)
    ids = probe_ids(tokenizer, base.date)
    thought = apply_template(tokenizer, _probe_messages(f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"), base.date)
    found |= {
        "chat_template": sha256_of(tokenizer.chat_template),
        "chat_begins_with_bos": tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id,
        "end_of_turn": _end_of_turn(tokenizer, base.date) or (tokenizer.eos_token and str(tokenizer.eos_token)),
        "thinking": "kept" if _THOUGHT in thought else "dropped",
    }
    return base.model_copy(update=found)


def _end_of_turn(tokenizer: Any, date: datetime.date) -> str | None:
    """The first special token that the template prints after the last answer."""
    text = apply_template(tokenizer, _probe_messages(_ANSWER), date)
    after = text[text.rindex(_ANSWER) + len(_ANSWER) :]
    special = set(tokenizer.all_special_ids) | {
        token_id for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special
    }
    for token_id in tokenizer(after, add_special_tokens=False)["input_ids"]:
        if token_id in special:
            return str(tokenizer.convert_ids_to_tokens(token_id))
    return None


def _probe_messages(answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": answer}]


def probe_ids(tokenizer: Any, date: datetime.date) -> list[int]:
    """Ids of a question and an answer of plain words through the template."""
    text = apply_template(tokenizer, _probe_messages(_ANSWER), date)
    return [int(token_id) for token_id in tokenizer(text, add_special_tokens=False)["input_ids"]]


def end_tokens(tokenizer: Any, rules: RenderingRules) -> list[str]:
    """What a policy's text may stop at: the ends that the rules name, EOS, and padding behind them."""
    found = (rules.end_of_turn, rules.end_of_text, tokenizer.eos_token, tokenizer.pad_token)
    return list(dict.fromkeys(str(token) for token in found if token))


def special_tokens(tokenizer: Any) -> list[str]:
    """All special tokens as text, longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    found = {*map(str, tokenizer.all_special_tokens), *(str(token) for token in added if token.special)}
    return sorted(found - {""}, key=lambda token: (-len(token), token))
