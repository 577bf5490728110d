"""Golden scores: shipped neutral conversations, with the rewards that the trainer computed for them in fp32.

Invariant: they catch what hashes of files cannot, a changed renderer, forward pass or library; a new machine is within
the tolerance that is stored beside them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel, ConfigDict

from rm_core.chat import Renderer, sha256_of

if TYPE_CHECKING:
    from rm_core.model import RewardModel

_FILE = Path(__file__).with_name("golden.json")
_FROZEN = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class GoldenScore(BaseModel):
    """One shipped conversation with the reward that the trainer computed for it in fp32."""

    model_config = _FROZEN

    name: str
    ids_sha256: str
    num_tokens: int
    reward: float


class Golden(BaseModel):
    """The golden scores and how far a loaded model may be from them, per dtype, in reward units."""

    model_config = _FROZEN

    tolerance: dict[str, float]
    scores: list[GoldenScore]


def golden_ids(renderer: Renderer, max_length: int) -> list[tuple[str, list[int]]]:
    """The shipped conversations that fit the context, as ids; for a model without a chat template, as plain text."""
    rendered = []
    for entry in json.loads(_FILE.read_text(encoding="utf-8")):
        messages = entry["messages"]
        if renderer.rules.chat_template is None:
            ids = renderer.render_text("\n".join(message["content"] for message in messages), text_as="raw")
        else:
            ids = renderer.render_conversation(messages)
        if len(ids) <= max_length:
            rendered.append((entry["name"], ids))
    return rendered


def measure_golden(reloaded: "RewardModel", reward_std: float) -> Golden:
    """fp32 golden scores of a model loaded in fp32, and the tolerance per dtype."""
    conversations = golden_ids(reloaded.renderer, reloaded.max_length)
    exact = score_each(reloaded, [ids for _, ids in conversations])
    # Other machines and library versions sum in another order; ten times the bound between batches covers that.
    tolerance = {"float32": 1e-3 * max(reward_std, 1.0)}
    if reloaded.network.is_decoder:
        reloaded.to_dtype("bfloat16")
        rounded = score_each(reloaded, [ids for _, ids in conversations])
        # bf16 error is a property of model and text; four times the worst seen leaves room for other kernels.
        tolerance["bfloat16"] = max(4 * float(np.abs(rounded - exact).max()), 0.02 * max(reward_std, 1.0))
    scores = [
        GoldenScore(name=name, ids_sha256=_hash_ids(ids), num_tokens=len(ids), reward=float(reward))
        for (name, ids), reward in zip(conversations, exact, strict=True)
    ]
    return Golden(tolerance=tolerance, scores=scores)


def find_drift(golden: Golden, model: "RewardModel") -> str | None:
    """The conversation whose ids or reward are no longer those recorded, and how; None where all are."""
    tolerance = golden.tolerance.get(model.dtype)
    conversations = dict(golden_ids(model.renderer, model.max_length))
    # A later version may drop a conversation; the others still guard.
    scores = [expected for expected in golden.scores if expected.name in conversations]
    for expected in scores:
        ids = conversations[expected.name]
        if _hash_ids(ids) != expected.ids_sha256:
            return (
                f"{expected.name!r} gives {len(ids)} other token ids than the {expected.num_tokens} recorded: "
                "renderer, tokenizer or template changed"
            )
    rewards = model.score_ids([conversations[expected.name] for expected in scores])
    for expected, reward in zip(scores, map(float, rewards), strict=True):
        if tolerance is not None and not abs(reward - expected.reward) <= tolerance:
            return (
                f"{expected.name!r} scores {reward:.6g} instead of {expected.reward:.6g} (allowed in {model.dtype}: "
                f"{tolerance:.2g}): the forward pass, a library or the weights changed"
            )
    return None


def score_each(model: "RewardModel", sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """Rewards, fp32 [N], each sequence in a forward of its own."""
    return np.concatenate([model.score_ids([ids]) for ids in sequences])


def _hash_ids(ids: Sequence[int]) -> str:
    return sha256_of(np.asarray(ids, dtype="<i8").tobytes())
