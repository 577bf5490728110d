"""What ``GET /info`` says: the reward's identity, how text becomes tokens, in what numbers it is computed, limits."""

import importlib.metadata
import platform
from typing import Any

from rm_server.scorer import ServedModel
from rm_server.service import ScoringService

SQUASHING = "none: rewards are raw fp32 logits on every route"


def describe(service: ScoringService, model: ServedModel) -> dict[str, Any]:
    """JSON-ready facts about a loaded model and its server."""
    settings, record = service.settings, model.record
    return {
        "model": model.name,
        "reward_id": model.reward_id,
        "tokenizer_hash": model.tokenizer_hash,
        "vocab_size": model.vocab_size,
        "rendering": model.renderer.rules.model_dump(mode="json"),
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
        "prefix_sharing": "on" if model.sharing_off is None else f"off: {model.sharing_off}",
        "limits": {
            name: getattr(settings, name)
            for name in (
                "max_batch_tokens",
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


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
