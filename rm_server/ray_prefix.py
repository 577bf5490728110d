"""Which replica a request should go to: the prompt that it begins with, and the replicas in that prompt's order.

Invariant: no state. Every process that routes, and the same one after a restart, gives a prompt the same order, and a
replica that comes or goes moves only its own prompts. Imports no Ray.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import orjson

_FREE_REQUESTS = 16
"""A replica may always have this many requests more than the average before its prompts go elsewhere."""
_FREE_SHARE = 1.25
"""And this many times the average (consistent hashing with bounded loads, Mirrokni et al. 2018)."""


def prompt_key(body: bytes, prefix_chars: int) -> bytes | None:
    """A hash of the prompt of a request of any route; None where there is none, or the body is not JSON.

    Where a request says what its prompt is, all of it counts. A whole text, in which nobody marked where the answer
    begins, counts with its first ``prefix_chars`` characters, and token ids with a quarter as many. Of many groups the
    first one counts.
    """
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    found = _prompt_of(request, prefix_chars) if isinstance(request, dict) else None
    return None if found is None else hashlib.blake2b(orjson.dumps(found), digest_size=16).digest()


def _prompt_of(request: dict[str, Any], prefix_chars: int) -> Any:
    groups = request.get("groups")
    if isinstance(groups, list) and groups and isinstance(groups[0], dict):
        return groups[0].get("prompt")
    for name in ("prompt", "prompts"):
        if request.get(name):
            return _first(request[name]) if name == "prompts" else request[name]
    for name in ("conversations", "messages", "texts", "text", "query", "input", "input_ids"):
        if request.get(name):
            return _beginning(request[name], prefix_chars)
    return None


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def _beginning(value: Any, prefix_chars: int) -> Any:
    """Of a text its first characters, of token ids the first, of messages all but the last; of a list of these, of its
    first element."""
    if isinstance(value, str):
        return value[:prefix_chars]
    if not isinstance(value, list):
        return None
    if isinstance(value[0], dict):
        return value[:-1] or None
    if isinstance(value[0], int):
        return value[: max(prefix_chars // 4, 1)]
    return _beginning(value[0], prefix_chars) if value[0] else None


def rank_replicas(key: bytes, names: Sequence[str], loads: Sequence[int]) -> list[int]:
    """Indexes of the replicas, the best one for this key first.

    ``names`` (R) are the replicas' lasting names, ``loads`` (R) the requests that each is working on. The order is
    that of a hash of key and name (rendezvous hashing); those with more requests than their share go last, the least
    loaded of them first.
    """
    most = math.ceil(_FREE_SHARE * sum(loads) / max(len(loads), 1)) + _FREE_REQUESTS
    weights = [hashlib.blake2b(key + name.encode(), digest_size=8).digest() for name in names]
    with_room = [i for i in range(len(names)) if loads[i] < most]
    rest = [i for i in range(len(names)) if loads[i] >= most]
    return sorted(with_room, key=lambda i: weights[i]) + sorted(rest, key=lambda i: loads[i])


def replicas_for(queued_tokens: float, tokens_per_replica: int) -> int:
    """How many replicas the tokens that are admitted and not answered, over all replicas, ask for."""
    return math.ceil(queued_tokens / tokens_per_replica)
