"""Ray Serve's two seams: a request router that keeps a prompt's answers together, and autoscaling on queued tokens.

Invariant: here is only what talks to Ray; what is decided is in ``ray_prefix``.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from rm_server.ray_prefix import rank_replicas, replicas_for


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Routes a call with ``prefix_key=…`` to its prompt's replica, others to the least loaded one."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas: Ray takes the least loaded one with room of the first rank that has any."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # if none of them has room
        key: bytes | None = pending_request.kwargs.get("prefix_key")
        if key is None:
            return [candidate_replicas]
        names = [replica.replica_id.unique_id for replica in candidate_replicas]
        loads = [self.replica_queue_len_cache.get(replica.replica_id) or 0 for replica in candidate_replicas]
        return [[candidate_replicas[i]] for i in rank_replicas(key, names, loads)]


class QueuedTokensPolicy:
    """As many replicas as the queued tokens ask for. Ray keeps the number within its bounds, and applies its delays."""

    def __init__(self, tokens_per_replica: int) -> None:
        self._tokens_per_replica = tokens_per_replica

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas wanted, and no state."""
        reported = context.aggregated_metrics or {}
        queued = sum(reported.get("queued_tokens", {}).values())
        return replicas_for(queued, self._tokens_per_replica), {}
