"""A client that is made when it is first used, so that what holds it can be pickled and sent to another process.

Invariant: no connection crosses a process border: pickling drops the clients, and after a fork new ones are made.
"""

import os
import threading
from collections.abc import Mapping
from typing import Any

from rm_client.async_client import AsyncRewardClient
from rm_client.client import RewardClient


class LazyClient:
    """``settings``: keyword arguments of RewardClient, or of AsyncRewardClient. Safe to use from many threads."""

    def __init__(self, url: str, settings: Mapping[str, Any]) -> None:
        self._url, self._settings = url, dict(settings)
        self._made: dict[type, tuple[int, Any]] = {}
        self._lock = threading.Lock()

    def blocking(self) -> RewardClient:
        """The process's RewardClient."""
        client: RewardClient = self._get(RewardClient)
        return client

    def asynchronous(self) -> AsyncRewardClient:
        """The process's AsyncRewardClient."""
        client: AsyncRewardClient = self._get(AsyncRewardClient)
        return client

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._url, self._settings)

    def _get(self, kind: type) -> Any:
        with self._lock:
            pid, client = self._made.get(kind, (0, None))
            if pid != os.getpid():
                client = kind(self._url, **self._settings)
                self._made[kind] = (os.getpid(), client)
            return client
