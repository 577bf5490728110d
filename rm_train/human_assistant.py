"""Parse the text form of Anthropic's HH data: ``\\n\\nHuman: … \\n\\nAssistant: …``.

Invariant: the words of every turn survive; only the speaker marks and the blanks around a turn go.
"""

import re
from collections.abc import Mapping
from typing import Any

_MARK = re.compile(r"(?:^|\n\n)[ \t]*(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def is_human_assistant(text: str) -> bool:
    """Whether a text begins with a human's turn and goes on with an assistant's."""
    start = text.lstrip()
    return start.startswith("Human:") and "\n\nAssistant:" in start


def parse_human_assistant(text: str) -> tuple[Mapping[str, Any], ...]:
    """Split such a text into messages; turns of one speaker in a row, which HH has, become one message."""
    text = text.strip()
    marks = list(_MARK.finditer(text))
    messages: list[dict[str, Any]] = []
    for index, mark in enumerate(marks):
        end = marks[index + 1].start() if index + 1 < len(marks) else len(text)
        role, words = _ROLES[mark.group(1)], text[mark.end() : end].strip()
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] = f"{messages[-1]['content']}\n\n{words}".strip()
        else:
            messages.append({"role": role, "content": words})
    return tuple(messages)
