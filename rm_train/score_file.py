"""``rm-train score``: rewards for the rows of a JSONL file, by the code that serves them.

Invariant: one line out for one line in, in order; a line that cannot be scored says why and stops nothing.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rm_core.chat import RenderError
from rm_core.model import RewardModel
from rm_train.rows import kind_of
from rm_train.scoring import chunks, need_heads, score_heads

_CHUNK = 2048
"""Lines held at a time."""


def score_lines(
    model: RewardModel,
    lines: Iterable[str | bytes],
    *,
    max_tokens: int,
    components: bool = False,
    conservative: float = 0.0,
) -> Iterator[dict[str, Any]]:
    """Score JSON lines (bytes are UTF-8) of one of these forms and yield one answer for each, a chunk at a time.

    ``{"prompt", "completions": [...]}``, ``{"prompt", "completion"}``, ``{"text"}`` or ``{"messages"}``; prompts and
    completions are text or messages as in ``POST /score``, a completion also ``{"content", "finished"}``. An ``id``
    comes back; other fields are not read. The answer has ``rewards`` or ``reward``, or ``error``.

    Of a checkpoint with several heads, ``components`` adds ``mean``, ``std`` and ``min`` over them, each shaped as the
    rewards, and ``conservative`` k makes the reward mean − k·std. Raises CheckpointError where it has one head alone.
    """
    if components or conservative:
        need_heads(model)
    for chunk in chunks(enumerate(lines, 1), _CHUNK):
        yield from _score_chunk(model, chunk, max_tokens=max_tokens, components=components, conservative=conservative)


def _score_chunk(
    model: RewardModel,
    lines: Iterable[tuple[int, str | bytes]],
    *,
    max_tokens: int,
    components: bool,
    conservative: float,
) -> Iterator[dict[str, Any]]:
    """``score_lines`` of numbered lines that are held together, and share what they begin with."""
    rows: list[tuple[dict[str, Any], list[list[int]]]] = []
    for number, line in lines:
        if not line.strip():
            continue
        try:
            row, sequences = _render_line(model, line)
        except (RenderError, ValueError) as error:
            rows.append(({"line": number, "error": str(error)}, []))
            continue
        rows.append(({"line": number, **row}, sequences))
    found, heads = score_heads(model, [ids for _, ids_ in rows for ids in ids_], max_tokens=max_tokens)
    parts = {}
    if heads is not None:
        parts = {"mean": found, "std": heads.std(axis=1), "min": heads.min(axis=1)}
        found = found - conservative * parts["std"]
    rewards, start = iter(found.tolist()), 0
    for row, sequences in rows:
        if "error" in row:
            yield row
            continue
        scored = [next(rewards) for _ in sequences]
        here = slice(start, start + len(scored))
        start += len(scored)
        if not all(map(math.isfinite, scored)):
            yield {"line": row["line"], "error": "the model gave a reward that is not a finite number"}
            continue
        many = row.pop("many")
        answer = {**row, "rewards": scored} if many else {**row, "reward": scored[0]}
        if components:
            shown = {name: values[here].tolist() for name, values in parts.items()}
            answer["components"] = shown if many else {name: values[0] for name, values in shown.items()}
        yield answer


def _render_line(model: RewardModel, line: str | bytes) -> tuple[dict[str, Any], list[list[int]]]:
    try:
        row = json.loads(line if isinstance(line, str) else line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {error.start} of the line)") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"must be a JSON object, not {kind_of(row)}")
    return render_row(model, row)


def render_row(model: RewardModel, row: Mapping[str, Any]) -> tuple[dict[str, Any], list[list[int]]]:
    """Ids of every completion of one row, and what its answer begins with. Raises RenderError or ValueError."""
    forms = [name for name in ("completions", "completion", "messages", "text") if name in row]
    if len(forms) != 1:
        raise ValueError(
            f"must have one of completions, completion, messages, text; it has {' and '.join(forms) or 'none'}"
        )
    form, value, prompt = forms[0], row[forms[0]], row.get("prompt")
    if form in ("messages", "text"):
        if prompt is not None:
            raise RenderError(
                "prompt", f"stands beside {form}, which is all that is scored; name the answer completion"
            )
        if not isinstance(value, str if form == "text" else list):
            raise RenderError(
                form, f"must be {'text' if form == 'text' else 'a list of messages'}, not {kind_of(value)}"
            )
        sequences = [
            model.renderer.render_text(value) if isinstance(value, str) else model.renderer.render_conversation(value)
        ]
    else:
        if prompt is not None:
            _check_content("prompt", prompt)
        if form == "completion":
            sequences = [_render_completion(model, prompt, value, form)]
        elif isinstance(value, list):
            sequences = [_render_completion(model, prompt, item, f"completions[{i}]") for i, item in enumerate(value)]
        else:
            raise RenderError(form, f"must be a list, not {kind_of(value)}")
    for ids in sequences:
        if len(ids) > model.max_length:
            raise ValueError(f"has {len(ids)} tokens, the model reads at most {model.max_length}")
    return {**({"id": row["id"]} if "id" in row else {}), "many": form == "completions"}, sequences


def _render_completion(model: RewardModel, prompt: Any, value: Any, name: str) -> list[int]:
    finished = True
    if isinstance(value, dict):
        if unknown := set(value) - {"content", "finished"}:
            raise RenderError(f"{name}.{min(unknown)}", 'is unknown; a completion is {"content": …, "finished": …}')
        finished = value.get("finished", True)
        if not isinstance(finished, bool):
            raise RenderError(f"{name}.finished", f"must be true or false, not {kind_of(finished)}")
        name, value = f"{name}.content", value.get("content")
    _check_content(name, value)
    try:
        return model.renderer.render(prompt, value, finished=finished)
    except RenderError as error:
        if error.field == "completion":
            raise RenderError(name, error.message) from None
        raise


def _check_content(name: str, value: Any) -> None:
    if not isinstance(value, str | list):
        raise RenderError(name, f"must be text or a list of messages, not {kind_of(value)}")
