"""What the server measures, for Prometheus. Names carry their unit; every name is listed in docs/serving.md."""

from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from rm_server.errors import NonFiniteRewardError, ServerError
from rm_server.groups import Request

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512)
_REWARDS = (-20, -10, -7.5, -5, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 5, 7.5, 10, 20)


class Metrics:
    """One registry of its own for one server, so that two can live in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self.request_seconds = histogram(
            "rm_request_seconds", "From arrival to the answer, of requests answered with 200", _SECONDS, "route"
        )
        self.admission_seconds = histogram("rm_admission_seconds", "A part's wait for room in the queue", _SECONDS)
        self.tokenize_seconds = histogram("rm_tokenize_seconds", "Rendering and tokenising one part", _SECONDS)
        self.queue_seconds = histogram("rm_queue_seconds", "An item's wait between admission and its batch", _SECONDS)
        self.forward_seconds = histogram("rm_forward_seconds", "Scoring one batch, retries included", _SECONDS)
        self.batch_tokens_before = histogram(
            "rm_batch_tokens_before_sharing", "Sum of the sequence lengths of a batch", _TOKENS
        )
        self.batch_tokens_after = histogram(
            "rm_batch_tokens_after_sharing", "Tokens computed for a batch, shared and cached prefixes apart", _TOKENS
        )
        self.cache_hit_tokens = counter("rm_cache_hit_tokens", "Tokens that came from the prefix cache")
        self.cache_evictions = counter("rm_cache_evictions", "Cached beginnings that were dropped to make room")
        self.batch_items = histogram("rm_batch_items", "Items in a batch", _COUNTS)
        self.batch_requests = histogram("rm_batch_requests", "Requests that share a batch", _COUNTS)
        self.reward = histogram("rm_reward", "Raw rewards answered", _REWARDS)

        self.requests_admitted = counter("rm_requests_admitted", "Requests that got room for a first part")
        self.requests_refused = counter("rm_requests_refused", "Requests answered with an error", "reason")
        self.requests_cancelled = counter("rm_requests_cancelled", "Requests whose caller left before the answer")
        self.items_scored = counter("rm_items_scored", "Items that got a reward")
        self.items_failed = counter("rm_items_failed", "Items that got an error instead of a reward", "reason")
        self.items_truncated = counter("rm_items_truncated", "Items cut to the length limit")
        self.items_unfinished = counter("rm_items_unfinished", "Items sent as finished: false")
        self.items_over_training_length = counter(
            "rm_items_over_training_length", "Items longer than any sequence in training"
        )
        self.items_non_finite = counter("rm_items_non_finite", "Items for which the model gave NaN or infinity")
        self.forward_failures = counter("rm_forward_failures", "Forwards that raised, by cause", "cause")
        self.probes = counter("rm_probes", "Probe forwards of an idle server", "outcome")
        self.audit_records = counter("rm_audit_records", "Records of the audit log, written or lost", "outcome")
        self.stalls = counter(
            "rm_stalls", "Forwards and tokenising that took stall_seconds, and times without any success that did"
        )

        self.reward_recent_mean = Gauge(
            "rm_reward_recent_mean", "Mean of about the last 1000 rewards; NaN before the first", registry=registry
        )
        self.reward_drift = Gauge(
            "rm_reward_drift",
            "Recent mean minus the checkpoint's mean, in its standard deviations; NaN where it has none",
            registry=registry,
        )
        self.swaps = counter("rm_swaps", "Changes to another checkpoint", "outcome")
        self.verifier_seconds = Histogram(
            "rm_verifier_seconds",
            "One verifier on one answer, waiting for a worker not counted",
            ["part"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.verifiers_replaced = counter(
            "rm_verifier_workers_replaced", "Worker processes that died or were ended at their limit"
        )

        self.queued_tokens = Gauge("rm_queued_tokens", "Tokens admitted and not answered", registry=registry)
        self.queued_items = Gauge("rm_queued_items", "Items admitted and not answered", registry=registry)
        self.waiting_parts = Gauge("rm_waiting_parts", "Parts of requests that wait for room", registry=registry)
        self.token_limit = Gauge(
            "rm_batch_token_limit", "Tokens a batch may hold now; lower after running out of memory", registry=registry
        )
        self.cache_bytes = Gauge("rm_cache_bytes", "Bytes of the keys and values that are cached", registry=registry)
        self.cache_prefixes = Gauge("rm_cache_prefixes", "Beginnings of sequences that are cached", registry=registry)
        self.ready = Gauge("rm_ready", "1 while a forward succeeded lately", registry=registry)
        self.asleep = Gauge("rm_asleep", "1 while the model is put to sleep", registry=registry)
        ProcessCollector(registry=registry)  # memory, CPU time and open files; nothing where there is no /proc

    def count_refused(self, error: ServerError) -> None:
        """Count an answer that is an error."""
        self.requests_refused.labels(reason=error.type).inc()

    def count_outcomes(self, request: Request) -> None:
        """Count the items of an answered request."""
        for reward in request.rewards:
            if reward is not None:
                self.items_scored.inc()
                self.reward.observe(reward)
        for reason, count in Tally(error.type for error in request.errors.values()).items():
            self.items_failed.labels(reason=reason).inc(count)
            self.items_non_finite.inc(count if reason == NonFiniteRewardError.type else 0)
        self.items_truncated.inc(sum(request.truncated))
        self.items_over_training_length.inc(len(request.over_training_length))

    def render(self) -> bytes:
        """The exposition format of Prometheus."""
        return generate_latest(self.registry)
