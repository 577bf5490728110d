"""One replica on Ray Serve: the same service and application as ``rm-server``, called in the process.

Invariant: a request is answered by the application exactly as over a socket; a replica is ready when `/ready` is.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from prometheus_client import Metric
from ray import serve
from starlette.types import ASGIApp

from rm_server.app import create_app
from rm_server.asgi_call import Answer, Call, answer, stream
from rm_server.loader import load_model
from rm_server.logs import configure_logging, log_loop_problem
from rm_server.service import ScoringService
from rm_server.settings import ServerSettings, SettingsError
from rm_server.switch import Switch


class Scorer:
    """The deployment. Which checkpoint it serves is in ``user_config``, so that it can change without a restart."""

    def __init__(self, settings: dict[str, Any]) -> None:
        replica = serve.get_replica_context().replica_id.unique_id
        self._replica = replica
        self._settings = ServerSettings.model_validate(settings)
        if self._settings.audit_log is not None:  # replicas of one machine would move it away from each other
            own = {"audit_log": f"{self._settings.audit_log}.{replica}"}
            self._settings = self._settings.model_copy(update=own)
        self._checkpoint: str | None = None
        self._service: ScoringService | None = None

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Ray calls this once before the first request, and whenever ``user_config`` has changed.

        The new checkpoint is loaded beside the old one, which finishes what it was asked. Raises ServerError or
        ValueError where it cannot be served, and Ray then replaces this replica.
        """
        checkpoint: str | None = user_config.get("checkpoint")
        if self._service is None:
            await self._start(checkpoint)
        elif checkpoint is None:
            raise SettingsError("user_config.checkpoint: is missing")
        elif checkpoint != self._checkpoint:
            await self._switch.swap(checkpoint)
        self._checkpoint = checkpoint

    async def _start(self, checkpoint: str | None) -> None:
        configure_logging(self._settings)
        asyncio.get_running_loop().set_exception_handler(log_loop_problem)
        settings = self._settings.model_copy(update={"checkpoint": checkpoint})
        service = ScoringService(settings)
        self._switch = Switch(service)
        self._app: ASGIApp = create_app(service, settings, switch=self._switch)
        await service.start(lambda: load_model(settings) if checkpoint else None)
        self._service = service

    async def forward(self, call: Call, prefix_key: bytes | None = None) -> Answer:
        """Answer one request. ``prefix_key`` is for the router alone."""
        return await answer(self._app, call)

    async def stream(
        self, call: Call, seconds: float, prefix_key: bytes | None = None
    ) -> AsyncIterator[Answer | bytes]:
        """Answer one request part by part, for so long. ``prefix_key`` is for the router alone."""
        async for part in stream(self._app, call, seconds):
            yield part

    def metrics(self) -> list[Metric]:
        """What this replica measured, each sample with the label ``replica``."""
        assert self._service is not None, "this is a bug: asked before it was started"
        self._service.update_gauges()
        families = list(self._service.metrics.registry.collect())
        for family in families:
            family.samples = [
                sample._replace(labels={**sample.labels, "replica": self._replica}) for sample in family.samples
            ]
        return families

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For the autoscaling policy: tokens that are admitted and not answered."""
        return {"queued_tokens": float(self._service.admission.tokens if self._service is not None else 0)}

    def check_health(self) -> None:
        """Raises what `/ready` answers. Ray replaces a replica that fails three times in a row."""
        if self._service is not None and (error := self._service.why_not_ready()) is not None:
            raise error

    async def __del__(self) -> None:
        """Ray calls this when the replica has answered what it had, or its time to do so is over."""
        if self._service is not None:
            self._switch.close()
            await self._service.stop()
