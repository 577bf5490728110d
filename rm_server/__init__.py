"""The reward server: a scoring engine and the HTTP application around it. Importing it loads no torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rm_server.app import create_app
    from rm_server.service import ScoringService
    from rm_server.settings import ServerSettings, load_settings

__all__ = ["ScoringService", "ServerSettings", "create_app", "load_settings"]

_MODULES = {"create_app": "app", "ScoringService": "service", "ServerSettings": "settings", "load_settings": "settings"}


def __getattr__(name: str) -> Any:
    # At first use: `python -m rm_server.auth` would otherwise find its own module loaded before it runs.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"rm_server.{_MODULES[name]}"), name)
