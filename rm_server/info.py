"""What ``GET /info`` says: the reward's identity, how text becomes tokens, in what numbers it is computed, limits."""

import importlib.metadata
import platform
from typing import Any, cast

from rm_server.engine import why_no_cache, why_no_sharing
from rm_server.scorer import ServedModel
from rm_server.service import ScoringService
from rm_server.settings import ServerSettings

SQUASHING = (
    "none: rewards are raw fp32 logits. Two exceptions by protocol: POST /classify in vLLM's form answers their "
    "logistic function unless use_activation is false; scores (not rewards) of /get_reward are that of the "
    "standardised reward"
)


def describe(service: ScoringService, model: ServedModel) -> dict[str, Any]:
    """JSON-ready facts about a loaded model and its server."""
    settings, record, rules = service.settings, model.record, model.renderer.rules
    return {
        "model": model.name,
        "reward_id": model.reward_id,
        **_conservative(settings, model),
        "tokenizer_hash": model.tokenizer_hash,
        "vocab_size": model.vocab_size,
        "rendering": rules.model_dump(mode="json") if rules is not None else None,
        "max_length": service.max_length,
        "training_length": record.training_length if record else None,
        "reward_mean": record.reward_mean if record else None,
        "reward_std": record.reward_std if record else None,
        "temperature": record.temperature if record else None,
        "squashing": SQUASHING,
        "dtype": model.dtype,
        "dtype_reason": model.dtype_reason,
        "head_dtype": "float32",
        "device": str(model.device),
        "exact": settings.exact,
        "prefix_sharing": _on_unless(why_no_sharing(model, settings)),
        "prefix_cache": _on_unless(why_no_cache(model, settings)),
        "token_rewards": _on_unless(model.token_rewards_off),
        **({} if service.rewards is None else service.rewards.describe(model)),
        "limits": {
            name: getattr(settings, name)
            for name in (
                "max_batch_tokens",
                "prefix_cache_mb",
                "max_queued_tokens",
                "max_queued_items",
                "max_queue_seconds",
                "max_request_items",
                "max_body_bytes",
                "default_deadline_ms",
            )
        },
        "versions": {name: _version(name) for name in ("betterthan", "torch", "transformers", "tokenizers", "fastapi")}
        | {"python": platform.python_version()},
    }


def _conservative(settings: ServerSettings, model: ServedModel) -> dict[str, Any]:
    if not settings.conservative:
        return {"conservative": 0.0}
    return {"conservative": settings.conservative, "checkpoint_reward_id": cast(Any, model).checkpoint_reward_id}


def _on_unless(reason: str | None) -> str:
    return "on" if reason is None else f"off: {reason}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
