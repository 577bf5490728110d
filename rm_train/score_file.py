"""``rm-train score``: rewards for the rows of a JSONL file, by the code that serves them.

Invariant: one line out for one line in, in order; a line that cannot be scored says why and stops nothing.
"""

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

from rm_core.chat import RenderError
from rm_core.model import RewardModel
from rm_train.scoring import score_sequences


def score_lines(model: RewardModel, lines: Iterable[str], *, max_tokens: int) -> Iterator[dict[str, Any]]:
    """Score JSON lines of one of these forms and yield one answer for each.

    ``{"prompt", "completions": [...]}``, ``{"prompt", "completion"}``, ``{"text"}`` or ``{"messages"}``; prompts and
    completions are text or messages as in ``POST /score``. The answer has ``rewards`` or ``reward``, or ``error``.
    """
    rows: list[tuple[dict[str, Any], list[list[int]]]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row, sequences = _render_line(model, line)
        except (RenderError, ValueError) as error:
            rows.append(({"line": number, "error": str(error)}, []))
            continue
        rows.append(({"line": number, **row}, sequences))
    rewards = iter(score_sequences(model, [ids for _, ids_ in rows for ids in ids_], max_tokens=max_tokens).tolist())
    for row, sequences in rows:
        if "error" in row:
            yield row
            continue
        scored = [next(rewards) for _ in sequences]
        if not all(map(math.isfinite, scored)):
            yield {"line": row["line"], "error": "the model gave a reward that is not a finite number"}
            continue
        many = row.pop("many")
        yield {**row, "rewards": scored} if many else {**row, "reward": scored[0]}


def _render_line(model: RewardModel, line: str) -> tuple[dict[str, Any], list[list[int]]]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("must be a JSON object")
    known = {"id": row["id"]} if "id" in row else {}
    renderer = model.renderer
    if "completions" in row:
        if not isinstance(row["completions"], list):
            raise ValueError("completions: must be a list")
        sequences = [renderer.render(row.get("prompt"), completion) for completion in row["completions"]]
        known["many"] = True
    elif "completion" in row:
        sequences = [renderer.render(row.get("prompt"), row["completion"])]
    elif "messages" in row:
        sequences = [renderer.render_conversation(row["messages"])]
    elif "text" in row:
        sequences = [renderer.render_text(row["text"])]
    else:
        raise ValueError("has none of completions, completion, messages, text")
    for ids in sequences:
        if len(ids) > model.max_length:
            raise ValueError(f"has {len(ids)} tokens, the model reads at most {model.max_length}")
    known.setdefault("many", False)
    return known, sequences
